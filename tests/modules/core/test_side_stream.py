"""Work beside other work: the same numbers as one after the other, as branches of a graph on a GPU."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.core import caches
from modules.config import ModelConfig
from modules.core.side_stream import SideStream
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.models import build
from modules.models.gem import GEM
from modules.models.interformer import InterFormer
from modules.models.kunlun import Kunlun
from tests.modules.factories import random_batch, vendor_spec
from tests.modules.models.test_models import GEM_SMALL, KUNLUN, SMALL


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


class Lanes(TorchDispatchMode):
    """What each lane knows to be done: as streams would, one waits for another where it begins and is joined."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, joins: bool = True) -> None:
        super().__init__()
        self.early: list[str] = []  # operators that read what their lane has not waited for
        self._done: dict[object, Counter[object]] = defaultdict(Counter)  # by lane: the steps of all lanes
        self._made: dict[int, tuple[object, int]] = {}  # by memory: the lane that wrote it, and its step
        self._alive: list[Any] = []  # so that no other tensor gets the same memory
        self._inside: list[object] = ["main"]
        lanes = self

        def begin(work: SideStream) -> SideStream:
            lanes._wait(work._lane, lanes._inside[-1])
            lanes._inside.append(work._lane)
            return work

        def join_all(work: SideStream, results: Sequence[Tensor]) -> Sequence[Tensor]:
            if joins:
                lanes._wait(lanes._inside[-1], work._lane)
            return results

        monkeypatch.setattr(caches, "is_uncached", lambda: True)  # as while a graph is captured
        monkeypatch.setattr(SideStream, "__enter__", begin)
        monkeypatch.setattr(SideStream, "__exit__", lambda *_: lanes._inside.pop() and None)
        monkeypatch.setattr(SideStream, "join_all", join_all)

    def _wait(self, waits: object, other: object) -> None:
        self._done[waits] |= self._done[other]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        lane, done = self._inside[-1], self._done[self._inside[-1]]
        done[lane] += 1
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                maker, step = self._made.setdefault(x.untyped_storage()._cdata, ("main", 0))  # an input of the model
                self._alive.append(x.untyped_storage())
                self.early += [f"{func} in {lane} of {maker}"] * (done[maker] < step)
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and (func._schema.is_mutable or x.untyped_storage()._cdata not in self._made):
                self._made[x.untyped_storage()._cdata] = lane, done[lane]
                self._alive.append(x.untyped_storage())
        return result


MODELS: dict[str, ModelConfig] = {
    "kunlun": Kunlun.Config(**KUNLUN, num_layers=4),
    "kunlun without comp_skip": Kunlun.Config(**KUNLUN, comp_skip=False, num_layers=2),
    "gem": GEM.Config(**GEM_SMALL, num_layers=3),
    "interformer": InterFormer.Config(**SMALL | {"num_layers": 3}),
}


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_lanes_wait_for_what_they_read(name: str, joins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config, spec = MODELS[name], vendor_spec()
    embedding = FeatureEmbedding(spec, config.dim, device="cpu")
    batch, model = random_batch(spec, (2, 3), [5, 4]), build(config, spec)
    tokens = embedding(batch)
    with Lanes(monkeypatch, joins=joins) as lanes:
        logits = model(tokens, batch)
        logits + 1
    assert (lanes.early == []) is joins, lanes.early[:3]


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
