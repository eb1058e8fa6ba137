"""Attention of candidates to their request's keys, against every candidate by itself in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu
from torch.utils.flop_counter import FlopCounterMode

from kernels.ikbo import joint_attention, nested_offsets, stacked_linear, target_attention
from kernels.testing import Tolerance, assert_close_to_oracle, check_gradients, poisoned_empty
from tests.kernels.attention.attention_cases import gradients, outputs
from tests.kernels.core.devices import on_hopper
from tests.kernels.jagged.jagged_problems import offsets_of

# Candidates and keys of each request.
COUNTS = {
    "odd": ([2, 0, 3, 1, 5], [4, 3, 0, 1, 7]),
    "one": ([1], [2]),
    "nobody": ([0, 0], [3, 0]),
    "huge among empties": ([0, 0, 9, 0], [0, 2, 40, 0]),
}
SUMS = Tolerance("scores, weights and products are rounded in the dtype of the operands", roundings=6, reduction=64)


def oracle(q: Tensor, k: Tensor, v: Tensor, counts: list[int], lengths: list[int], activation: str | None) -> Tensor:
    """One request after the other, every candidate by itself."""
    group = q.shape[2] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1).split(lengths) for x in (k, v))
    out = []
    for candidates, key, value in zip(q.split(counts), keys, values, strict=True):
        scores = torch.einsum("cshd,thd->chst", candidates, key) * q.shape[3] ** -0.5
        weights = gelu(scores) if activation else scores.softmax(-1)
        out.append(torch.einsum("chst,thd->cshd", weights, value))
    return torch.cat(out)


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("case", COUNTS)
def test_every_candidate_attends_as_if_alone(case: str, activation: str | None) -> None:
    counts, lengths = COUNTS[case]
    torch.manual_seed(0)
    q = torch.randn(sum(counts), 3, 4, 8, dtype=torch.float64)
    # Views of a fused projection; fewer key heads than query heads.
    k, v = torch.randn(sum(lengths), 2, 2, 8, dtype=torch.float64).unbind(1)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return target_attention(
            *(q, k, v, offsets_of(counts), offsets_of(lengths)),
            max_candidates=max(counts),
            max_k=max(lengths),
            activation=activation,
            score_scale=8**-0.5 if activation else None,
        )

    check_gradients(ours, lambda q, k, v: oracle(q, k, v, counts, lengths, activation), {"q": q, "k": k, "v": v}, SUMS)


def test_trees_of_offsets_are_composed() -> None:
    users, vendors = torch.tensor([0, 2, 2, 3]), torch.tensor([0, 1, 4, 6])
    assert nested_offsets(users, vendors).tolist() == [0, 4, 4, 6]
    torch.manual_seed(0)
    q, k, v = torch.randn(6, 1, 1, 4), torch.randn(5, 1, 4), torch.randn(5, 1, 4)
    keys = torch.tensor([0, 2, 3, 5])
    limits = {"max_candidates": 4, "max_k": 2}
    nested = target_attention(q, k, v, (users, vendors), keys, **limits)
    assert torch.equal(nested, target_attention(q, k, v, torch.tensor([0, 4, 4, 6]), keys, **limits))


def test_what_does_not_fit_is_named() -> None:
    q, k = torch.zeros(3, 2, 1, 4), torch.zeros(5, 1, 4)
    offsets, keys = torch.tensor([0, 3]), torch.tensor([0, 5])
    limits = {"max_candidates": 3, "max_k": 5}
    with pytest.raises(ValueError, match=r"q must be \[C, S, H, d\]"):
        target_attention(q[0], k, k, offsets, keys, **limits)
    with pytest.raises(ValueError, match="max_candidates=2"):
        target_attention(q, k, k, offsets, keys, max_candidates=2, max_k=5)
    with pytest.raises(ValueError, match="needs score_scale"):
        target_attention(q, k, k, offsets, keys, activation="gelu", **limits)
    with pytest.raises(ValueError, match="out_scale=2.0 is for activations"):
        target_attention(q, k, k, offsets, keys, out_scale=2.0, **limits)
    with pytest.raises(ValueError, match="at least one level"):
        nested_offsets()
    with pytest.raises(ValueError, match="level 0 does not fit level 1: offsets end at 3 .*outermost first"):
        nested_offsets(torch.tensor([0, 1, 3]), torch.tensor([0, 2]))
    rows = q.flatten(0, 1)
    with pytest.raises(ValueError, match=r"q must be \[7, H, d\]"):
        joint_attention(rows, k, k, [keys], keys, max_q=[5], max_k=5, sizes=[7])
    with pytest.raises(ValueError, match=r"q_offsets\[0\].*int32"):
        joint_attention(rows, k, k, [keys.int()], keys, max_q=[6], max_k=5, sizes=[6])
    with pytest.raises(ValueError, match="every group"):
        joint_attention(rows, k, k, [keys], keys, max_q=[5, 5], max_k=5, sizes=[6])
    with pytest.raises(ValueError, match="one E"):
        stacked_linear([torch.zeros(2, 3), torch.zeros(2, 3)], [torch.zeros(4, 3), torch.zeros(5, 3)])
    with pytest.raises(ValueError, match="2 inputs and 1 weights"):
        stacked_linear([torch.zeros(2, 3), torch.zeros(2, 3)], [torch.zeros(4, 3)])


def test_stacked_projections_are_those_of_each_input() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(n, d, dtype=torch.float64) for n, d in ((4, 3), (0, 5), (7, 2))]
    weights = [torch.randn(6, x.shape[1], dtype=torch.float64) for x in inputs]

    def separate(a: Tensor, b: Tensor, c: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return torch.cat([a @ u.mT, b @ v.mT, c @ w.mT])

    def stacked(a: Tensor, b: Tensor, c: Tensor, u: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return stacked_linear([a, b, c], [u, v, w])

    named = dict(zip("abcuvw", (*inputs, *weights), strict=True))
    check_gradients(stacked, separate, named, Tolerance("one product", reduction=8))
    torch.library.opcheck(
        torch.ops.gemsmith.stacked_linear.default,
        ([x.requires_grad_() for x in inputs], [weight.requires_grad_() for weight in weights]),
    )


def test_stacked_projections_make_no_gradient_that_nobody_needs() -> None:
    inputs, weights = [torch.randn(2, 3), torch.randn(4, 5)], [torch.randn(6, 3), torch.randn(6, 5)]
    operands = inputs[1].requires_grad_(), weights[0].requires_grad_()
    loss = stacked_linear(inputs, weights).sum()
    with FlopCounterMode(display=False) as counter:
        gradients = torch.autograd.grad(loss, operands)
    torch.testing.assert_close(gradients, (weights[1].sum(0).expand(4, 5), inputs[0].sum(0).expand(6, 3)))
    assert counter.get_total_flops() == 2 * (4 * 6 * 5 + 2 * 6 * 3)


def test_stacked_projections_have_derivatives_of_every_kind() -> None:
    inputs, weights = [torch.randn(2, 3), torch.randn(4, 5)], [torch.randn(6, 3), torch.randn(6, 5)]
    moved, tangent = torch.func.jvp(lambda x: stacked_linear([x, inputs[1]], weights), (inputs[0],), (inputs[0],))
    torch.testing.assert_close(tangent[:2], moved[:2])
    assert torch.equal(tangent[2:], torch.zeros(4, 6))
    gradient = torch.func.grad(lambda w: stacked_linear(inputs, [w, weights[1]]).sum())(weights[0])
    torch.testing.assert_close(gradient, inputs[0].sum(0).expand(6, 3))


def test_joint_attention_is_that_of_each_group() -> None:
    counts, lengths = COUNTS["odd"]
    torch.manual_seed(0)
    q = torch.randn(sum(lengths) + 3 * sum(counts), 2, 8, dtype=torch.float64)
    k, v = torch.randn(2, sum(lengths), 2, 8, dtype=torch.float64)
    sizes = (sum(lengths), 3 * sum(counts))
    groups = [offsets_of(lengths), 3 * offsets_of(counts)]

    def joint(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return joint_attention(
            *(q, k, v, groups, offsets_of(lengths)),
            max_q=(max(lengths), 3 * max(counts)),
            max_k=max(lengths),
            sizes=sizes,
        )

    def separate(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own, target = q.split(sizes)
        target = oracle(target.view(-1, 3, 2, 8), k, v, counts, lengths, None).flatten(0, 1)
        return torch.cat([oracle(own[:, None], k, v, lengths, lengths, None)[:, 0], target])

    check_gradients(joint, separate, {"q": q, "k": k, "v": v}, SUMS)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_groups_are_listed_one_behind_the_other(index_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from kernels.ikbo.triton import groups as triton_groups
    from tests.kernels.core.interpreting import interpret

    interpret(monkeypatch, triton_groups)
    keys = offsets_of([4, 0, 9], index_dtype)
    groups = [keys, offsets_of([0, 6, 2], index_dtype), offsets_of([1, 1, 1], index_dtype)]
    with poisoned_empty():
        queries, repeated = triton_groups.joined_groups(groups, keys, [9, 6, 1], 9)
    assert queries.tolist() == [0, 4, 4, 13, 13, 13, 19, 21, 21, 22, 23, 24]
    assert repeated.tolist() == 3 * [0, 4, 4, 13]
    assert queries.dtype is repeated.dtype is index_dtype


GPU_COUNTS = {
    "odd": ([2, 0, 3, 1, 5, 1], [400, 3, 0, 1, 700, 129]),
    "uneven": (
        torch.randint(0, 90, (40,), generator=torch.Generator().manual_seed(0)).tolist(),
        torch.randint(0, 500, (40,), generator=torch.Generator().manual_seed(1)).tolist(),
    ),
    "one request": ([3], [257]),
    "huge among empties": ([0, 0, 90, 0], [0, 200, 3000, 0]),
    "nobody": ([0, 0], [300, 0]),
    "no keys": ([3, 2], [0, 0]),
}


def gpu_operands(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in shapes]


@on_hopper
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seeds", [1, 32, 64])
@pytest.mark.parametrize("case", GPU_COUNTS)
def test_hopper_matches_every_candidate_by_itself(case: str, seeds: int, index_dtype: torch.dtype) -> None:
    counts, lengths = GPU_COUNTS[case]
    inputs = gpu_operands((sum(counts), seeds, 2, 128), (sum(lengths), 2, 128), (sum(lengths), 2, 128))
    candidates, keys = (offsets_of(x, index_dtype).cuda() for x in (counts, lengths))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        most = max(*counts, 64)
        return target_attention(
            q, k, v, candidates, keys, max_candidates=most, max_k=max(*lengths, 1), backend="hopper"
        )

    compare(ours, lambda q, k, v: oracle(q, k, v, counts, lengths, None), inputs)


@on_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", GPU_COUNTS)
def test_hopper_joint_attention_matches_each_group(case: str, head_dim: int) -> None:
    counts, lengths = GPU_COUNTS[case]
    compare_joint([lengths, [64 * count for count in counts]], lengths, 2, head_dim)


@on_hopper
@pytest.mark.parametrize("case", ["odd", "uneven", "huge among empties"])
def test_hopper_joint_attention_of_groups_that_lack_requests(case: str) -> None:
    counts, lengths = GPU_COUNTS[case]
    backwards, one = [70 * count for count in reversed(counts)], [0] * (len(counts) - 1) + [5]
    compare_joint([counts, backwards, one], lengths, 4, 128)


def compare_joint(groups: list[list[int]], lengths: list[int], heads: int, head_dim: int) -> None:
    """Queries of each request in each group over the keys of 2 heads."""
    sizes = [sum(counts) for counts in groups]
    inputs = gpu_operands((sum(sizes), heads, head_dim), (sum(lengths), 2, head_dim), (sum(lengths), 2, head_dim))
    *queries, keys = (offsets_of(x).cuda() for x in (*groups, lengths))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return joint_attention(
            *(q, k, v, queries, keys),
            max_q=[max(*counts, 1) for counts in groups],
            max_k=max(*lengths, 1),
            sizes=sizes,
            backend="hopper",
        )

    def separate(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = zip(q.split(sizes), groups, strict=True)
        return torch.cat([oracle(part[:, None], k, v, counts, lengths, None)[:, 0] for part, counts in parts])

    compare(ours, separate, inputs)


def compare(ours: Callable[..., Tensor], expected: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    """Outputs, their gradients, and the same bits again, with outputs full of NaN before they are written."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    results = []
    for _ in range(2):
        with poisoned_empty():
            out = ours(*leaves)
            grad = torch.randn(out.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(out.dtype)
            results.append((out, *torch.autograd.grad(out, leaves, grad)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)  # deterministic
    truth = expected(*wide)
    expected_gradients = torch.autograd.grad(truth, wide, grad.double())
    assert_close_to_oracle(results[0][0], truth, outputs(4096))
    for index, (actual, oracle_gradient) in enumerate(zip(results[0][1:], expected_gradients, strict=True)):
        assert_close_to_oracle(actual, oracle_gradient, gradients(8192), f"gradient {index}")
