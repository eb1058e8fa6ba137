"""The norms around GDPA in a block, query + RMSNorm(attention(LN(query)) + LN(query)), as one operator before attention
and one after it.

Both norms span the last dimension and have no learned parameters. The operator after attention recomputes LN(query),
which costs less than reading it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal, cast, overload

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.core.dispatch import Backend
from kernels.gdpa import reference

MAX_WIDTH = 8192  # columns of a row, which one program keeps in registers


@overload
def layer_norm(
    query: Tensor, *, heads: int = 0, beside: Literal[False] = False, backend: str | None = None
) -> Tensor: ...


@overload
def layer_norm(
    query: Tensor, *, heads: int = 0, beside: Literal[True], backend: str | None = None
) -> tuple[Tensor, Tensor]: ...


def layer_norm(
    query: Tensor, *, heads: int = 0, beside: bool = False, backend: str | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """(query - mean) / sqrt(variance + 1e-5) over the last dimension, in the dtype of `query`, a floating one.

    With `heads` each of so many parts of that is divided by its root mean square, sqrt(mean(part^2) + 1e-5). With
    `beside` a pair of it and of the query, for whoever else reads that: both gradients are added where the norm's is
    made. Statistics are at least float32. The fused backend reads and writes one tensor, under autocast too. ValueError
    for a width that is no multiple of `heads`.
    """
    width = query.shape[-1]
    if heads and width % heads:
        raise ValueError(f"heads={heads} must divide the width of query, {width}")
    head = width // heads if heads else 1
    chosen = dispatch.choose_in_eager("gdpa_layer_norm", backend, query, width=width, head_dim=head)
    normed, query = chosen(query, heads)
    return (normed, query) if beside else normed


@overload
def add_norms(x: Tensor, query: Tensor, *, norm: Literal[False] = False, backend: str | None = None) -> Tensor: ...


@overload
def add_norms(
    x: Tensor, query: Tensor, *, norm: Literal[True], backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor]: ...


def add_norms(
    x: Tensor, query: Tensor, *, norm: bool = False, backend: str | None = None
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """query + z / sqrt(mean(z^2) + 1e-5) with z = x + layer_norm(query), means over the last dimension, like `query`.

    Both have one shape and one floating dtype; statistics are at least float32. With `norm` a triple of it, of its
    RMSNorm, and of that again for a second reader: gradients of all three are added where those of x and query are
    made. The fused backend reads two tensors and writes what it returns. ValueError for shapes or dtypes that differ.
    """
    if x.shape != query.shape or x.dtype != query.dtype:
        raise ValueError(
            f"x and query must have one shape and dtype, got {tuple(x.shape)} {x.dtype} and {tuple(query.shape)} "
            f"{query.dtype}"
        )
    out = dispatch.choose_in_eager("gdpa_add_norms", backend, query, width=query.shape[-1])(x, query, norm)
    return cast("tuple[Tensor, Tensor, Tensor]", out) if norm else cast(Tensor, out[0])


def _heads_in_registers(
    *, device: str, capability: Hashable, dtype: torch.dtype, width: int, head_dim: int
) -> str | None:
    if reason := _rows_in_registers(device=device, capability=capability, dtype=dtype, width=width):
        return reason
    # A row is a tile of a power of two of values, of which heads must be parts.
    return f"needs heads of a power of two of features, got {head_dim}" if head_dim & (head_dim - 1) else None


def _rows_in_registers(*, device: str, capability: Hashable, dtype: torch.dtype, width: int) -> str | None:
    if reason := dispatch.needs_triton(device, capability) or dispatch.needs_dtype(dtype, *dispatch.FLOATS):
        return reason
    if width > MAX_WIDTH:
        return f"needs rows of at most {MAX_WIDTH} values, got {width}"
    return None


dispatch.declare(
    "gdpa_layer_norm",
    Backend("triton", "kernels.gdpa.triton.norm_operators:layer_norm", _heads_in_registers),
    Backend("reference", reference.layer_norm),
)
dispatch.declare(
    "gdpa_add_norms",
    Backend("triton", "kernels.gdpa.triton.norm_operators:add_norms", _rows_in_registers),
    Backend("reference", reference.add_norms),
)
