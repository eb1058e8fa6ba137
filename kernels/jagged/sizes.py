"""Lengths of rows at which kernels of jagged products change."""

SHORT = 128  # places; rows of fewer do not fill tiles of 64
LONG = 1024  # places of a row; the kernel that gives each row to one program keeps to rows of no more
