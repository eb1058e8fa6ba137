"""The specifications of `gdpa`, in plain PyTorch through padded scratch memory, and of the norms around it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.attention import Bias, Structure, padded_bias
from kernels.core.activations import activate
from kernels.core.constants import EPSILON
from kernels.core.mask import Mask
from kernels.core.rows import Rows, jagged_to_padded, padded_length, padded_to_jagged, repeat_heads


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Rows,
    keys: Rows,
    activations: tuple[str, ...],
    score_scale: float,
    out_scale: float,
    mask: Mask,
    bias: Bias | None = None,
    structure: Structure | None = None,
) -> Tensor:
    """`activations` has a name per query head; the rest as in the public function."""
    (q_offsets, max_q), (k_offsets, max_k) = (Rows(rows.offsets, padded_length(*rows)) for rows in (queries, keys))
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    q_padded, k_padded, v_padded = (
        jagged_to_padded(values, offsets, length, 0.0, "first").transpose(1, 2)  # [B, H, L, d]
        for values, offsets, length in ((q, q_offsets, max_q), (k, k_offsets, max_k), (v, k_offsets, max_k))
    )
    places = torch.arange(max_q, device=q.device)[:, None], torch.arange(max_k, device=q.device)
    seen = added = None
    if structure is not None:
        seen, *places = structure.padded(mask, q_offsets, k_offsets, *places)
    if bias is not None:
        added = padded_bias(bias, *places, q_offsets, k_offsets, max_q, max_k)
    attended = attend(q_padded, k_padded, v_padded, activations, score_scale, out_scale, mask, added, seen)
    return padded_to_jagged(attended.transpose(1, 2), q_offsets, q.shape[0])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    activations: tuple[str, ...],
    score_scale: float,
    out_scale: float,
    mask: Mask,
    bias: Tensor | None = None,
    seen: Tensor | None = None,
) -> Tensor:
    """q [B, H, Lq, d], k [B, H, Lk, d], v [B, H, Lk, dv] -> [B, H, Lq, dv]; rows are padded with zeros.

    bias [1 or B, H, Lq, Lk] is added to scaled scores; seen [B, Lq, Lk] stands for the mask.
    """
    # Padding needs no mask: its values are 0.
    if seen is None:
        i, j = torch.arange(q.shape[2], device=q.device)[:, None], torch.arange(k.shape[2], device=q.device)
        seen = mask.restrict(torch.ones_like(i == j), i, j)
    else:
        seen = seen[:, None]
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.mT).to(wide) * score_scale
    scores = scores if bias is None else scores + bias
    if len(set(activations)) == 1:
        weights = activate(activations[0], scores)
    else:
        per_head = zip(activations, scores.unbind(1), strict=True)
        weights = torch.stack([activate(name, head) for name, head in per_head], 1)
    weights = torch.where(seen, weights * out_scale, 0.0)
    return weights.to(v.dtype) @ v


def layer_norm(query: Tensor, heads: int = 0) -> tuple[Tensor, Tensor]:
    # Autocast widens norms.
    normed = F.layer_norm(query, query.shape[-1:], eps=EPSILON).to(query.dtype)
    if heads:
        parts = normed.unflatten(-1, (heads, -1))
        normed = F.rms_norm(parts, parts.shape[-1:], eps=EPSILON).to(query.dtype).flatten(-2)
    return normed, query


def add_norms(x: Tensor, query: Tensor, norm: bool = False) -> tuple[Tensor, ...]:
    out = (query + F.rms_norm(x + layer_norm(query)[0], x.shape[-1:], eps=EPSILON)).to(query.dtype)
    if not norm:
        return (out,)
    normed = F.rms_norm(out, out.shape[-1:], eps=EPSILON).to(out.dtype)
    return out, normed, normed
