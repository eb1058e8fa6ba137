"""Attention of the leaves of a tree to the keys of every level above them; see `kernels.ikbo`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.core.checks import check_lengths, check_offsets
from kernels.core.dispatch import Backend
from kernels.core.offsets import attended_pairs, scaled_offsets
from kernels.gdpa import gdpa
from kernels.ikbo import reference
from kernels.ikbo.attention import check_weights, hopper_attention, nested_offsets


def tree_attention(
    q: Tensor,
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    candidate_offsets: Sequence[Tensor],
    k_offsets: Sequence[Tensor],
    *,
    max_candidates: Sequence[int],
    max_k: Sequence[int],
    score_scale: float | None = None,
    activation: str | Sequence[str] | None = None,
    out_scale: float = 1.0,
    backend: str | None = None,
) -> Tensor:
    """Attention of each candidate to the keys of its vendor, its user and so on, together: -> [C, S, H, dv].

    Levels are in the order of `nested_offsets`, outermost first: candidate_offsets[i] says which rows of level i + 1
    belong to each row of level i, and the last one which candidates. Level i has R_i rows with keys k[i] [N_i, Hkv, d]
    and values v[i] [N_i, Hkv, dv] jagged by k_offsets[i] [R_i + 1], at their own size: nothing is copied to lower
    levels. q is [C, S, H, d]. No row of level i has more than max_candidates[i] candidates below it or max_k[i] keys. A
    candidate without any key gets zeros.

    One softmax spans the keys of all levels. With `activation` nothing is normalised, so the result is the sum over
    levels, in float32; `backend` is then one of GDPA's. Everything else is as in `target_attention`.
    """
    check_weights(activation, score_scale, out_scale)
    levels = len(candidate_offsets)
    if not levels == len(k) == len(v) == len(k_offsets) == len(max_candidates) == len(max_k) or not levels:
        raise ValueError(
            f"every level needs keys, values, both offsets and both maxima; got {len(k)}, {len(v)}, {levels}, "
            f"{len(k_offsets)}, {len(max_candidates)} and {len(max_k)}"
        )
    if q.dim() != 4:
        raise ValueError(f"q must be [C, S, H, d], e.g. q.view(-1, 1, H, d) for one row each; got {tuple(q.shape)}")
    num_candidates, num_seeds, num_heads, head_dim = q.shape
    q_offsets = []
    for level in range(levels):
        keys, values = k[level], v[level]
        if (
            keys.dim() != 3
            or keys.shape[:2] != values.shape[:2]
            or keys.shape[1:] != k[0].shape[1:]
            or values.shape[1:] != v[0].shape[1:]
            or keys.shape[2] != head_dim
            or not keys.shape[1]
            or num_heads % keys.shape[1]
        ):
            raise ValueError(
                f"shapes of level {level} do not fit: q {tuple(q.shape)}, k {tuple(keys.shape)}, v "
                f"{tuple(values.shape)}; expected k [N, Hkv, d] and v [N, Hkv, dv], H a multiple of Hkv, and Hkv and "
                "dv those of the other levels"
            )
        leaves = nested_offsets(*candidate_offsets[level:])
        check_offsets(num_candidates, leaves)
        check_offsets(keys.shape[0], k_offsets[level])
        if leaves.device.type == "cpu":  # on other devices every backend checks them
            check_lengths(leaves, max_candidates[level], f"max_candidates[{level}]")
            check_lengths(k_offsets[level], max_k[level], f"max_k[{level}]")
        if leaves.shape != k_offsets[level].shape:
            raise ValueError(
                f"level {level} has {len(leaves) - 1} rows and its keys have {len(k_offsets[level]) - 1}; they must "
                "be equal"
            )
        q_offsets.append(scaled_offsets(leaves, num_seeds))
    named = {f"{name}[{level}]": x for name, xs in (("k", k), ("v", v)) for level, x in enumerate(xs)}
    operands = dispatch.autocast_operands(q=q, **named)
    q, keys_and_values = operands[0].flatten(0, 1), operands[1:]
    if activation is not None:
        assert score_scale is not None
        keys_of, values_of = keys_and_values[:levels], keys_and_values[levels:]
        parts = zip(keys_of, values_of, q_offsets, k_offsets, max_candidates, max_k, strict=True)
        wide = torch.promote_types(q.dtype, torch.float32)
        terms = [
            gdpa(
                *(q, keys, values, query_rows, key_rows),
                max_q=most * num_seeds,
                max_k=length,
                activation=activation,
                score_scale=score_scale,
                out_scale=out_scale,
                backend=backend,
            ).to(wide)
            for keys, values, query_rows, key_rows, most, length in parts
        ]
        return sum(terms[1:], terms[0]).to(q.dtype).unflatten(0, (num_candidates, num_seeds))
    if score_scale is None:
        score_scale = 1.0 / math.sqrt(head_dim)
    attend = dispatch.choose(
        "tree_attention", backend, q, head_dim=head_dim, value_dim=v[0].shape[2], positive_scale=score_scale > 0
    )
    out = attend(
        q,
        list(keys_and_values[:levels]),
        list(keys_and_values[levels:]),
        q_offsets,
        list(k_offsets),
        [count * num_seeds for count in max_candidates],
        list(max_k),
        score_scale,
    )
    return out.unflatten(0, (num_candidates, num_seeds))


dispatch.declare(
    "tree_attention",
    Backend("hopper", "kernels.ikbo.hopper.tree:tree_attention", hopper_attention),
    Backend("reference", reference.tree_attention),
)


@dispatch.flops("tree_attention")
def _flops(
    q: Tensor, k: list[Tensor], v: list[Tensor], q_offsets: list[Tensor], k_offsets: list[Tensor], *sizes: object
) -> float:
    pairs = sum(map(attended_pairs, q_offsets, k_offsets))
    return 2 * q.shape[1] * (q.shape[2] + v[0].shape[2]) * pairs
