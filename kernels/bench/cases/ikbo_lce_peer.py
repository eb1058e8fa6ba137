"""FBGEMM's Triton kernel of linear compression as a contender, from a checkout that GEMSMITH_PEER_IKBO names.

Its files are not part of the FBGEMM wheel. The variable gives the folder `fbgemm_gpu/experimental/ikbo/ikbo` of the
repository (github.com/pytorch/FBGEMM). The kernel takes a helper from a file of kernels for Meta's fork of Triton, so
an empty module stands in for what that file imports from the fork.
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

VARIABLE = "GEMSMITH_PEER_IKBO"
PACKAGE = "fbgemm_ikbo"


@cache
def load_peer() -> Callable[..., Tensor]:
    """Its function of (w_candidate, w_request, candidate, request, owner of each candidate as int32).

    UnsupportedError with the reason when there is none.
    """
    place = os.environ.get(VARIABLE)
    if not place:
        raise UnsupportedError(f"{VARIABLE} does not name a checkout of its folder ikbo")
    folder = Path(place) / "ops"
    if not (folder / "triton_ikbo_lce.py").is_file():
        raise UnsupportedError(f"{VARIABLE}={place} has no ops/triton_ikbo_lce.py")
    try:
        extra = importlib.import_module("triton.language.extra")
        if not hasattr(extra, "tlx"):
            extra.tlx = sys.modules.setdefault("triton.language.extra.tlx", ModuleType("triton.language.extra.tlx"))
        package = sys.modules.setdefault(PACKAGE, ModuleType(PACKAGE))
        package.__path__ = [str(folder)]
        module = importlib.import_module(f"{PACKAGE}.triton_ikbo_lce")
    except Exception as error:
        raise UnsupportedError(f"{VARIABLE}={place} cannot be imported: {error!r}") from error
    return module.triton_ikbo_lce
