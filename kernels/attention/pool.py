"""Softmax attention of a few queries a row over values that are keys at once: pooling with absorbed projections."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from kernels.attention import reference
from kernels.attention.pool_tiles import MAX_WIDTH, shared_bytes
from kernels.core import dispatch
from kernels.core.checks import check_lengths, check_offsets
from kernels.core.chip import shared_limit_of
from kernels.core.dispatch import Backend
from kernels.core.offsets import attended_pairs
from kernels.core.rows import Rows

# Queries of a row times their heads that a tile of the kernels holds.
MAX_POOL_ROWS = 32


def attention_pool(
    q: Tensor,
    values: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    max_q: int,
    max_k: int,
    scale: float,
    backend: str | None = None,
) -> Tensor:
    """Softmax attention of each row's queries over the same row's values, which are keys too.

    q [Nq, H, d], values [Nk, d] -> [Nq, H, d]: `jagged_attention` with keys = values = values[:, None], which every
    head reads. A row of values is read once, and has one gradient. Scores are multiplied by `scale`, which has no
    default: with queries that a projection of keys was absorbed into, it is that of the narrower heads.

    A query of a row without values gives zeros, with zero gradients. No row has more than max_q queries or max_k
    values. In an autocast region the operands take its dtype.
    """
    if q.dim() != 3 or values.dim() != 2 or q.shape[2] != values.shape[1] or not q.shape[1]:
        raise ValueError(
            f"shapes do not fit: q {tuple(q.shape)}, values {tuple(values.shape)}; expected q [Nq, H, d] and values "
            "[Nk, d] with the same d, and at least one head"
        )
    check_offsets(q.shape[0], q_offsets)
    check_offsets(values.shape[0], k_offsets)
    if q_offsets.shape != k_offsets.shape:
        raise ValueError(f"q has {len(q_offsets) - 1} rows and values have {len(k_offsets) - 1}; they must be equal")
    q, values = dispatch.autocast_operands(q=q, values=values)
    chosen = dispatch.choose("attention_pool", backend, q, **_facts(q.shape[2], max_q * q.shape[1]))
    check_lengths(q_offsets, max_q, "max_q")
    if k_offsets is not q_offsets or max_k < max_q:
        check_lengths(k_offsets, max_k, "max_k")
    return chosen(q, values, Rows(q_offsets, max_q), Rows(k_offsets, max_k), scale)


def pools(like: Tensor, width: int, rows: int) -> bool:
    """Whether `attention_pool` is the better choice for tensors like `like`, of `width` features, and `rows` queries
    and heads of a row: a kernel serves it, or the tensors are where the specification serves everything."""
    if rows > MAX_POOL_ROWS:
        return False
    if (chip := dispatch.chip_of(like))["device"] != "cuda":
        return True
    facts = chip | {"dtype": dispatch.autocast_dtype(like)} | _facts(width, rows)
    return dispatch.selection("attention_pool", **facts)[0] != "reference"


def _facts(width: int, rows: int) -> dict[str, Hashable]:
    return {"width": width, "query_rows": min(rows, 64)}  # many count as 64


def _triton(
    *, device: str, capability: Hashable, dtype: torch.dtype, width: int, query_rows: int, **_: Hashable
) -> str | None:
    if reason := dispatch.needs_triton(device, capability) or dispatch.needs_dtype(dtype, *dispatch.FLOATS):
        return reason
    if query_rows > MAX_POOL_ROWS:
        return f"needs max_q times heads of at most {MAX_POOL_ROWS}"
    if width > MAX_WIDTH:
        return f"needs values of at most {MAX_WIDTH} features, got {width}"
    needed, limit = shared_bytes(width, query_rows, dtype.itemsize), shared_limit_of(capability)
    if needed > limit:
        return (
            f"needs {needed // 1024} KiB of shared memory for {query_rows} queries and heads of {width} features in "
            f"{str(dtype).removeprefix('torch.')}, and a program may use {limit // 1024}"
        )
    return None


dispatch.declare(
    "attention_pool",
    Backend("triton", "kernels.attention.triton.operators:attention_pool", _triton),
    Backend("reference", reference.attention_pool),
)


@dispatch.flops("attention_pool")
def _flops(q: Tensor, values: Tensor, queries: Rows, keys: Rows, scale: float) -> float:
    return 4 * q.shape[1] * q.shape[2] * attended_pairs(queries.offsets, keys.offsets)
