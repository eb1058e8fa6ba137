"""Attention to every level of a tree, with a softmax or not, and what the Hopper operators make of their kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.core.mask import NO_MASK, Mask
from kernels.core.rows import Rows
from kernels.ikbo import joint_attention, tree_attention
from kernels.ikbo.hopper import attention as hopper_attention
from kernels.ikbo.hopper import tree as hopper_tree
from kernels.testing import Tolerance, check_gradients
from tests.kernels.core.devices import on_hopper
from tests.kernels.ikbo.test_ikbo_attention import compare, gpu_operands
from tests.kernels.jagged.jagged_problems import offsets_of

# Vendors of each user, ads of each vendor, keys of each user, keys of each vendor.
TREES = {
    "odd": ([2, 0, 1, 3], [1, 3, 0, 2, 1, 4], [5, 2, 0, 3], [2, 0, 4, 1, 0, 3]),
    "users without keys": ([1, 2], [2, 1, 2], [0, 0], [3, 1, 2]),
    "nobody has keys": ([1, 1], [2, 1], [0, 0], [0, 0]),
    "no ads": ([2, 1], [0, 0, 0], [3, 2], [1, 2, 3]),
}
SUMS = Tolerance("scores, weights and products are rounded in the dtype of the operands", roundings=8, reduction=64)


def attend(
    q: Tensor, k: list[Tensor], v: list[Tensor], case: tuple[list[int], ...], backend: str | None = None, **options: Any
) -> Tensor:
    vendors, ads, user_keys, vendor_keys = case
    users_to_ads = [sum(ads[sum(vendors[:u]) : sum(vendors[: u + 1])]) for u in range(len(vendors))]
    return tree_attention(
        *(q, k, v, [offsets_of(vendors).to(q.device), offsets_of(ads).to(q.device)]),
        [offsets_of(user_keys).to(q.device), offsets_of(vendor_keys).to(q.device)],
        max_candidates=(max(users_to_ads), max(ads)),
        max_k=(max(*user_keys, 1), max(*vendor_keys, 1)),
        backend=backend,
        **options,
    )


def softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


def gelu_and_silu(scores: Tensor) -> Tensor:
    """Of head 0 and head 1, with an out_scale of 2."""
    return 2 * torch.stack([F.gelu(scores[0]), F.silu(scores[1])])


def oracle(
    q: Tensor,
    k: list[Tensor],
    v: list[Tensor],
    case: tuple[list[int], ...],
    weigh: Callable[[Tensor], Tensor] = softmax,
    scale: float | None = None,
) -> Tensor:
    """Each ad by itself, over the keys of its user and its vendor side by side."""
    if scale is None:
        scale = q.shape[3] ** -0.5
    vendors, ads, user_keys, vendor_keys = case
    user_of = [user for user, count in enumerate(vendors) for _ in range(count)]
    vendor_of = [vendor for vendor, count in enumerate(ads) for _ in range(count)]
    rows = []
    for ad, vendor in enumerate(vendor_of):
        keys, values = (
            torch.cat([x[0].split(user_keys)[user_of[vendor]], x[1].split(vendor_keys)[vendor]]) for x in (k, v)
        )
        weights = weigh(torch.einsum("shd,thd->hst", q[ad], keys) * scale)
        rows.append(torch.einsum("hst,thd->shd", weights, values))
    return torch.stack(rows) if rows else q[..., : v[0].shape[2]] * 0


GDPA: dict[str, Any] = {"activation": ("gelu", "silu"), "score_scale": 0.3, "out_scale": 2.0}


@pytest.mark.parametrize(("weigh", "options"), [(softmax, {}), (gelu_and_silu, GDPA)], ids=["softmax", "activations"])
@pytest.mark.parametrize("case", TREES)
def test_levels_are_attended_to_together(case: str, weigh: Callable[[Tensor], Tensor], options: dict[str, Any]) -> None:
    tree_of = TREES[case]
    torch.manual_seed(0)
    q = torch.randn(sum(tree_of[1]), 2, 2, 8, dtype=torch.float64)
    names = {f"{x}{level}": torch.randn(sum(tree_of[2 + level]), 2, 8).double() for x in "kv" for level in (0, 1)}

    def ours(q: Tensor, k0: Tensor, k1: Tensor, v0: Tensor, v1: Tensor) -> Tensor:
        return attend(q, [k0, k1], [v0, v1], tree_of, **options)

    def expected(q: Tensor, k0: Tensor, k1: Tensor, v0: Tensor, v1: Tensor) -> Tensor:
        return oracle(q, [k0, k1], [v0, v1], tree_of, weigh, options.get("score_scale"))

    check_gradients(ours, expected, {"q": q, **names}, SUMS)


def test_what_does_not_fit_is_named() -> None:
    q, keys = torch.zeros(3, 1, 2, 4), torch.zeros(5, 1, 4)
    offsets, k_offsets = torch.tensor([0, 3]), torch.tensor([0, 5])
    limits: dict[str, Any] = {"max_candidates": (3,), "max_k": (5,)}
    for options, message in (({"activation": "gelu"}, "needs score_scale"), ({"out_scale": 2.0}, "is for activations")):
        with pytest.raises(ValueError, match=message):
            tree_attention(q, [keys], [keys], [offsets], [k_offsets], **limits, **options)
    with pytest.raises(ValueError, match="every level needs"):
        tree_attention(q, [keys, keys], [keys], [offsets], [k_offsets], **limits)
    for wrong in ((keys[..., :3], keys), (keys[:, :0], keys[:, :0])):
        with pytest.raises(ValueError, match="shapes of level 0 do not fit"):
            tree_attention(q, [wrong[0]], [wrong[1]], [offsets], [k_offsets], **limits)
    with pytest.raises(ValueError, match=r"q must be \[C, S, H, d\]"):
        tree_attention(q[0], [keys], [keys], [offsets], [k_offsets], **limits)
    with pytest.raises(ValueError, match="level 0 has 1 rows and its keys have 2"):
        tree_attention(q, [keys], [keys], [offsets], [torch.tensor([0, 2, 5])], **limits)
    with pytest.raises(ValueError, match=r"max_candidates\[0\]=2"):
        tree_attention(q, [keys], [keys], [offsets], [k_offsets], max_candidates=(2,), max_k=(5,))


def row_by_row(q: Tensor, k: Tensor, v: Tensor, queries: Tensor, keys: list[tuple[int, int]], scale: float) -> Any:
    """(out, lse) as the kernels' contract has them, for rows of queries and a run of keys each."""
    out, lse = q.new_zeros(len(q), q.shape[1], v.shape[2]), q.new_full((q.shape[1], len(q)), torch.inf)
    for row, (begin, end) in enumerate(keys):
        at = slice(int(queries[row]), int(queries[row + 1]))
        if begin >= end or at.start >= at.stop:
            continue
        scores = torch.einsum("ihd,jhd->hij", q[at], k[begin:end]) * scale
        out[at] = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v[begin:end])
        lse[:, at] = scores.logsumexp(-1)
    return out, lse


@pytest.fixture
def kernels_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two Hopper kernels by their contracts, for tensors of any device and dtype."""
    pytest.importorskip("triton")
    from kernels.attention.hopper import backward as hopper_attention_backward
    from kernels.attention.hopper import forward as hopper_attention_forward
    from kernels.core import scheduling
    from kernels.ikbo.triton import groups as triton_groups
    from kernels.ikbo.triton import levels
    from tests.kernels.core.interpreting import interpret

    interpret(monkeypatch, triton_groups, levels)

    def forward(
        q: Tensor, k: Tensor, v: Tensor, queries: Rows, keys: Rows, scale: float, mask: Mask, schedule: Any = None
    ) -> Any:
        assert mask == NO_MASK
        assert schedule or all(rows.offsets.is_contiguous() for rows in (queries, keys))
        q_offsets, k_offsets = schedule or (queries.offsets, keys.offsets)
        ends = zip(k_offsets[:-1].tolist(), k_offsets[1:].tolist(), strict=True)
        return row_by_row(q, k, v, q_offsets, list(ends), scale)

    def backward(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, queries: Rows, keys: Rows,
        scale: float, mask: Mask,
    ) -> Any:  # fmt: skip
        assert mask == NO_MASK
        q_offsets, k_offsets = queries.offsets, keys.offsets
        assert all(offsets.is_contiguous() for offsets in (q_offsets, k_offsets))
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        delta = (out * grad).sum(-1)
        groups = q_offsets.view(-1, len(k_offsets))
        assert int(sum(group.diff() for group in groups).max()) <= queries.max_length
        for group, row in itertools.product(groups, range(len(k_offsets) - 1)):
            i, j = (slice(int(x[row]), int(x[row + 1])) for x in (group, k_offsets))
            weights = (torch.einsum("ihd,jhd->hij", q[i], k[j]) * scale - lse[:, i, None]).exp()
            dv[j] += torch.einsum("hij,ihd->jhd", weights, grad[i])
            change = weights * (torch.einsum("ihd,jhd->hij", grad[i], v[j]) - delta[i].mT[..., None]) * scale
            dq[i] = torch.einsum("hij,jhd->ihd", change, k[j])
            dk[j] += torch.einsum("hij,ihd->jhd", change, q[i])
        return dq, dk, dv

    monkeypatch.setattr(hopper_attention_forward, "attention_forward", forward)
    monkeypatch.setattr(hopper_attention_backward, "attention_backward", backward)
    monkeypatch.setattr(scheduling, "tile_schedule", lambda queries, keys, *_: (queries, keys))


# The operators add up gradients and results of levels and groups in float32.
FLOAT32 = Tolerance("float32 sums of float64 results", roundings=2**58)


@pytest.mark.usefixtures("kernels_in_python")
@pytest.mark.parametrize("case", TREES)
def test_hopper_levels_are_joined_by_their_shares(case: str) -> None:
    tree_of = TREES[case]
    torch.manual_seed(0)
    q = torch.randn(2 * sum(tree_of[1]), 2, 8, dtype=torch.float64)
    names = {f"{x}{level}": torch.randn(sum(tree_of[2 + level]), 2, 8).double() for x in "kv" for level in (0, 1)}
    vendors, ads = offsets_of(tree_of[0]), offsets_of(tree_of[1])
    keys = [offsets_of(lengths).repeat_interleave(2)[::2] for lengths in tree_of[2:]]

    def ours(q: Tensor, k0: Tensor, k1: Tensor, v0: Tensor, v1: Tensor) -> Tensor:
        # Every other element of what they are views of.
        queries = [x.repeat_interleave(2)[::2] for x in (2 * ads[vendors], 2 * ads)]
        return hopper_tree.tree_attention(q, [k0, k1], [v0, v1], queries, keys, [20, 20], [5, 5], 8**-0.5)

    def expected(q: Tensor, k0: Tensor, k1: Tensor, v0: Tensor, v1: Tensor) -> Tensor:
        return oracle(q.view(-1, 2, 2, 8), [k0, k1], [v0, v1], tree_of).flatten(0, 1)

    check_gradients(ours, expected, {"q": q, **names}, FLOAT32)


@pytest.mark.usefixtures("kernels_in_python")
def test_hopper_groups_meet_the_keys_of_their_request() -> None:
    torch.manual_seed(0)
    own, target, keys = offsets_of([3, 0, 2]), offsets_of([4, 1, 0]), offsets_of([3, 2, 0])
    sizes, q = [5, 5], torch.randn(10, 2, 8, dtype=torch.float64)
    k, v = torch.randn(2, 5, 2, 8, dtype=torch.float64)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hopper_attention.joint_attention(q, k, v, [own, target], keys, [3, 4], 3, 0.3, sizes)

    def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return joint_attention(q, k, v, [own, target], keys, max_q=(3, 4), max_k=3, sizes=sizes, scale=0.3)

    check_gradients(ours, expected, {"q": q, "k": k, "v": v}, FLOAT32)


GPU_TREES = {
    "odd": ([2, 0, 1, 3], [1, 3, 0, 2, 1, 4], [500, 129, 0, 64], [20, 0, 300, 1, 0, 65]),
    "users without keys": ([1, 2], [2, 1, 2], [0, 0], [300, 1, 128]),
    "nobody has keys": ([1, 1], [2, 1], [0, 0], [0, 0]),
}


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("case", GPU_TREES)
def test_hopper_matches_each_ad_by_itself(case: str) -> None:
    tree_of = GPU_TREES[case]
    shapes = [(sum(tree_of[1]), 64, 2, 128), *((sum(tree_of[2 + level]), 2, 128) for _ in "kv" for level in (0, 1))]
    compare(
        lambda q, k0, k1, v0, v1: attend(q, [k0, k1], [v0, v1], tree_of, "hopper"),
        lambda q, k0, k1, v0, v1: oracle(q, [k0, k1], [v0, v1], tree_of),
        gpu_operands(*shapes),
    )
