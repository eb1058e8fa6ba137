"""FBGEMM's kernels of requests and candidates as contenders, from a checkout that GEMSMITH_PEER_IKBO names.

Its files are not part of the FBGEMM wheel. The variable gives the folder `fbgemm_gpu/experimental/ikbo/ikbo` of the
repository (github.com/pytorch/FBGEMM). Its persistent kernels are written in TLX, an extension that only Meta's fork of
Triton has: `pip install fbtriton` in place of triton. Its kernel in plain Triton takes a helper from a file of those,
so without the fork an empty module stands in for what that file imports from it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

from torch import Tensor

from kernels.core.dispatch import UnsupportedError

VARIABLE = "GEMSMITH_PEER_IKBO"
PACKAGE = "fbgemm_ikbo"
TLX = "triton.language.extra.tlx"


def load_peer() -> Callable[..., Tensor]:
    """Its Triton kernel of linear compression: (w_candidate, w_request, candidate, request, owner of each candidate as
    int32). UnsupportedError with the reason when there is none, as in all that follow."""
    return _load("triton_ikbo_lce").triton_ikbo_lce


def load_tlx_compression() -> tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """Its kernel in TLX, of the arguments above and flags; what makes the flags of (w_request, request)."""
    module = _load("tlx_ikbo_lce", tlx=True)
    return module.tlx_ikbo_lce, module.create_user_flag


def load_tlx_attention() -> Callable[..., Tensor]:
    """Its persistent kernel for uneven numbers of candidates: (query [candidates * rows, H, D], key, value [users *
    length, H, D], owner of each candidate, rows, length, the first candidate of each pair of one user), rows 64."""
    return _load("tlx_ikbo_fa_ws", tlx=True).tlx_flash_attn_ikbo_tma_persistent


@cache
def _load(name: str, *, tlx: bool = False) -> ModuleType:
    place = os.environ.get(VARIABLE)
    if not place:
        raise UnsupportedError(f"{VARIABLE} does not name a checkout of its folder ikbo")
    folder = Path(place) / "ops"
    if not (folder / f"{name}.py").is_file():
        raise UnsupportedError(f"{VARIABLE}={place} has no ops/{name}.py")
    try:
        extra = importlib.import_module("triton.language.extra")
        if sys.modules.get(TLX) is None and importlib.util.find_spec(TLX) is None:
            extra.tlx = sys.modules[TLX] = ModuleType(TLX)
        if tlx and not hasattr(importlib.import_module(TLX), "async_tasks"):
            raise UnsupportedError("needs TLX of Meta's fork of Triton: pip install fbtriton in place of triton")
        package = sys.modules.setdefault(PACKAGE, ModuleType(PACKAGE))
        package.__path__ = [str(folder)]
        return importlib.import_module(f"{PACKAGE}.{name}")
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(f"{VARIABLE}={place} cannot be imported: {error!r}") from error
