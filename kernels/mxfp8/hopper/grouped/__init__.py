"""Grouped products: one pipeline of tiles, and three ways to multiply in it."""
