"""Interactions and compressions of a row's tokens."""
