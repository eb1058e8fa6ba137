"""Public functions of attention from candidates to what their request shares; see the README of this folder.

The query rows of all candidates of a request are contiguous and attend to the same contiguous keys. The kernels of
`kernels.jagged` and `kernels.gdpa` therefore read the request's keys and values once, without a copy. Their gradients
are sums over all those queries, which the same kernels accumulate in float32 and in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kernels.attention import jagged_attention
from kernels.core import dispatch
from kernels.core.checks import check_heads, check_lengths, check_offsets
from kernels.core.chip import needs_hopper_heads
from kernels.core.dispatch import Backend
from kernels.core.offsets import attended_pairs, scaled_offsets
from kernels.gdpa import gdpa
from kernels.ikbo import reference


def nested_offsets(*levels: Tensor) -> Tensor:
    """Offsets of the leaves of a tree by its roots: (users to vendors [U + 1], vendors to ads [V + 1]) -> [U + 1].

    Each level's offsets count rows of the next level, outermost first; one level is returned as it is.
    """
    if not levels:
        raise ValueError("nested_offsets needs at least one level, e.g. nested_offsets(user_to_vendor, vendor_to_ad)")
    composed = levels[0]
    for level, inner in enumerate(levels[1:]):
        try:
            check_offsets(inner.shape[0] - 1, composed)
        except ValueError as error:
            raise ValueError(
                f"level {level} does not fit level {level + 1}: {error}; levels come outermost first, e.g. "
                "nested_offsets(user_to_vendor, vendor_to_ad)"
            ) from None
        composed = inner[composed]
    return composed


def target_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    candidate_offsets: Tensor | Sequence[Tensor],
    k_offsets: Tensor,
    *,
    max_candidates: int,
    max_k: int,
    score_scale: float | None = None,
    activation: str | Sequence[str] | None = None,
    out_scale: float = 1.0,
    backend: str | None = None,
) -> Tensor:
    """Attention of the S queries of each candidate to the keys of its request: [C, S, H, d] -> [C, S, H, dv].

    q [C, S, H, d] holds S query rows a candidate; k [N, Hkv, d] and v [N, Hkv, dv] are jagged by `k_offsets` [R + 1]
    and stay at the request's size. H is a multiple of Hkv, and head h reads key head h // (H / Hkv). Candidates of
    request r are candidate_offsets[r]:candidate_offsets[r + 1]; requests without candidates and without keys are
    allowed, and a candidate of a request without keys gets zeros. A sequence of offsets describes a tree, outermost
    first: see `nested_offsets`.

    Without `activation` weights are a softmax of score_scale q k, 1 / sqrt(d) by default. With one (a name of
    `kernels.gdpa.ACTIVATIONS`, or one per head) they are out_scale * act(score_scale q k), and it must be given.

    `max_candidates` and `max_k` are constants that no request exceeds. q, k and v have one floating dtype; in an
    autocast region they take its dtype. ValueError for shapes, dtypes, names and, on the CPU, offsets that do not fit.
    """
    if q.dim() != 4:
        raise ValueError(f"q must be [C, S, H, d], e.g. q.view(-1, 1, H, d) for one row each; got {tuple(q.shape)}")
    offsets = candidate_offsets if isinstance(candidate_offsets, Tensor) else nested_offsets(*candidate_offsets)
    num_candidates, num_seeds = q.shape[:2]
    check_offsets(num_candidates, offsets)
    if offsets.device.type == "cpu":  # on other devices the check of max_q below is enough
        check_lengths(offsets, max_candidates, "max_candidates")
    rows, row_offsets, max_q = q.flatten(0, 1), scaled_offsets(offsets, num_seeds), max_candidates * num_seeds
    check_weights(activation, score_scale, out_scale)
    if activation is None:
        out = jagged_attention(
            *(rows, k, v, row_offsets, k_offsets), max_q=max_q, max_k=max_k, scale=score_scale, backend=backend
        )
    else:
        assert score_scale is not None
        out = gdpa(
            *(rows, k, v, row_offsets, k_offsets),
            max_q=max_q,
            max_k=max_k,
            activation=activation,
            score_scale=score_scale,
            out_scale=out_scale,
            backend=backend,
        )
    return out.unflatten(0, (num_candidates, num_seeds))


def check_weights(activation: str | Sequence[str] | None, score_scale: float | None, out_scale: float) -> None:
    """ValueError for scales that a softmax, or an activation, does not take."""
    if activation is None and out_scale != 1.0:
        raise ValueError(f"out_scale={out_scale} is for activations; a softmax's weights sum to one: use 1.0")
    if activation is not None and score_scale is None:
        raise ValueError(f"activation {activation!r} needs score_scale: peers differ in it; e.g. 1 / max_k")


def joint_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Sequence[Tensor],
    k_offsets: Tensor,
    *,
    max_q: Sequence[int],
    max_k: int,
    sizes: Sequence[int],
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Softmax attention of several groups of queries over the same keys, such as a user's own queries and those of
    its candidates: [sum of sizes, H, d] -> [sum of sizes, H, dv].

    The groups come one after the other in q: group g has sizes[g] rows, of which rows q_offsets[g][r]:q_offsets[g][r +
    1] belong to request r and see the keys k_offsets[r]:k_offsets[r + 1] of k [N, Hkv, d] and v [N, Hkv, dv]. Each
    query sees all of them. No request has more than max_q[g] queries of group g or max_k keys. Results are those of
    one `jagged_attention` a group; the rest is as there. Projections that write their part of q in place are
    `stacked_linear`.
    """
    if not len(q_offsets) == len(max_q) == len(sizes) or not q_offsets:
        raise ValueError(
            f"every group needs offsets, a size and a maximum; got {len(q_offsets)} offsets, {len(sizes)} sizes and "
            f"{len(max_q)} maxima"
        )
    if q.dim() != 3 or sum(sizes) != q.shape[0]:
        raise ValueError(f"q must be [{sum(sizes)}, H, d], the groups of sizes {tuple(sizes)}; got {tuple(q.shape)}")
    check_heads(q, k, v)
    check_offsets(k.shape[0], k_offsets)
    for group, (offsets, size) in enumerate(zip(q_offsets, sizes, strict=True)):
        if offsets.shape != k_offsets.shape or offsets.dtype != k_offsets.dtype:
            raise ValueError(
                f"q_offsets[{group}] {tuple(offsets.shape)} {offsets.dtype} and k_offsets {tuple(k_offsets.shape)} "
                f"{k_offsets.dtype} must have one shape and one dtype"
            )
        check_offsets(size, offsets)
    q, k, v = dispatch.autocast_operands(q=q, k=k, v=v)
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[2])
    chosen = dispatch.choose_backend(
        "joint_attention",
        backend,
        q,
        head_dim=q.shape[2],
        value_dim=v.shape[2],
        positive_scale=scale > 0,
        few_queries=max(max_q) < 64,
        one_tile=max_k <= 128,
    )
    if not chosen.checks_lengths:
        check_lengths(k_offsets, max_k, "max_k")
        for group, (offsets, maximum) in enumerate(zip(q_offsets, max_q, strict=True)):
            check_lengths(offsets, maximum, f"max_q[{group}]")
    return chosen.function(q, k, v, list(q_offsets), k_offsets, list(max_q), max_k, scale, list(sizes))


def hopper_attention(
    *, device: str, capability: Hashable, dtype: torch.dtype, head_dim: int, value_dim: int, positive_scale: bool
) -> str | None:
    """Why the Hopper kernels of jagged attention cannot serve a call without masks and biases, or None."""
    if reason := needs_hopper_heads(device, capability, dtype, head_dim, value_dim):
        return reason
    return None if positive_scale else "needs a positive scale: it masks scores before they are scaled"


def _hopper_groups(*, few_queries: bool, one_tile: bool, **facts: Hashable) -> str | None:
    if few_queries and not one_tile:
        return (
            "needs a group with max_q of at least 64, or max_k of at most 128: it pads rows of queries to tiles of 64, "
            "in memory for their gradients too if their keys are several tiles"
        )
    return hopper_attention(**facts)  # type: ignore[arg-type]


dispatch.declare(
    "joint_attention",
    # Making the list of groups checks all lengths anyway.
    Backend("hopper", "kernels.ikbo.hopper.attention:joint_attention", _hopper_groups, checks_lengths=True),
    Backend("reference", reference.joint_attention),
)


@dispatch.flops("joint_attention")
def _flops(q: Tensor, k: Tensor, v: Tensor, q_offsets: list[Tensor], k_offsets: Tensor, *sizes: object) -> float:
    pairs = sum(attended_pairs(offsets, k_offsets) for offsets in q_offsets)
    return 2 * q.shape[1] * (q.shape[2] + v.shape[2]) * pairs
