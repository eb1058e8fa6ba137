"""GPU operators, each with a plain PyTorch specification, and the dispatcher that picks the backend for a call.

Nothing here depends on a model. A family is a folder: public functions in `__init__`, the specification in `reference`,
faster backends in further files. Importing this package registers every backend and needs neither a GPU nor Triton.
"""

from kernels import dispatch, gdpa, ikbo, jagged, moe, mxfp8, tokens
from kernels.custom_op import defined_in

__all__ = ["defined_in", "dispatch", "gdpa", "ikbo", "jagged", "moe", "mxfp8", "tokens"]
