"""The log-sum-exp of `jagged_attention` and attention sinks, with gradients: the reference, a compiler, each kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import jagged_attention
from kernels.attention.operator import attention_operator
from kernels.core.mask import NO_MASK
from kernels.core.rows import Rows
from kernels.testing import check_gradients, poisoned_empty
from tests.kernels.attention.attention_cases import (
    EXACT,
    EXACT_GRADIENTS,
    STRUCTURES,
    gradients,
    inputs_of,
    oracle,
    outputs,
    with_lse,
    with_targets,
)
from tests.kernels.core.on_gpu import without_waiting
from tests.kernels.jagged.jagged_problems import offsets_of

LENGTHS = [([5, 0, 3, 7, 1], [5, 2, 3, 0, 1]), ([4], [3]), ([0, 0], [0, 3]), ([], [])]
MASKS: dict[str, dict[str, Any]] = {"dense": {}, "window": {"window": (1, 0)}, "all": STRUCTURES["all, window"]}


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_reference(lengths: tuple[list[int], list[int]], mask: str, sinks: bool) -> None:
    offsets = {"q_offsets": offsets_of(lengths[0]), "k_offsets": offsets_of(lengths[1])}
    call = offsets | with_targets(MASKS[mask], offsets["k_offsets"])
    for reach, beside in ((None, with_lse), (2, with_lse), (None, partial)):
        check_gradients(
            beside(partial(jagged_attention, max_q=9, max_k=9, **call)),
            beside(partial(oracle, **call)),
            inputs_of(**offsets, heads=(4, 2), widths=(3, 2), reach=reach, sinks=sinks),
            EXACT,
            EXACT_GRADIENTS,
        )


@pytest.mark.parametrize("sinks", [None, [0.5, -torch.inf]], ids=str)
def test_a_query_without_keys(sinks: list[float] | None) -> None:
    """Only its sink is left of the softmax. A sink of -inf is none."""
    offsets = {"q_offsets": torch.tensor([0, 2, 5]), "k_offsets": torch.tensor([0, 0, 1])}
    inputs = inputs_of(**offsets, heads=(2, 2), widths=(4, 4))
    plain = jagged_attention(**inputs, **offsets, max_q=3, max_k=1, window=0)
    if sinks is not None:
        inputs["sinks"] = torch.tensor(sinks, dtype=torch.float64)
    leaves = [each.requires_grad_() for each in inputs.values()]
    out, lse = jagged_attention(**inputs, **offsets, max_q=3, max_k=1, window=0, return_lse=True)
    blind = [0, 1, 3, 4]
    expected = torch.tensor(sinks or [-torch.inf] * 2, dtype=torch.float64)
    assert torch.equal(lse[:, blind], expected[:, None].expand(2, 4))
    assert (out[blind] == 0).all()
    assert torch.equal(out[:, 1], plain[:, 1])
    for loss in (out.sum(), lse.exp().sum()):
        found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        assert all(each is None or each.isfinite().all() for each in found)
        assert (found[0][blind] == 0).all()


def test_parts_of_the_keys_are_merged_by_their_log_sum_exp() -> None:
    """What it is for: out and every gradient of all keys, from attention to the first of each row and to the others."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    offsets, part = offsets_of([4, 2]), offsets_of([2, 1])
    attend = partial(jagged_attention, q, q_offsets=offsets, max_q=4, max_k=4, return_lse=True)
    whole, lse = attend(k, v, k_offsets=offsets, sinks=sinks)
    parts = [
        attend(k[chosen], v[chosen], k_offsets=part, sinks=own)
        for chosen, own in (([0, 1, 4], sinks), ([2, 3, 5], None))
    ]
    total = torch.logaddexp(*(each for _, each in parts))
    merged = sum(out * (each - total).exp().t()[:, :, None] for out, each in parts)
    torch.testing.assert_close((merged, total), (whole, lse))
    grads = (torch.autograd.grad(x.square().sum(), (q, k, v, sinks)) for x in (merged, whole))
    torch.testing.assert_close(*grads)


def test_only_a_loss_of_the_log_sum_exp_runs_the_backward_twice() -> None:
    runs = []

    def forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(q), q.new_zeros(2, len(q))

    def backward(grad: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        runs.append(None)
        return tuple(torch.zeros_like(x) for x in inputs[:3])

    operator = attention_operator("test_counted", forward, backward, features=False)
    leaves = [torch.randn(5, 2, 4, requires_grad=True) for _ in range(3)]
    rows, sinks = Rows(offsets_of([2, 3]), 3), torch.zeros(2, requires_grad=True)

    def loss(q: Tensor, k: Tensor, v: Tensor, with_lse: bool) -> Tensor:
        out, lse = operator(q, k, v, rows, rows, 1.0, NO_MASK, sinks=sinks, return_lse=True)
        return out.sum() + lse.sum() if with_lse else out.sum()

    for attend in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        for used in (False, True):
            runs.clear()
            torch.autograd.grad(attend(*leaves, used), [*leaves, sinks])
            assert len(runs) == 1 + used


def test_arguments_are_checked() -> None:
    x, offsets = torch.zeros(5, 2, 4), torch.tensor([0, 2, 5])
    for sinks in (torch.zeros(3), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"sinks must be floating \[2\], got"):
            jagged_attention(x, x, x, offsets, offsets, max_q=3, max_k=3, sinks=sinks)


gpu = pytest.mark.gpu


def attended(backend: str, call: dict[str, Any]) -> Any:
    return partial(jagged_attention, max_q=700, max_k=700, backend=backend, **call)


@gpu
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 128), (torch.float16, 64)])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (9, 3)}], ids=str)
def test_hopper(mask: dict[str, Any], dtype: torch.dtype, width: int, sinks: bool) -> None:
    """Rows of either backward, rows without keys, and masks that hide all of them."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    lengths = ([0, 300, 1, 64, 5, 129] + [20] * 8, [70, 130, 0, 64, 3, 700] + [33] * 8)
    offsets = {"q_offsets": offsets_of(lengths[0]).cuda(), "k_offsets": offsets_of(lengths[1], torch.int32).cuda()}
    with poisoned_empty():
        check_gradients(
            with_lse(attended("hopper", offsets | mask)),
            with_lse(attended("reference", offsets | mask)),
            inputs_of(**offsets, heads=(4, 2), widths=(width, width), dtype=dtype, sinks=sinks),
            outputs(700),
            gradients(700),
        )


@gpu
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_in_a_layer(backend: str) -> None:
    """Parts of a projection, compiled, with equal bits each time; nothing waits for the device."""
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    offsets = offsets_of([130, 0, 700] * 20).cuda()
    packed = torch.randn(16600, 3, 2, 64, device="cuda").bfloat16().requires_grad_()
    sinks = torch.randn(2, device="cuda", requires_grad=True)
    attend = attended(backend, {"q_offsets": offsets, "k_offsets": offsets, "causal": True})

    def step(attend: Any = attend) -> list[Tensor]:
        out, lse = attend(*packed.unbind(1), sinks=sinks, return_lse=True)
        return [out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), (packed, sinks))]

    first = step()
    assert all(torch.equal(*each) for each in zip(first, without_waiting(step), strict=True))
    for one, other in zip(step(torch.compile(attend, fullgraph=True)), first, strict=True):
        assert float((one - other).float().norm() / other.float().norm()) < 1e-2
