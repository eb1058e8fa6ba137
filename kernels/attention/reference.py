"""The specifications of `jagged_attention` and `attention_pool` in plain PyTorch, through padded scratch memory; see
`kernels.jagged`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.bias import Bias, padded_bias
from kernels.attention.structure import Structure
from kernels.core import dispatch
from kernels.core.mask import Mask
from kernels.core.rows import Rows, jagged_to_padded, padded_length, padded_to_jagged, repeat_heads


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Rows,
    keys: Rows,
    scale: float,
    mask: Mask,
    bias: Bias | None = None,
    structure: Structure | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """As the public function."""
    (q_offsets, max_q), (k_offsets, max_k) = (Rows(rows.offsets, padded_length(*rows)) for rows in (queries, keys))
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    # A softmax over no keys is 0 / 0. A query that sees none attends to an additional key after all others, which is
    # zero like its value: the result is exactly zero, and so are its gradients.
    nowhere = max_k
    q_padded, k_padded, v_padded = (
        jagged_to_padded(values, offsets, length, 0.0, "first").transpose(1, 2)  # [B, H, L, d]
        for values, offsets, length in ((q, q_offsets, max_q), (k, k_offsets, max_k + 1), (v, k_offsets, max_k + 1))
    )
    i, j = torch.arange(max_q, device=q.device)[:, None], torch.arange(max_k + 1, device=q.device)
    seen = (j < k_offsets.diff()[:, None])[:, None, :]  # [B, 1 or max_q, max_k + 1]
    places = i, j
    if structure is None:
        seen = mask.restrict(seen, i, j)
    else:
        shown, *places = structure.padded(mask, q_offsets, k_offsets, i, j)
        seen = seen & shown
    blind = ~seen.any(-1, keepdim=True)
    seen = (seen | (blind & (j == nowhere)))[:, None]
    if bias is None and sinks is None and not return_lse:
        out = _attend(q_padded, k_padded, v_padded, seen, scale)
        return padded_to_jagged(out.transpose(1, 2), q_offsets, q.shape[0])
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast("cuda" if q.is_cuda else "cpu", enabled=False):
        scores = q_padded.to(wide) @ k_padded.to(wide).transpose(2, 3) * scale
        if bias is not None:
            scores = scores + padded_bias(bias, *places, q_offsets, k_offsets, max_q, max_k + 1)
        scores = scores.masked_fill(~seen, -torch.inf)
        out, lse = scores.softmax(-1) @ v_padded.to(wide), scores.logsumexp(-1)
        nothing = -torch.inf if sinks is None else sinks[:, None]
        if sinks is not None:
            out, lse = out * (lse - nothing).sigmoid()[..., None], lse.logaddexp(nothing)
        lse = torch.where(blind[:, None, :, 0], nothing, lse).transpose(1, 2)
    out = padded_to_jagged(out.to(v.dtype).transpose(1, 2), q_offsets, q.shape[0])
    return (out, padded_to_jagged(lse, q_offsets, q.shape[0]).t()) if return_lse else out


def attention_pool(q: Tensor, values: Tensor, queries: Rows, keys: Rows, scale: float) -> Tensor:
    """As the public function; queries and heads of a row are the rows of one product."""
    (q_offsets, max_q), (k_offsets, max_k) = (Rows(rows.offsets, padded_length(*rows)) for rows in (queries, keys))
    num_heads = q.shape[1]
    offsets = q_offsets * num_heads
    q_padded = jagged_to_padded(q.flatten(0, 1), offsets, max_q * num_heads, 0.0, "first")[:, None]
    length = max(max_k, 1)
    padded = jagged_to_padded(values, k_offsets, length, 0.0, "first")[:, None]
    # A softmax over no values is 0 / 0: a row without any sees the zeros of its padding.
    lengths = k_offsets.diff()[:, None]
    seen = (torch.arange(length, device=q.device) < lengths) | (lengths == 0)
    out = _attend(q_padded, padded, padded, seen[:, None, None], scale)
    return padded_to_jagged(out[:, 0], offsets, q.shape[0] * num_heads).view(q.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """On a CPU half precision is computed in float32, in which PyTorch's backward takes a fifth of the time there."""
    if q.device.type != "cpu" or q.dtype not in dispatch.HALF:
        return scaled_dot_product_attention(q, k, v, seen, scale=scale)
    with torch.autocast("cpu", enabled=False):  # which would narrow the operands again
        return scaled_dot_product_attention(q.float(), k.float(), v.float(), seen, scale=scale).to(q.dtype)
