"""`jagged_attention` through FlashAttention 4 (PyPI flash-attn-4), whose kernels are faster where rows are long.

Our forwards are faster where they serve, and all of them return the same statistics, so this takes our forward and
their backward; heads between 32 and 256 that our Hopper kernels do not serve take both from them.

The interface is imported here and not where backends are declared: that takes seconds, and the package need not be
installed. `_flash_attn_bwd` is what its autograd function calls, with the gradients to write into.
"""

from __future__ import annotations

from typing import Any

import torch
from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
from torch import Tensor

from kernels.attention.gradients import gradients_in_projection
from kernels.attention.hopper import backward as hopper_backward
from kernels.attention.hopper import forward as hopper_forward
from kernels.attention.operator import attention_operator
from kernels.attention.triton import forward as triton_forward
from kernels.core.chip import HOPPER_HEADS
from kernels.core.mask import Mask
from kernels.core.offsets import narrowed
from kernels.core.rows import Rows

_NARROW = 32  # features of a head, up to which our Triton forward is faster than theirs


def _forward(
    q: Tensor, k: Tensor, v: Tensor, queries: Rows, keys: Rows, scale: float, mask: Mask
) -> tuple[Tensor, Tensor]:
    if q.shape[2] in HOPPER_HEADS:
        return hopper_forward.attention_forward(q, k, v, queries, keys, scale, mask)
    if q.shape[2] <= _NARROW:
        return triton_forward.forward(q, k, v, queries, keys, scale, mask)
    out, lse, *_ = _flash_attn_fwd(q, k, v, **_arguments(queries, keys, scale, mask), return_lse=True)
    return out, lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Rows,
    keys: Rows,
    scale: float,
    mask: Mask,
) -> tuple[Tensor, Tensor, Tensor]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic and q.shape[2] in HOPPER_HEADS:  # faster than theirs in a fixed order
        rows = (queries, keys, scale, mask)
        return hopper_backward.attention_backward(grad, q, k, v, out, lse, *rows, gradients=gradients_in_projection)
    dq, dk, dv = gradients_in_projection(q, k, v)
    _flash_attn_bwd(
        *(q, k, v, out, grad.contiguous(), lse), **_arguments(queries, keys, scale, mask),
        deterministic=deterministic, dq=dq, dk=dk, dv=dv,
    )  # fmt: skip
    return dq, dk, dv


def _arguments(queries: Rows, keys: Rows, scale: float, mask: Mask) -> dict[str, Any]:
    left, right = mask.window
    return {
        "softmax_scale": scale,
        "causal": (left, right) == (-1, 0),  # another window replaces the causal mask
        "window_size_left": left if left >= 0 else None,
        "window_size_right": right if right >= 0 else None,
        "cu_seqlens_q": narrowed(queries.offsets),
        "cu_seqlens_k": narrowed(keys.offsets),
        "max_seqlen_q": queries.max_length,
        "max_seqlen_k": keys.max_length,
    }


attention = attention_operator(
    "flash_attention_4", _forward, _backward, features=False, gradients=gradients_in_projection
)
