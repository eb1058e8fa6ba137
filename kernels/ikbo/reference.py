"""The specifications of the operators on requests and their candidates, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention import jagged_attention
from kernels.core.checks import check_lengths
from kernels.core.rows import jagged_to_padded, padded_length, padded_to_jagged, repeat_heads, row_of


def linear_compression(
    candidate: Tensor,
    w_candidate: Tensor,
    requests: Sequence[Tensor],
    w_requests: Sequence[Tensor],
    offsets: Sequence[Tensor],
) -> Tensor:
    """Levels from the outermost one downwards; sums of products in at least float32."""
    wide = torch.promote_types(candidate.dtype, torch.float32)

    def product(weight: Tensor, x: Tensor) -> Tensor:
        return torch.einsum("mk,bkn->bmn", weight.to(wide), x.to(wide))

    xs, weights = [*requests, candidate], [*w_requests, w_candidate]
    out = product(weights[0], xs[0])
    for x, weight, level_offsets in zip(xs[1:], weights[1:], offsets, strict=True):
        out = product(weight, x) + out[row_of(level_offsets, x.shape[0])]
    return out.to(candidate.dtype)


def joint_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: list[Tensor],
    k_offsets: Tensor,
    max_q: list[int],
    max_k: int,
    scale: float,
    sizes: list[int],
) -> Tensor:
    """Every group separately."""
    groups = zip(q.split(sizes), q_offsets, max_q, strict=True)
    return torch.cat(
        [
            jagged_attention(part, k, v, offsets, k_offsets, max_q=maximum, max_k=max_k, scale=scale)
            for part, offsets, maximum in groups
        ]
    )


def tree_attention(
    q: Tensor,
    k: list[Tensor],
    v: list[Tensor],
    q_offsets: list[Tensor],
    k_offsets: list[Tensor],
    max_q: list[int],
    max_k: list[int],
    scale: float,
) -> Tensor:
    """All scores of a query concatenated, level after level."""
    total, num_heads = q.shape[:2]
    wide = torch.promote_types(q.dtype, torch.float32)
    for query_rows, key_rows, most, length in zip(q_offsets, k_offsets, max_q, max_k, strict=True):
        check_lengths(query_rows, most, "max_candidates times S")
        check_lengths(key_rows, length, "max_k")
    max_q = [padded_length(*rows) for rows in zip(q_offsets, max_q, strict=True)]
    max_k = [padded_length(*rows) for rows in zip(k_offsets, max_k, strict=True)]

    def padded(values: Tensor, offsets: Tensor, maximum: int) -> Tensor:
        return jagged_to_padded(values, offsets, maximum, 0.0, "first").transpose(1, 2)  # [R, H, L, d]

    scores = []
    for keys, query_rows, key_rows, most, length in zip(k, q_offsets, k_offsets, max_q, max_k, strict=True):
        product = padded(q, query_rows, most) @ padded(repeat_heads(keys, num_heads), key_rows, length).mT
        seen = (torch.arange(length, device=q.device) < key_rows.diff()[:, None])[:, None, None]
        product = (product.to(wide) * scale).masked_fill(~seen, -torch.inf)
        scores.append(padded_to_jagged(product.transpose(1, 2), query_rows, total))  # [N, H, length]
    joined = torch.cat(scores, -1)
    nothing = joined.isneginf().all(-1, keepdim=True)
    weights = joined.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0).to(q.dtype)
    out = torch.zeros(total, num_heads, v[0].shape[2], dtype=q.dtype, device=q.device)
    parts = zip(weights.split(max_k, -1), v, q_offsets, k_offsets, max_q, max_k, strict=True)
    for part, values, query_rows, key_rows, most, length in parts:
        product = padded(part, query_rows, most) @ padded(repeat_heads(values, num_heads), key_rows, length)
        out = out + padded_to_jagged(product.transpose(1, 2), query_rows, total)
    return out
