"""Additive biases of `jagged_attention` and `gdpa`: a table of relative positions, one of log-bucketed time gaps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.core.rows import jagged_to_padded

# Width of a time bucket in natural log units: 2.3 buckets per doubling, as HSTU publishes it.
BUCKET_WIDTH = 0.301
# Gaps saturate below the sentinel that ends the list of edges; 68 years in seconds.
LONGEST_GAP = 2**31 - 2


class Bias(NamedTuple):
    """Score biases of one call: tables [H, 2 P + 1] and [H, T] float32 and the times that index the second."""

    position: Tensor | None = None
    time: Tensor | None = None
    q_times: Tensor | None = None
    k_times: Tensor | None = None
    bucket_width: float = BUCKET_WIDTH


def position_index(i: Tensor, j: Tensor, size: int) -> Tensor:
    """Column of a position table of `size` = 2 P + 1 columns for query i and key j: clamp(j - i, -P, P) + P."""
    reach = size // 2
    return (j - i).clamp(-reach, reach) + reach


def time_bucket_edges(num_buckets: int, width: float, device: torch.device) -> Tensor:
    """[num_buckets + 1] int32: bucket b holds the gaps of at least edges[b] and less than edges[b + 1] seconds.

    edges[b] = ceil(exp(b width)), except 0 for b = 0 and a value that no gap reaches at the end. With whole numbers a
    bucket is the same on every device, which it would not be with a rounded logarithm.
    """
    steps = torch.arange(num_buckets + 1, device=device, dtype=torch.float64)
    edges = (steps * width).exp().ceil().clamp(max=LONGEST_GAP + 1)
    return edges.masked_fill(steps == 0, 0).masked_fill(steps == num_buckets, LONGEST_GAP + 1).int()


def time_bucket(seconds: Tensor, num_buckets: int, width: float) -> Tensor:
    """Bucket int64 of time differences of any sign: min(floor(ln(max(|seconds|, 1)) / width), num_buckets - 1)."""
    gap = seconds.abs().clamp(max=LONGEST_GAP)
    edges = time_bucket_edges(num_buckets, width, seconds.device)
    return torch.bucketize(gap, edges.to(gap.dtype), right=True) - 1


def checked_bias(
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


def padded_bias(
    bias: Bias, i: Tensor, j: Tensor, q_offsets: Tensor, k_offsets: Tensor, num_queries: int, num_keys: int
) -> Tensor:
    """[1 or B, H, num_queries, num_keys]: the biases of the scores of padded rows; places i and j may differ by row."""
    terms = []
    if bias.position is not None:
        index = position_index(i, j, bias.position.shape[1])
        looked_up = bias.position[:, index]  # [H, (B,) num_queries, num_keys]
        terms.append(looked_up[None] if index.dim() == 2 else looked_up.transpose(0, 1))
    if bias.time is not None:
        assert bias.q_times is not None
        assert bias.k_times is not None
        q_times = jagged_to_padded(bias.q_times.long(), q_offsets, num_queries, 0, "first")
        k_times = jagged_to_padded(bias.k_times.long(), k_offsets, num_keys, 0, "first")
        gap = q_times[:, :, None] - k_times[:, None, :]
        index = time_bucket(gap, bias.time.shape[1], bias.bucket_width)
        terms.append(bias.time[:, index].transpose(0, 1))
    return sum(terms[1:], terms[0])
