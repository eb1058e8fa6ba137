"""Work beside other work: the same numbers as one after the other, as branches of a graph on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from modules.core.side_stream import SideStream


def step(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A result of many small steps and one of few large ones, and gradients that come from both."""
    with SideStream(x) as work:
        small = x
        for _ in range(20):
            small = (small @ weight).tanh()
    large = torch.cat([x] * 64).square()
    small = work.join(small)
    result = small.sum() + large.mean()
    return (result, *torch.autograd.grad(result, (x, weight)))


def inputs(device: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(256, 32, device=device, requires_grad=True), torch.randn(
        32, 32, device=device, requires_grad=True
    )


def test_elsewhere_it_is_work_like_any_other() -> None:
    x, weight = inputs("cpu")
    with SideStream(x, None) as work:
        y = x @ weight
    assert work.join(y) is y
    with pytest.raises(RuntimeError, match="inside"), SideStream(x):
        raise RuntimeError("inside")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_branches_of_a_graph_are_joined_forward_and_backward() -> None:
    x, weight = inputs("cuda")
    expected = [result.detach() for result in step(x, weight)]
    # Leaves of the capture's own, as in `train.speedup.graphs`.
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(x, weight)
    for _ in range(5):
        for result in results:
            result.detach().zero_()
        graph.replay()
        for actual, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(actual, wanted)
