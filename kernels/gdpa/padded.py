"""`gdpa` as one would write it without kernels: pad, run the reference under torch.compile, remove the padding."""

from __future__ import annotations

from torch import Tensor

from kernels.core.compiled import compiled
from kernels.core.mask import Mask
from kernels.core.rows import Rows, repeat_heads
from kernels.gdpa import reference
from kernels.jagged import jagged_to_padded, padded_to_jagged


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
) -> Tensor:
    (q_offsets, max_q), (k_offsets, max_k) = queries, keys
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    # Matrix products are slow where rows of scores do not start at multiples of 16 bytes.
    max_q, max_k = (-(-length // 8) * 8 for length in (max_q, max_k))
    q_padded, k_padded, v_padded = (
        jagged_to_padded(values, offsets, length).transpose(1, 2)
        for values, offsets, length in ((q, q_offsets, max_q), (k, k_offsets, max_k), (v, k_offsets, max_k))
    )
    attended = compiled(reference.attend)(q_padded, k_padded, v_padded, activations, score_scale, out_scale, mask)
    return padded_to_jagged(attended.transpose(1, 2), q_offsets, q.shape[0])
