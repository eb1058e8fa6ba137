"""Generalised dot-product attention (GDPA): an activation in place of the softmax of attention, on jagged rows.

Nothing is normalised over a row: no maximum, no sum, no statistics to save. If keys and values are made for each
sample, it is a personalised feed-forward network; with learned queries it is pooling; with queries, keys and values of
the same tokens it is self-attention. The equations are in the README of this folder, the modules in
`modules.layers.attention.gdpa`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.attention import (
    BUCKET_WIDTH,
    UNSTRUCTURED,
    Structure,
    checked_bias,
    checked_structure,
    pair_flops,
    serves_triton,
)
from kernels.core import dispatch
from kernels.core.activations import ACTIVATIONS, unknown
from kernels.core.checks import check_lengths, check_offsets
from kernels.core.chip import needs_hopper_heads
from kernels.core.dispatch import Backend
from kernels.core.mask import Mask, checked_mask
from kernels.core.offsets import derived
from kernels.core.rows import Rows
from kernels.gdpa import reference
from kernels.gdpa.norms import add_norms, layer_norm

__all__ = ["ACTIVATIONS", "add_norms", "gdpa", "layer_norm"]


def gdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | None,
    k_offsets: Tensor | None,
    *,
    max_q: int,
    max_k: int,
    activation: str | Sequence[str] = "gelu",
    score_scale: float,
    out_scale: float = 1.0,
    window: int | tuple[int | None, int | None] | None = None,
    kv_index: Tensor | None = None,
    num_targets: Tensor | None = None,
    contextual: int = 0,
    prefix: int = 0,
    target_window: int | None = None,
    align: str = "start",
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    q_times: Tensor | None = None,
    k_times: Tensor | None = None,
    time_bucket_width: float = BUCKET_WIDTH,
    backend: str | None = None,
) -> Tensor:
    """out = act(score_scale q k^T) out_scale v within each row, an activation where attention has a softmax.

    q [Nq, H, d], k [Nk, Hkv, d], v [Nk, Hkv, dv] -> [Nq, H, dv]; H is a multiple of Hkv, and head h reads key head
    h // (H / Hkv). Offsets are [B + 1], int32 or int64; no row has more than max_q queries or max_k keys. q, k and v
    have one floating dtype, and any strides: views of a fused projection are read where they are. In an autocast region
    they take its dtype.

    - `activation`: one of ACTIVATIONS, or one per head.
    - `score_scale` acts before the activation and `out_scale` after it. Peers differ in both, so the first has no
      default. Neither may depend on a batch's lengths, or results would depend on the rest of the batch.
    - `window`, w or (left, right): query i sees key j, both counted within their row, when i - left <= j <= i + right;
      None or -1 is no limit on that side. Pairs outside contribute nothing.
    - `k_offsets` None: k and v are dense, [B, Lk, Hkv, d] and [B, Lk, Hkv, dv].
    - `q_offsets` None: the queries q [S, H, d] are those of every row; the result is [B * S, H, dv], row by row, and
      the gradient of q is the sum over rows. q is copied once per row, which is as much memory as the result.
    - `kv_index` [B], int32 or int64: row b of the queries reads row kv_index[b] of the keys and values, of which there
      may be any number. It must not decrease, so that candidates of a request are neighbours. All queries of a key row
      are then computed as one row, and max_q bounds their number. A window is refused with it, because positions would
      count from the start of that longer row.
    - `num_targets`, `contextual`, `prefix`, `target_window` and `align` are masks as in
      `kernels.attention.jagged_attention`, and refused with kv_index.
    - `position_bias` [H, 2 P + 1], and `time_bias` [H, T] with `q_times` [Nq] and `k_times` [Nk], are added to scaled
      scores before the activation, as in `kernels.attention.jagged_attention`, and have gradients; dense keys, shared
      queries and kv_index are refused with them.

    A row without keys gives zeros. ValueError for shapes, dtypes or names that do not fit and, on the CPU, for offsets,
    lengths and indices out of bounds; on a GPU, where checking would be a sync, those are device assertions.
    """
    _check_shapes(q, k, v, q_offsets, k_offsets)
    mask = checked_mask(window=window)
    if kv_index is not None and mask.windowed:
        raise ValueError("kv_index with a window is not supported: positions count within a row of keys")
    biased = position_bias is not None or time_bias is not None
    if biased and (q_offsets is None or k_offsets is None or kv_index is not None):
        raise ValueError("biases need offsets of queries and keys, and no kv_index: places count within a row")
    q, k, v = dispatch.autocast_operands(q=q, k=k, v=v)
    features: dict[str, Any] = {}
    if biased:
        features["bias"] = checked_bias(q, k, position_bias, time_bias, q_times, k_times, time_bucket_width)
    activations = _per_head(activation, q.shape[1])
    unchecked = []  # unless all rows are equally long by construction
    if k_offsets is None:
        k_offsets = _uniform_offsets(k.shape[0], k.shape[1], max_k, "max_k", k.device, q_offsets)
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    elif k_offsets is not q_offsets or max_k < max_q:
        unchecked.append((k_offsets, max_k, "max_k"))
    check_offsets(k.shape[0], k_offsets)
    num_rows = k_offsets.shape[0] - 1 if kv_index is None else kv_index.shape[0]
    known = q_offsets is None and kv_index is None
    if q_offsets is None:
        q_offsets = _uniform_offsets(num_rows, q.shape[0], max_q, "max_q", q.device, k_offsets)
        q = q.expand(num_rows, *q.shape).flatten(0, 1)
    if q_offsets.shape[0] - 1 != num_rows:
        other = "k" if kv_index is None else "kv_index"
        raise ValueError(f"q has {q_offsets.shape[0] - 1} rows and {other} has {num_rows}; they must be equal")
    check_offsets(q.shape[0], q_offsets)
    if kv_index is not None:
        q_offsets = _merged(q_offsets, kv_index, k_offsets.shape[0] - 1)
    if not known:
        unchecked.append((q_offsets, max_q, "max_q"))
    structure = checked_structure(mask, q_offsets, k_offsets, num_targets, contextual, prefix, target_window, align)
    if structure is not None:
        if kv_index is not None:
            raise ValueError("kv_index with targets, contextual tokens, a prefix or align='end' is not supported")
        features["structure"] = structure
    chosen = dispatch.choose_backend(
        "gdpa",
        backend,
        q,
        head_dim=q.shape[2],
        value_dim=v.shape[2],
        activations=activations,
        windowed=mask.windowed,
        **{"biased": True} if biased else {},
        **{"structured": True} if structure else {},
    )
    if not chosen.checks_lengths:
        for offsets, maximum, name in unchecked:
            check_lengths(offsets, maximum, name)
    rows = Rows(q_offsets, max_q), Rows(k_offsets, max_k)
    return chosen.function(q, k, v, *rows, activations, score_scale, out_scale, mask, **features)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor | None) -> None:
    dense = k_offsets is None
    if (
        q.dim() != 3
        or k.dim() != 3 + dense
        or v.dim() != k.dim()
        or k.shape[:-1] != v.shape[:-1]
        or q.shape[2] != k.shape[-1]
        or not k.shape[-2]
        or q.shape[1] % k.shape[-2]
    ):
        rows = "B, Lk" if dense else "Nk"
        raise ValueError(
            f"shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; expected "
            f"q [{'S' if q_offsets is None else 'Nq'}, H, d], k [{rows}, Hkv, d], v [{rows}, Hkv, dv] with H a "
            "multiple of Hkv"
        )


def _per_head(activation: str | Sequence[str], num_heads: int) -> tuple[str, ...]:
    names = (activation,) * num_heads if isinstance(activation, str) else tuple(activation)
    for name in names:
        if name not in ACTIVATIONS:
            raise unknown(name)
    if len(names) != num_heads:
        raise ValueError(f"got {len(names)} activations for {num_heads} heads; give one, or one per head")
    return names


def _uniform_offsets(
    num_rows: int, length: int, maximum: int, name: str, device: torch.device, others: Tensor | None
) -> Tensor:
    """Offsets of rows that are all equally long, which the host can compare with the maximum.

    Made once for the offsets of the other side, if there are any.
    """
    if length > maximum:
        raise ValueError(f"rows have {length} values, more than {name}={maximum}; raise {name}")

    def make() -> Tensor:
        return torch.arange(num_rows + 1, device=device) * length

    return make() if others is None else derived(make, ("uniform", num_rows, length), others)


def _merged(q_offsets: Tensor, kv_index: Tensor, num_key_rows: int) -> Tensor:
    """[num_key_rows + 1] offsets of the queries that read each key row; `kv_index` keeps them in order."""

    def make() -> Tensor:
        rows = torch.arange(num_key_rows + 1, device=kv_index.device, dtype=kv_index.dtype)
        if kv_index.shape[0]:
            valid = ((kv_index[1:] >= kv_index[:-1]).all() & (kv_index[0] >= 0)) & (kv_index[-1] < num_key_rows)
            message = f"kv_index must not decrease and must name rows 0 to {num_key_rows - 1} of the keys"
            if kv_index.device.type != "cpu" or torch.compiler.is_compiling():
                torch._assert_async(valid, message)
            elif not valid:
                raise ValueError(message)
        return q_offsets[torch.searchsorted(kv_index, rows)]

    return derived(make, ("merged", num_key_rows), q_offsets, kv_index)


def _hopper(
    *,
    device: str,
    capability: Hashable,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    biased: Hashable = False,
    structured: Hashable = False,
    **_: Hashable,
) -> str | None:
    if biased or structured:
        return "has no biases" if biased else UNSTRUCTURED
    return needs_hopper_heads(device, capability, dtype, head_dim, value_dim)


def _padded(*, device: str, biased: Hashable = False, structured: Hashable = False, **_: Hashable) -> str | None:
    if biased or structured:
        return "has no biases" if biased else UNSTRUCTURED
    return None if device == "cuda" else f"is compiled for CUDA devices, the tensors are on {device}"


dispatch.declare(
    "gdpa",
    # The forward's schedule checks all lengths anyway.
    Backend("hopper", "kernels.gdpa.hopper.operators:gdpa", _hopper, checks_lengths=True),
    # Preferred to the reference because it keeps no scores in memory.
    Backend("triton", "kernels.gdpa.triton.operators:gdpa", serves_triton),
    Backend("reference", reference.gdpa),
    Backend("padded", "kernels.gdpa.padded:gdpa", _padded),  # the others are compared with it
)


@dispatch.flops("gdpa")
def _flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Rows,
    keys: Rows,
    activations: tuple[str, ...],
    score_scale: float,
    out_scale: float,
    mask: Mask,
    structure: Structure | None = None,
    **_: object,
) -> float:
    return pair_flops(q, v, queries, keys, mask, structure)
