"""What operators are held to on a GPU, whatever they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from tests.kernels.jagged.jagged_problems import offsets_of

T = TypeVar("T")
Attend = Callable[..., Tensor]
"""Attention or the like: q, k, v, and by name the offsets and maxima of rows."""


def without_waiting(step: Callable[[], T]) -> T:
    """The result of a second call, which must not wait for the device; the first one may, to compile."""
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def memory_of(step: Callable[[], object]) -> int:
    """Bytes that a step takes at its peak, which must not wait for the device."""
    step()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    without_waiting(step)
    return torch.cuda.max_memory_allocated() - before


def assert_same_bits(step: Callable[[], Sequence[Tensor]], runs: int = 4) -> None:
    first = step()
    for _ in range(runs - 1):
        assert all(torch.equal(*each) for each in zip(first, step(), strict=True)), "runs differ"


def with_gradients(attend: Attend, leaves: Sequence[Tensor], grad: Tensor | None = None) -> list[Tensor]:
    """The result, and gradients of the leaves by that of the result, ones where it is not given."""
    out = attend(*leaves)
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out) if grad is None else grad)]


def assert_views_are_as_copies(attend: Attend) -> None:
    """Parts of one projection, and the gradient of a transposed product, which is not contiguous either."""
    offsets = offsets_of([130, 0, 7]).cuda()
    attend = partial(attend, q_offsets=offsets, k_offsets=offsets, max_q=130, max_k=130)
    views = torch.randn(137, 2, 3, 64, device="cuda", dtype=torch.bfloat16).requires_grad_().unbind(2)
    grad = torch.randn(64, 2, 137, device="cuda", dtype=torch.bfloat16).permute(2, 1, 0)
    plain = [x.detach().contiguous().requires_grad_() for x in views]
    expected = with_gradients(attend, plain, grad.contiguous())
    for one, other in zip(with_gradients(attend, views, grad), expected, strict=True):
        assert torch.equal(one, other)


def assert_more_than_2_to_the_31_elements(attend: Attend, reference: Attend) -> None:
    """The first and the last rows, by relative error of each result."""
    if torch.cuda.mem_get_info()[0] < 60e9:
        pytest.skip("needs 60 GB")
    rows, length, heads, width = 2**17, 65, 2, 128
    total = rows * length
    assert total * heads * width > 2**31
    offsets = torch.arange(rows + 1, device="cuda") * length
    *leaves, grad = (torch.randn(total, heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in leaves]
    maxima = {"max_q": length, "max_k": length}
    actual = with_gradients(partial(attend, q_offsets=offsets, k_offsets=offsets, **maxima), leaves, grad)
    reference = partial(reference, q_offsets=offsets[:4], k_offsets=offsets[:4], **maxima)
    for chosen in (slice(0, 3 * length), slice(total - 3 * length, total)):
        some = [x.detach()[chosen].double().requires_grad_() for x in leaves]
        for one, other in zip(actual, with_gradients(reference, some, grad[chosen].double()), strict=True):
            assert float((one[chosen] - other).norm() / other.norm()) < 1e-2
