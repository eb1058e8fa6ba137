"""Softmax attention on jagged rows: queries of a row over the keys of the same row.

Values are [N, heads, features] with offsets [B + 1], as in `kernels.jagged`; nothing is padded. The equations and the
tiles are in the README of this folder, the modules in `modules.layers.attention` and `modules.layers.pooling`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.attention import reference
from kernels.attention.bias import BUCKET_WIDTH, Bias, checked_bias, padded_bias, time_bucket
from kernels.attention.pool import attention_pool, pools
from kernels.attention.structure import (
    FEATURES,
    NUM_FEATURES,
    NUM_TENSORS,
    Structure,
    checked_structure,
    packed_features,
    unpacked_features,
)
from kernels.core import dispatch
from kernels.core.checks import check_heads, check_lengths, check_offsets
from kernels.core.chip import needs_hopper_heads
from kernels.core.dispatch import Backend
from kernels.core.mask import Mask, checked_mask
from kernels.core.offsets import attended_pairs
from kernels.core.rows import Rows

__all__ = [
    "BUCKET_WIDTH",
    "FEATURES",
    "NUM_FEATURES",
    "NUM_TENSORS",
    "UNSTRUCTURED",
    "Bias",
    "Structure",
    "attention_pool",
    "checked_bias",
    "checked_structure",
    "jagged_attention",
    "packed_features",
    "padded_bias",
    "pair_flops",
    "pools",
    "serves_triton",
    "time_bucket",
    "unpacked_features",
]

# Query rows of a key head (of all heads that share it) that a tile of the kernels for few queries holds.
MAX_FEW_ROWS = 32
VARLEN_CHIPS = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0))
# Wider heads have no backward on some of the chips above.
MAX_VARLEN_HEAD = 192
UNSTRUCTURED = "has no targets, contextual tokens, prefixes or masks aligned to the end"
WITHOUT_LSE = "has neither sinks nor a log-sum-exp with gradients"
POSITIVE_SCALE = "needs a positive scale: it masks scores before they are scaled"


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
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Softmax attention of each row's queries over the same row's keys.

    q [Nq, H, d], k [Nk, Hkv, d], v [Nk, Hkv, dv] -> [Nq, H, dv]; H is a multiple of Hkv, and head h reads key head
    h // (H / Hkv). Scores are multiplied by `scale` (default 1 / sqrt(d)). Query i sees key j, both counted within
    their row, when all of the following hold that are set:

    - `causal`: j <= i;
    - `window`, w or (left, right): i - left <= j <= i + right, None or -1 on a side for no limit;
    - `block_size`: i // block_size == j // block_size.

    Masks are top-left; `align="end"` makes them bottom-right, as FlashAttention's: a row's last query stands at its
    last key. A query that sees no key gives zeros, with zero gradients. Rows may have tokens of several kinds, as in
    HSTU; these arguments exclude `block_size`:

    - `num_targets` [B], int32 or int64: that many last keys of each row are targets, which only themselves see. A query
      at a target's place, or further behind, sees all other keys, whatever the window, or the last `target_window`.
    - `contextual`: the first so many keys see all keys but targets, and are seen as those of a prefix.
    - `prefix`: the window hides none of the first so many keys: with a window, semi-local attention.

    Added to scaled scores, with gradients of the tables; targets count as standing at one place, behind the others:

    - `position_bias` [H, 2 P + 1]: column clamp(j - i, -P, P) + P;
    - `time_bias` [H, T]: column `time_bucket(q_times[i] - k_times[j], T, time_bucket_width)`, for `q_times` [Nq] and
      `k_times` [Nk] of an integer dtype, in seconds.

    `sinks` [H] are scores whose values are zeros: exp(sinks[h]) is added to the denominator of each softmax of head h.
    With `return_lse` the result is (out, lse): the logarithm of the denominators [H, Nq], in float32 or wider, -inf for
    a query that sees no key, and has no sink. It has gradients, which cost a second run of the backward kernel.

    No row has more than max_q queries or max_k keys. In an autocast region the operands take its dtype; tables and
    sinks are used in float32.
    """
    check_heads(q, k, v)
    check_offsets(q.shape[0], q_offsets)
    check_offsets(k.shape[0], k_offsets)
    if q_offsets.shape != k_offsets.shape:
        raise ValueError(f"q has {len(q_offsets) - 1} rows and k has {len(k_offsets) - 1}; they must be equal")
    mask = checked_mask(causal, window, block_size)
    q, k, v = dispatch.autocast_operands(q=q, k=k, v=v)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[2])
    features: dict[str, Any] = {}
    if position_bias is not None or time_bias is not None:
        features["bias"] = checked_bias(q, k, position_bias, time_bias, q_times, k_times, time_bucket_width)
    if structure := checked_structure(
        mask, q_offsets, k_offsets, num_targets, contextual, prefix, target_window, align
    ):
        features["structure"] = structure
    if sinks is not None:
        if sinks.shape != q.shape[1:2] or not sinks.is_floating_point():
            raise ValueError(f"sinks must be floating [{q.shape[1]}], got {tuple(sinks.shape)} {sinks.dtype}")
        features["sinks"] = sinks.to(torch.promote_types(q.dtype, torch.float32))
    if return_lse:
        features["return_lse"] = True
    chosen = dispatch.choose_backend(
        "jagged_attention",
        backend,
        q,
        head_dim=q.shape[2],
        value_dim=v.shape[2],
        masked=mask.windowed,
        same_offsets=q_offsets is k_offsets,
        block_local=block_size is not None,
        biased="bias" in features,
        positive_scale=scale > 0,
        few_queries=max_q < 64,
        query_rows=min(max_q * q.shape[1] // k.shape[1], 64),  # of a key head; many count as 64
        named=backend,
        **{"structured": True} if structure else {},
        **{"with_lse": True} if return_lse or sinks is not None else {},
    )
    if not chosen.checks_lengths:
        check_lengths(q_offsets, max_q, "max_q")
        if k_offsets is not q_offsets or max_k < max_q:
            check_lengths(k_offsets, max_k, "max_k")
    return chosen.function(q, k, v, Rows(q_offsets, max_q), Rows(k_offsets, max_k), scale, mask, **features)


def _few_queries(
    *,
    dtype: torch.dtype,
    masked: bool,
    block_local: bool,
    biased: bool,
    query_rows: int,
    structured: bool = False,
    **facts: Any,
) -> str | None:
    if reason := serves_triton(dtype=dtype, **facts) or dispatch.needs_dtype(dtype, *dispatch.HALF):
        return reason
    if masked or block_local or biased or structured:
        return "has neither masks nor block-local attention nor biases"
    if query_rows > MAX_FEW_ROWS:
        return f"needs max_q times heads of a key head of at most {MAX_FEW_ROWS}"
    return None


def _hopper(
    *,
    device: str,
    capability: Hashable,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    block_local: bool,
    biased: bool,
    positive_scale: bool,
    few_queries: bool,
    structured: bool = False,
    **_: Hashable,
) -> str | None:
    if reason := needs_hopper_heads(device, capability, dtype, head_dim, value_dim):
        return reason
    if block_local or biased:
        return "has no block-local attention and no biases"
    if structured:
        return UNSTRUCTURED
    if not positive_scale:
        return POSITIVE_SCALE
    if few_queries:
        return "needs max_q of at least 64: it pads rows of queries to tiles of 64, in memory for their gradients too"
    return None


def _varlen(
    *,
    device: str,
    capability: Hashable,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    masked: bool,
    same_offsets: bool,
    block_local: bool,
    biased: bool,
    positive_scale: bool,
    chips: tuple[tuple[int, int], ...] = VARLEN_CHIPS,
    widest: int = MAX_VARLEN_HEAD,
    structured: bool = False,
    with_lse: bool = False,
    **_: Hashable,
) -> str | None:
    if reason := dispatch.needs_capability(device, capability, *chips) or dispatch.needs_dtype(dtype, *dispatch.HALF):
        return reason
    if value_dim != head_dim:
        return f"needs values as wide as keys, got {value_dim} and {head_dim}"
    if head_dim % 8 or head_dim > widest:
        return f"needs a head dimension that is a multiple of 8 and at most {widest}, got {head_dim}"
    if block_local or biased:
        return "has neither block-local attention nor biases"
    if structured:
        return UNSTRUCTURED
    if with_lse:
        return WITHOUT_LSE
    if not positive_scale:
        return POSITIVE_SCALE
    if masked and not same_offsets:
        return "aligns causal and window masks to the end of each row, which is the same only if q_offsets is k_offsets"
    return None


def _flash_attention_4(*, named: str | None = None, with_lse: bool = False, **facts: Any) -> str | None:
    if reason := _varlen(**facts, chips=((9, 0),), widest=256):
        return reason
    request = dispatch.requested("jagged_attention", named)
    if request is None or request[0] != "flash_attention_4":
        return "serves only by name"  # until its tests have run on a GPU
    return _why_flash_attention_4_is_missing()


def _why_flash_attention_4_is_missing() -> str | None:
    try:
        import kernels.attention.flash_attention_4  # noqa: F401
    except Exception as error:  # also where its libraries do not fit the driver or torch
        return f"cannot be imported: {error!r}"
    return None


_why_flash_attention_4_is_missing._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see dispatch._import


def serves_triton(
    *, device: str, capability: Hashable, dtype: torch.dtype, head_dim: int, value_dim: int, **_: Hashable
) -> str | None:
    """Why the Triton kernels of attention and GDPA cannot serve."""
    if reason := dispatch.needs_triton(device, capability) or dispatch.needs_dtype(dtype, *dispatch.FLOATS):
        return reason
    if max(head_dim, value_dim) > 256:
        return f"needs heads of at most 256 features, got {head_dim} and {value_dim}"
    return None


def _padded(
    *,
    device: str,
    masked: bool,
    same_offsets: bool,
    block_local: bool,
    biased: bool,
    structured: bool = False,
    with_lse: bool = False,
    **_: Hashable,
) -> str | None:
    if device != "cuda":
        return f"is compiled for CUDA devices, the tensors are on {device}"
    if structured:
        return UNSTRUCTURED
    if with_lse:
        return WITHOUT_LSE
    if masked and not same_offsets:
        return "has causal and window masks only where q_offsets is k_offsets"
    return "has neither block-local attention nor biases" if block_local or biased else None


dispatch.declare(
    "jagged_attention",
    # A tile of the others holds 64 queries or more of one head.
    Backend("decode", "kernels.attention.triton.operators:few_queries", _few_queries),
    # The forward's schedule checks all lengths anyway.
    Backend("hopper", "kernels.attention.hopper.operators:attention", _hopper, checks_lengths=True),
    Backend("torch", "kernels.attention.varlen:jagged_attention", _varlen),
    # Slower in training on Hopper than torch, where the first two come before both; not compared on other chips.
    Backend("triton", "kernels.attention.triton.operators:attention", serves_triton),
    Backend("reference", reference.jagged_attention),
    Backend("padded", "kernels.attention.padded:jagged_attention", _padded),  # the others are compared with it
)


_flash_attn = importlib.util.find_spec("flash_attn")
if _flash_attn and any(Path(folder, "cute").is_dir() for folder in _flash_attn.submodule_search_locations or ()):
    _implementation = "kernels.attention.flash_attention_4:attention"
    dispatch.prefer("jagged_attention", Backend("flash_attention_4", _implementation, _flash_attention_4))


def pair_flops(
    q: Tensor, v: Tensor, queries: Rows, keys: Rows, mask: Mask, structure: Structure | None = None
) -> float:
    """Of the scores and the weighted values of all pairs that the masks leave."""
    offsets = queries.offsets, keys.offsets
    pairs = attended_pairs(*offsets, mask) if structure is None else structure.pairs(mask, *offsets)
    return 2 * q.shape[1] * (q.shape[2] + v.shape[2]) * pairs


@dispatch.flops("jagged_attention")
def _flops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Rows,
    keys: Rows,
    scale: float,
    mask: Mask,
    structure: Structure | None = None,
    **_: object,
) -> float:
    return pair_flops(q, v, queries, keys, mask, structure)
