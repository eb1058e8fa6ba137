"""Sizes that the operators on tokens serve."""

MAX_WIDTH = 8192
"""Values of a row, or of a head, that a program keeps in registers; `activate` splits wider rows."""
MANY = 2**14
"""Rows from which on a product with an epilogue of ours has enough tiles for a GPU."""
MAX_DEPTH = 2048
"""Terms of the sums of such a product: with more of them, what is saved weighs less than PyTorch's faster product."""
TURNED_HEADS = (64, 128)
"""Widths of heads that are rotated in a product: both halves of a pair of features are in one thread."""
