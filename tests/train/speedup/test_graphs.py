"""CUDA graphs of the architecture: which steps replay, and that a replay is the step itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from modules.batch import RequestBatch
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.models import build as build_arch
from modules.models.interformer import InterFormer
from train.config.schema import SyntheticConfig
from train.data import SyntheticSource
from train.data.batch import pad_events
from train.speedup import graphs
from train.speedup.arguments import take_apart

DATA = SyntheticConfig(max_history=6, mean_history=3, num_users=20, num_items=20, num_categories=5)
MODEL = InterFormer.Config(dim=16, num_layers=1, interaction_hidden=[8], head_hidden=[8])


class Rerun(graphs._Graphs):
    """In place of graphs on a CPU: computes anew from what a graph would read into what it would write."""

    def _capture(self, plain: nn.Module, arguments: Any, pool: Any) -> None:
        self.name = type(plain.module).__name__
        self._run = lambda: plain(*arguments[0], **arguments[1])
        self.output = self._run().detach()
        self.gradient = torch.empty_like(self.output)
        self.gradients: list[Tensor | None] = [None] * (len(self.inputs) + len(self.parameters))

    def run_forward(self, inputs: Any) -> None:
        for static, tensor in zip(self.inputs, inputs, strict=False):
            static.detach().copy_(tensor)
        with torch.enable_grad():
            self._result = self._run()
        self.output.copy_(self._result.detach())

    def run_backward(self, gradient: Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16):  # captures are made in the forward
            self.gradients = graphs.gradients(self._result, [*self.inputs, *self.parameters], gradient)


def model(device: str) -> tuple[SyntheticSource, FeatureEmbedding, nn.Module]:
    torch.manual_seed(0)
    source = SyntheticSource(DATA)
    with torch.device(device):
        arch = build_arch(MODEL, source.spec)
    return source, FeatureEmbedding(source.spec, MODEL.dim, device=device).to(device), arch


def batches(source: SyntheticSource, device: str, padded: bool = True) -> Iterator[RequestBatch]:
    for start in range(0, 20 if padded else 80, 4):
        batch = source.batch("train", np.arange(start, start + 4))
        yield (pad_events(batch, source.spec, 64) if padded else batch).to(torch.device(device))


def losses(device: str, graphed: bool, padded: bool = True, rate: float = 0.1) -> tuple[list[Tensor], ...]:
    """Of each batch; weights after them, which have moved against their gradients; and gradients of the last batch."""
    source, embedding, arch = model(device)
    if graphed:
        graphs.use_graphs(arch)
    values = []
    parameters = [*embedding.parameters(), *arch.parameters()]
    # Data parallelism holds the nodes that accumulate gradients, which are of the stream that they were made on.
    held = [parameter.expand_as(parameter).grad_fn for parameter in parameters]
    assert all(node.next_functions for node in held)
    for batch in batches(source, device, padded):
        tokens = embedding(batch)
        with torch.autocast(device, torch.bfloat16):
            logits = arch(tokens, batch)
        loss = logits.float().square().mean()
        gradients = [gradient.clone() for gradient in torch.autograd.grad(loss, parameters)]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.data -= rate * gradient
        values.append(loss.detach())
    return values, [parameter.detach() for parameter in parameters], gradients


def test_steps_of_one_shape_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_Graphs", Rerun)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    assert_same(losses("cpu", graphed=True), losses("cpu", graphed=False))
    source, embedding, arch = model("cpu")
    graphs.use_graphs(arch)
    seen = arch.forward._graphs  # type: ignore[union-attr]
    for batch in batches(source, "cpu"):
        arch(embedding(batch), batch)
    assert len(seen) == 1
    seen.clear()  # evaluation and shapes of their own are not captured
    short = source.batch("train", np.arange(3))
    arch(embedding(short), short)
    for batch in batches(source, "cpu"):
        with torch.no_grad():
            arch(embedding(batch), batch)
    assert not seen


def test_layers_replay_where_batches_have_shapes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_Graphs", Rerun)
    monkeypatch.setattr(graphs, "PATIENCE", 3)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    replayed: Counter[str] = Counter()
    begin = Rerun.begin
    monkeypatch.setattr(Rerun, "begin", lambda self, step: (replayed.update([self.name]), begin(self, step)))
    assert_near(*(losses("cpu", graphed, padded=False, rate=0) for graphed in (True, False)))
    # Parts of what reads the histories, too: of `SequenceSummary` those that gate and compress.
    assert set(replayed) >= {"Summary", "InteractionArch", "TaskHeads", "Gating", "LCE"}


def test_a_layer_that_is_called_twice_before_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second replay would write over what the first backward reads."""
    monkeypatch.setattr(graphs, "_Graphs", Rerun)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")

    class Squares(nn.Module):
        def forward(self, x: Tensor, *, scale: float) -> Tensor:
            return x.square() * scale

    layer = Squares()
    layer.forward = graphs._Graphed(layer, layer.forward, take_apart, lambda: "pool", 1)
    for _ in range(2 * graphs.WARMUP_STEPS):
        x, y = (torch.tensor(value, requires_grad=True) for value in (1.0, 2.0))
        result = layer(layer(x, scale=3.0) + y, scale=3.0)
        assert [float(each) for each in torch.autograd.grad(result, (x, y))] == [180.0, 30.0]
    assert len(layer.forward._graphs) == 1
    unfinished = [layer(x, scale=3.0)]
    (graph,) = layer.forward._graphs.values()
    assert graph.waits_for_backward()
    unfinished.clear()
    assert not graph.waits_for_backward()


class Sines(nn.Module):
    """Keeps much more for its backward than its input and its result."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(8):
            x = (x * 2).sin() * x
        return x


def stepped(layer: nn.Module, rows: int, device: str) -> Tensor:
    """The gradient of a step, which is checked."""
    x = torch.linspace(0, 1, rows * 1000, device=device).view(rows, 1000).requires_grad_()
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    (expected,) = torch.autograd.grad(Sines()(x).sum(), x)
    torch.testing.assert_close(gradient, expected)
    return gradient


def test_a_larger_step_and_lack_of_memory_drop_graphs_that_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_Graphs", Rerun)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    layer, memory = Sines(), graphs.StepMemory()
    layer.forward = graphs._Graphed(layer, layer.forward, take_apart, memory, 4)

    def captured(rows: int, steps: int = 1) -> list[int]:
        for _ in range(steps):
            stepped(layer, rows, "cpu")
        return [graph.inputs[0].shape[0] for graph in layer.forward._graphs.values()]

    assert captured(2, steps=3) == [2]
    assert captured(3, steps=2) == [2]
    assert captured(3) == [3]  # the larger one first
    assert captured(2) == [3, 2]
    monkeypatch.setattr(memory, "crowds", lambda inputs: True)
    assert captured(1) == []
    assert captured(2) == [2]


def test_graphs_crowd_a_step_that_would_not_fit_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = iter((20, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: next(reserved, 80))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 20)
    memory = graphs.StepMemory()
    assert not memory.crowds([torch.empty(1)])  # there are none
    with memory.grows([torch.empty(90), torch.empty(10)]):
        pass
    for available, elements, crowded in ((74, 100, True), (75, 100, False), (37, 50, True), (150, 200, False)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=available: (free, 200))
        assert memory.crowds([torch.empty(elements)]) == crowded
    memory.renew()
    assert not memory.crowds([torch.empty(1000)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graphs_of_several_shapes_have_the_memory_of_the_largest() -> None:
    def reserved(sizes: list[int]) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        layer, memory = Sines(), graphs.StepMemory()
        layer.forward = graphs._Graphed(layer, layer.forward, take_apart, memory, 16)
        for rows in (each for each in sizes for _ in range(4)):
            stepped(layer, rows, "cuda")
        for rows in sizes:
            stepped(layer, rows, "cuda")
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - before

    largest = reserved([8000])
    # Of each other size there are besides: input, result, and their gradients.
    assert reserved([6000, 7000, 8000]) < largest + 5 * 4000 * (6000 + 7000)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replays_are_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = []
    run = graphs._Graphs.run_backward
    monkeypatch.setattr(graphs._Graphs, "run_backward", lambda *a: (replays.append(1), run(*a)))
    assert_same(losses("cuda", graphed=True), losses("cuda", graphed=False))
    assert len(replays) == 5 - graphs.WARMUP_STEPS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_replays_of_layers_are_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "PATIENCE", 3)
    replays = []
    run = graphs._Graphs.run_backward
    monkeypatch.setattr(graphs._Graphs, "run_backward", lambda *a: (replays.append(1), run(*a)))
    assert_near(*(losses("cuda", graphed, padded=False, rate=0) for graphed in (True, False)))
    assert len(replays) > 20


def assert_near(first: Any, second: Any) -> None:
    """Gradients that several graphs of a layer make are not rounded before they are added up."""
    for parts in zip(first, second, strict=True):
        for a, b in zip(*parts, strict=True):
            assert float((a - b).norm()) <= 0.02 * float(b.norm())


def assert_same(first: Any, second: Any) -> None:
    for parts in zip(first, second, strict=True):
        for a, b in zip(*parts, strict=True):
            assert torch.equal(a, b)
