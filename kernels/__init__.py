"""GPU operators, each with a plain PyTorch specification, and the dispatcher that picks the backend for a call.

Nothing here depends on a model. A family is a folder: public functions in `__init__`, the specification in `reference`,
faster backends in further files. Importing this package registers every backend and needs neither a GPU nor Triton.
"""

from kernels import attention, gdpa, ikbo, jagged, moe, mxfp8, tokens
from kernels.core import dispatch
from kernels.core.operator import defined_in

__all__ = ["attention", "defined_in", "dispatch", "gdpa", "ikbo", "jagged", "moe", "mxfp8", "tokens"]
