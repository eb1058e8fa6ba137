"""The norms around GDPA in a block, query + RMSNorm(attention(LN(query)) + LN(query)), as one operator before attention
and one after it.

Both norms span the last dimension and have no learned parameters. The operator after attention recomputes LN(query),
which costs less than reading it.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.core.dispatch import Backend
from kernels.gdpa import reference

MAX_WIDTH = 8192  # columns of a row, which one program keeps in registers


def layer_norm(query: Tensor, *, backend: str | None = None) -> Tensor:
    """(query - mean) / sqrt(variance + 1e-5) over the last dimension, in the dtype of `query`, a floating one.

    Statistics are at least float32. The fused backend reads and writes one tensor, under autocast too.
    """
    return dispatch.choose_in_eager("gdpa_layer_norm", backend, query, width=query.shape[-1])(query)


def add_norms(x: Tensor, query: Tensor, *, backend: str | None = None) -> Tensor:
    """query + z / sqrt(mean(z^2) + 1e-5) with z = x + layer_norm(query), means over the last dimension, like `query`.

    Both have one shape and one floating dtype; statistics are at least float32. The fused backend reads two tensors and
    writes one. ValueError for shapes or dtypes that differ.
    """
    if x.shape != query.shape or x.dtype != query.dtype:
        raise ValueError(
            f"x and query must have one shape and dtype, got {tuple(x.shape)} {x.dtype} and {tuple(query.shape)} "
            f"{query.dtype}"
        )
    return dispatch.choose_in_eager("gdpa_add_norms", backend, query, width=query.shape[-1])(x, query)


def _rows_in_registers(*, device: str, capability: Hashable, dtype: torch.dtype, width: int) -> str | None:
    if reason := dispatch.needs_triton(device, capability) or dispatch.needs_dtype(dtype, *dispatch.FLOATS):
        return reason
    if width > MAX_WIDTH:
        return f"needs rows of at most {MAX_WIDTH} values, got {width}"
    return None


dispatch.declare(
    "gdpa_layer_norm",
    Backend("triton", "kernels.gdpa.triton.norm_operators:layer_norm", _rows_in_registers),
    Backend("reference", reference.layer_norm),
)
dispatch.declare(
    "gdpa_add_norms",
    Backend("triton", "kernels.gdpa.triton.norm_operators:add_norms", _rows_in_registers),
    Backend("reference", reference.add_norms),
)
