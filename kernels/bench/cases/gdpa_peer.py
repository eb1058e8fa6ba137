"""The Triton kernel of ads_model_kernel_library as a contender, from a checkout that GEMSMITH_PEER_GDPA names.

Its files are not a package that could be installed. The variable gives the folder `gdpa` of the repository
(github.com/facebookresearch/ads_model_kernel_library), whose modules import each other as `ads_mkl.ops.oss.gdpa`.
For upstream Triton the annotations `: object` of its backward kernels have to be deleted from that checkout.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

from torch import Tensor

from kernels.core.dispatch import UnsupportedError

VARIABLE = "GEMSMITH_PEER_GDPA"
PACKAGE = "ads_mkl.ops.oss.gdpa"
MODULE = "triton.triton_generalized_dot_product_attention"


@cache
def load_peer() -> Callable[..., Tensor]:
    """Its function of (query, key, value, query_offset, key_offset, max_seq_len_q, max_seq_len_kv, ...).

    UnsupportedError with the reason when there is none.
    """
    place = os.environ.get(VARIABLE)
    if not place:
        raise UnsupportedError(f"{VARIABLE} does not name a checkout of its folder gdpa")
    if not (Path(place) / "triton").is_dir():
        raise UnsupportedError(f"{VARIABLE}={place} has no folder triton")
    name = ""
    for part in PACKAGE.split("."):
        name = f"{name}.{part}" if name else part
        package = ModuleType(name)
        package.__path__ = [place] if name == PACKAGE else []
        sys.modules[name] = package
    try:
        module = importlib.import_module(f"{PACKAGE}.{MODULE}")
    except Exception as error:
        raise UnsupportedError(f"{VARIABLE}={place} cannot be imported: {error!r}") from error
    return module.generalized_dot_product_attention
