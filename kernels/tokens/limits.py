"""Sizes that the operators on tokens serve."""

# Values of a row, or of a head, that a program keeps in registers; `activate` splits wider rows.
MAX_WIDTH = 8192
MANY = 2**14
"""Rows from which on a product with an epilogue of ours has enough tiles for a GPU."""
MAX_DEPTH = 2048
"""Terms of its sums up to which it is faster than PyTorch's product and a pass for what follows."""
