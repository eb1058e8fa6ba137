"""Backward of `jagged_attention` in Triton: the gradients of queries, keys and values.

Probabilities are recomputed from lse. One kernel owns tiles of queries and sums dq over their keys, one owns tiles of
keys and sums dk and dv over their queries and the query heads that share them: 7 matrix products instead of 5, but no
sum has two writers, so that results are the same every time.

    p = exp(scale q k + bias - lse)    ds = p (do v - delta)    delta = sum do out
    dq = scale ds k    dk = scale ds q    dv = p do
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention.bias import Bias
from kernels.attention.structure import Structure
from kernels.attention.triton import launch
from kernels.attention.triton import structure as kinds
from kernels.attention.triton.dkv import attention_key_kernel
from kernels.attention.triton.dq import attention_query_kernel
from kernels.attention.triton.tables import table_gradients
from kernels.attention.triton.tile import tile_rows_of
from kernels.core.mask import Mask
from kernels.core.rows import Rows


def backward(
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
    bias: Bias | None = None,
    structure: Structure | None = None,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv), and with biases the gradients of the two tables (empty where there is no table)."""
    q_offsets, k_offsets = queries.offsets, keys.offsets
    q, k, v, grad = launch.rows_of(q), launch.rows_of(k), launch.rows_of(v), launch.rows_of(grad)
    total_q, num_heads, head_dim = q.shape
    total_k, key_heads, value_dim = v.shape
    dq = torch.empty(total_q, num_heads, head_dim, dtype=q.dtype, device=q.device)
    dk = torch.empty(total_k, key_heads, head_dim, dtype=k.dtype, device=k.device)
    dv = torch.empty(total_k, key_heads, value_dim, dtype=v.dtype, device=v.device)
    delta = torch.empty_like(lse)
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *grad.stride()[:2])
    scalars = (scale, *launch.window_of(mask), *launch.bias_sizes(bias), total_q, *kinds.arguments(structure, mask, q))
    tables = launch.bias_tensors(bias, q)
    constants = {"NUM_HEADS": num_heads, "GROUP": num_heads // key_heads}
    constants |= launch.constants(q, v, bias) | kinds.constants(structure)
    if total_q:
        tile = launch.fit("query", q, v, bias)
        rows = tile_rows_of(q_offsets, total_q, tile.m)
        attention_query_kernel[(rows.shape[0], num_heads)](
            q, k, v, grad, out, lse, delta, dq, q_offsets, k_offsets, rows, *tables, *strides, *scalars,
            BLOCK_M=tile.m, BLOCK_N=tile.n, **constants, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    if total_k:
        tile = launch.fit("key", q, v, bias)
        rows = tile_rows_of(k_offsets, total_k, tile.n)
        attention_key_kernel[(rows.shape[0], key_heads)](
            q, k, v, grad, lse, delta, dk, dv, q_offsets, k_offsets, rows, *tables, *strides, *scalars,
            BLOCK_M=tile.m, BLOCK_N=tile.n, **constants, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    if bias is None:
        return dq, dk, dv
    return (
        dq,
        dk,
        dv,
        *table_gradients(grad, q, k, v, lse, delta, q_offsets, k_offsets, bias, tables, strides, scalars, constants),
    )
