"""Quantisation along rows, columns or both in one pass."""
