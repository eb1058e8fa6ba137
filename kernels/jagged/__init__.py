"""Operators on jagged tensors: (values [N, ...], offsets [B + 1]), row b is values[offsets[b]:offsets[b + 1]].

Offsets are int32 or int64 on the device of the values, start at 0, do not decrease, and end at N. No operator waits for
the device (the one exception says so), so sizes that cannot be read from a shape are arguments: maxima are configured
constants that no row exceeds, never the maximum of a batch. Half-precision sums are accumulated in float32.
`backend` forces one backend by name; see `kernels.dispatch`.

A ValueError names shapes and dtypes that do not fit and, on the CPU, offsets that do not run from 0 to N, rows longer
than their maximum, and negative row numbers, starts and lengths. On a GPU such checks would have to wait for the
device: row lengths are device assertions, and the rest is not checked.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kernels import dispatch
from kernels.jagged import (  # noqa: F401  importing them registers their backends
    attention,
    attention_padded,
    attention_reference,
    gluon_attention,
    reference,
    triton_backends,
    varlen,
)
from kernels.jagged.attention_bias import BUCKET_WIDTH, Bias, time_bucket
from kernels.jagged.checks import (
    check_floating,
    check_heads,
    check_lengths,
    check_not_negative,
    check_offsets,
    check_rows,
    check_window,
)
from kernels.jagged.pointwise import jagged_dense_elementwise, jagged_elementwise, jagged_linear
from kernels.jagged.products import (
    array_jagged_bmm_jagged_out,
    jagged2_softmax,
    jagged_jagged_bmm,
    jagged_jagged_bmm_jagged_out,
    jagged_softmax,
    squared_offsets,
)
from kernels.jagged.windows import jagged_flip, jagged_slice

__all__ = [
    "array_jagged_bmm_jagged_out",
    "check_lengths",
    "check_offsets",
    "jagged2_softmax",
    "jagged_attention",
    "jagged_concat",
    "jagged_dense_bmm",
    "jagged_dense_elementwise",
    "jagged_elementwise",
    "jagged_flip",
    "jagged_index_select",
    "jagged_jagged_bmm",
    "jagged_jagged_bmm_jagged_out",
    "jagged_last",
    "jagged_linear",
    "jagged_slice",
    "jagged_softmax",
    "jagged_to_padded",
    "padded_to_jagged",
    "segment_max",
    "segment_mean",
    "segment_sum",
    "squared_offsets",
    "time_bucket",
]


def segment_sum(values: Tensor, offsets: Tensor, *, backend: str | None = None) -> Tensor:
    """Sum of each row: [N, ...] -> [B, ...]; an empty row gives 0."""
    check_floating(values, "values")
    check_offsets(values.shape[0], offsets)
    return dispatch.choose("segment_sum", backend, values)(values, offsets)


def segment_mean(values: Tensor, offsets: Tensor, *, backend: str | None = None) -> Tensor:
    """Mean of each row: [N, ...] -> [B, ...]; an empty row gives 0."""
    check_floating(values, "values")
    check_offsets(values.shape[0], offsets)
    return dispatch.choose("segment_mean", backend, values)(values, offsets)


def segment_max(values: Tensor, offsets: Tensor, *, backend: str | None = None) -> Tensor:
    """Maximum of each row: [N, ...] -> [B, ...]; an empty row gives 0. Ties share the gradient evenly."""
    check_floating(values, "values")
    check_offsets(values.shape[0], offsets)
    return dispatch.choose("segment_max", backend, values)(values, offsets)


def jagged_to_padded(
    values: Tensor,
    offsets: Tensor,
    max_length: int,
    fill: float = 0.0,
    keep: str = "first",
    *,
    backend: str | None = None,
) -> Tensor:
    """[N, ...] -> [B, max_length, ...]: rows start at position 0 and `fill` follows them.

    If a row is longer than max_length, `keep` says whether its first or its last max_length values are kept.
    """
    if keep not in ("first", "last"):
        raise ValueError(f"keep must be 'first' or 'last', got {keep!r}")
    check_offsets(values.shape[0], offsets)
    return dispatch.choose("jagged_to_padded", backend, values)(values, offsets, max_length, fill, keep)


def padded_to_jagged(padded: Tensor, offsets: Tensor, total: int, *, backend: str | None = None) -> Tensor:
    """[B, L, ...] -> [total, ...]: the inverse of `jagged_to_padded`; positions of a row beyond L give 0.

    `total` is offsets[B], which the caller knows as the shape of the values that the offsets came with.
    """
    check_offsets(total, offsets)
    check_rows(padded, offsets, "padded")
    return dispatch.choose("padded_to_jagged", backend, padded)(padded, offsets, total)


def jagged_concat(
    a_values: Tensor, a_offsets: Tensor, b_values: Tensor, b_offsets: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """(values [Na + Nb, ...], offsets [B + 1]) whose row b is a's row b followed by b's row b."""
    check_offsets(a_values.shape[0], a_offsets)
    check_offsets(b_values.shape[0], b_offsets)
    if a_offsets.shape != b_offsets.shape:
        raise ValueError(f"a has {len(a_offsets) - 1} rows and b has {len(b_offsets) - 1}; they must be equal")
    if a_values.shape[1:] != b_values.shape[1:]:
        raise ValueError(
            f"a {tuple(a_values.shape)} and b {tuple(b_values.shape)} must be alike but for their first size"
        )
    return dispatch.choose("jagged_concat", backend, a_values)(a_values, a_offsets, b_values, b_offsets)


def jagged_index_select(
    values: Tensor, offsets: Tensor, rows: Tensor, total: int | None = None, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """(values, offsets [M + 1]) whose row m is row rows[m], repetition allowed; rows [M] int64 or int32.

    `total` is the sum of the selected lengths. Without it this is the one function that waits for the device.
    """
    check_offsets(values.shape[0], offsets)
    check_not_negative(rows, "rows")
    selected, selected_offsets = dispatch.choose("jagged_index_select", backend, values)(values, offsets, rows, total)
    check_offsets(selected.shape[0], selected_offsets)
    return selected, selected_offsets


def jagged_last(values: Tensor, offsets: Tensor, count: int, *, backend: str | None = None) -> Tensor:
    """[N, ...] -> [B, count, ...]: the last `count` values of each row, right-aligned, zeros in front if shorter."""
    check_offsets(values.shape[0], offsets)
    return dispatch.choose("jagged_last", backend, values)(values, offsets, count)


def jagged_dense_bmm(x: Tensor, offsets: Tensor, y: Tensor, max_length: int, *, backend: str | None = None) -> Tensor:
    """out[i] = x[i] @ y[b] for i in row b: x [N, D], y [B, D, E] -> [N, E]. No row is longer than max_length."""
    if x.dim() != 2 or y.dim() != 3 or x.shape[1] != y.shape[1]:
        raise ValueError(f"expected x [N, D] and y [B, D, E], got {tuple(x.shape)} and {tuple(y.shape)}")
    check_offsets(x.shape[0], offsets)
    check_rows(y, offsets, "y")
    x, y = dispatch.autocast_operands(x=x, y=y)
    return dispatch.choose("jagged_dense_bmm", backend, x)(x, offsets, y, max_length)


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    max_q: int,
    max_k: int,
    scale: float | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    block_size: int | None = None,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    q_times: Tensor | None = None,
    k_times: Tensor | None = None,
    time_bucket_width: float = BUCKET_WIDTH,
    backend: str | None = None,
) -> Tensor:
    """Softmax attention of each row's queries over the same row's keys.

    q [Nq, H, d], k [Nk, Hkv, d], v [Nk, Hkv, dv] -> [Nq, H, dv]; H is a multiple of Hkv, and head h reads key head
    h // (H / Hkv). Scores are multiplied by `scale` (default 1 / sqrt(d)). Query i sees key j, both counted within
    their row, when all of the following hold that are set:

    - `causal`: j <= i;
    - `window`, w or (left, right): i - left <= j <= i + right, None or -1 on a side for no limit;
    - `block_size`: i // block_size == j // block_size.

    A query that sees no key gives zeros, with zero gradients. Added to scaled scores, with gradients of the tables:

    - `position_bias` [H, 2 P + 1]: column clamp(j - i, -P, P) + P;
    - `time_bias` [H, T]: column `time_bucket(q_times[i] - k_times[j], T, time_bucket_width)`, for `q_times` [Nq] and
      `k_times` [Nk] of an integer dtype, in seconds.

    No row has more than max_q queries or max_k keys. In an autocast region the operands take its dtype; tables are used
    in float32.
    """
    check_heads(q, k, v)
    check_offsets(q.shape[0], q_offsets)
    check_offsets(k.shape[0], k_offsets)
    if q_offsets.shape != k_offsets.shape:
        raise ValueError(f"q has {len(q_offsets) - 1} rows and k has {len(k_offsets) - 1}; they must be equal")
    reach = check_window(window)
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size={block_size} must be positive, or None for no blocks")
    q, k, v = dispatch.autocast_operands(q=q, k=k, v=v)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[2])
    features: dict[str, Any] = {}
    if block_size is not None:
        features["block_size"] = block_size
    if position_bias is not None or time_bias is not None:
        features["bias"] = _bias(q, k, position_bias, time_bias, q_times, k_times, time_bucket_width)
    attend = dispatch.choose(
        "jagged_attention",
        backend,
        q,
        head_dim=q.shape[2],
        value_dim=v.shape[2],
        masked=causal or reach != (-1, -1),
        same_offsets=q_offsets is k_offsets,
        block_local=block_size is not None,
        biased="bias" in features,
        positive_scale=scale > 0,
        few_queries=max_q < 64,
        query_rows=min(max_q * q.shape[1] // k.shape[1], 64),  # of a key head; many count as 64
    )
    if not getattr(attend, "checks_lengths", False):
        check_lengths(q_offsets, max_q, "max_q")
        if k_offsets is not q_offsets or max_k < max_q:
            check_lengths(k_offsets, max_k, "max_k")
    return attend(q, k, v, q_offsets, k_offsets, max_q, max_k, scale, causal, reach, **features)


def _bias(
    q: Tensor,
    k: Tensor,
    position: Tensor | None,
    time: Tensor | None,
    q_times: Tensor | None,
    k_times: Tensor | None,
    bucket_width: float,
) -> Bias:
    """Checked biases. Tables are converted to float32, because their gradients are sums over a whole batch."""
    num_heads = q.shape[1]
    if position is not None and (position.dim() != 2 or len(position) != num_heads or position.shape[1] % 2 == 0):
        raise ValueError(f"position_bias must be [{num_heads}, 2 P + 1], got {tuple(position.shape)}")
    if time is not None:
        if time.dim() != 2 or len(time) != num_heads or not time.shape[1]:
            raise ValueError(f"time_bias must be [{num_heads}, T] with T at least 1, got {tuple(time.shape)}")
        for name, times, values in (("q_times", q_times, q), ("k_times", k_times, k)):
            if times is None or times.shape != values.shape[:1] or times.is_floating_point():
                given = "none" if times is None else f"{tuple(times.shape)} {times.dtype}"
                raise ValueError(f"time_bias needs integer {name} [{values.shape[0]}], got {given}")
        if not bucket_width >= 0.05:
            raise ValueError(f"time_bucket_width must be at least 0.05, got {bucket_width}")
    position, time = (
        None if table is None else table.to(torch.promote_types(q.dtype, torch.float32)) for table in (position, time)
    )
    return Bias(position, time, q_times, k_times, bucket_width)
