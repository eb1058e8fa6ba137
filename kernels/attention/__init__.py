"""Softmax attention on jagged rows: queries of a row over the keys of the same row.

Values are [N, heads, features] with offsets [B + 1], as in `kernels.jagged`; nothing is padded. The equations and the
tiles are in the README of this folder, the modules in `modules.jagged_attention` and `modules.pooling`.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from kernels.attention import hopper, operator, padded, reference, varlen  # noqa: F401  importing them registers their backends
from kernels.attention.bias import BUCKET_WIDTH, checked_bias, time_bucket
from kernels.core import dispatch
from kernels.core.checks import check_heads, check_lengths, check_offsets, check_window
from kernels.core.offsets import attended_pairs

__all__ = ["jagged_attention", "time_bucket"]


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
        features["bias"] = checked_bias(q, k, position_bias, time_bias, q_times, k_times, time_bucket_width)
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


@dispatch.flops("jagged_attention")
def _flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    block_size: int | None = None,
    bias: object = None,
) -> float:
    pairs = attended_pairs(q_offsets, k_offsets, causal, window, block_size)
    return 2 * q.shape[1] * (q.shape[2] + v.shape[2]) * pairs
