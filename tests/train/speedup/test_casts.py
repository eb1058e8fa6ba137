"""Weights cast together: which they are, that steps stay the same to the bit, and how few casts a step has."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from modules.config import ModelConfig
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.models import build as build_arch
from modules.models.baselines import DIN
from modules.models.gem import GEM
from modules.models.interformer import InterFormer
from modules.models.kunlun import Kunlun
from modules.models.ranking import RankingModel
from modules.precision import FP32Linear, apply_recipe
from tests.processes import run_ranks
from tests.train.speedup.test_graphs import DATA, MODEL, Rerun, losses
from tests.train.speedup.test_graphs import assert_same as assert_same_losses
from train.config.schema import RuntimeConfig
from train.data import SyntheticSource
from train.parallel.recompute import recompute
from train.process import distributed
from train.speedup import graphs
from train.speedup.casts import LEAST, CastForward, cast_together

STEPS = 4  # the first shows which weights are cast
MODELS = [
    MODEL,
    InterFormer.Config(dim=32, num_layers=2, interaction_hidden=[32], head_hidden=[8], feed_forward="moe"),
    DIN.Config(dim=16),
    GEM.Config(dim=16, num_layers=1),
    Kunlun.Config(dim=16, num_layers=2),
]


class Dispatches(TorchDispatchMode):
    """Counts the operators that run within it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))

    @property
    def casts(self) -> int:
        return self.counts[torch.ops.aten._to_copy.default]

    @property
    def together(self) -> int:
        return self.counts[torch.ops.aten._foreach_copy_.default]


def steps(arch: nn.Module, source: SyntheticSource, dim: int) -> tuple[list[Tensor], Dispatches]:
    """Logits, gradients and moved weights of a few steps; and what the last one of them dispatched."""
    embedding = FeatureEmbedding(source.spec, dim, device="cpu")
    optimizer = torch.optim.SGD(arch.parameters(), lr=0.05)
    found = []
    for step in range(STEPS):
        batch = source.batch("train", np.arange(4 * step, 4 * step + 4))
        with Dispatches() as dispatches:
            tokens = embedding(batch)
            with torch.autocast("cpu", torch.bfloat16):
                logits = arch(tokens, batch)
            (logits.float().square().mean() + arch.aux_loss()).backward()  # type: ignore[operator]
        found += [logits.detach(), *(p.grad.clone() for p in arch.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach() for p in arch.parameters())], dispatches


def built(config: ModelConfig) -> tuple[nn.Module, SyntheticSource]:
    torch.manual_seed(0)
    source = SyntheticSource(DATA)
    return build_arch(config, source.spec).train(), source


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("config", MODELS, ids=lambda config: f"{config.name}-{getattr(config, 'feed_forward', '')}")
def test_steps_are_the_same_to_the_bit_with_two_casts_of_weights(config: ModelConfig) -> None:
    expected, alone = steps(*built(config), config.dim)
    arch, source = built(config)
    cast_together(arch, by_layer=False)
    actual, dispatches = steps(arch, source, config.dim)
    assert_same(actual, expected)
    assert dispatches.together == 2
    weights = len(arch.forward._weights)  # type: ignore[union-attr]
    linears = sum(type(module) is nn.Linear for module in arch.modules())
    assert weights >= 0.8 * linears > 0
    # Weights that are put side by side before they are rounded share a cast.
    assert weights < alone.casts - dispatches.casts <= 2 * weights


def test_layers_cast_for_themselves_where_gradients_are_to_be_early() -> None:
    config = InterFormer.Config(dim=16, num_layers=3, interaction_hidden=[8], head_hidden=[8])
    expected, alone = steps(*built(config), config.dim)
    arch, source = built(config)
    cast_together(arch, by_layer=True)
    actual, dispatches = steps(arch, source, config.dim)
    assert_same(actual, expected)
    layers = [module for module in arch.modules() if isinstance(module.forward, CastForward) and module is not arch]
    assert dispatches.together == 2 * len(layers) > 2
    assert alone.casts - dispatches.casts > 4 * dispatches.together


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(*[nn.Linear(4, 4) for _ in range(LEAST)])

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x)


@pytest.mark.parametrize("by_layer", [False, True])
def test_when_gradients_are_there(by_layer: bool) -> None:
    """Those of a layer before the backward of the layer below begins, for data parallelism to reduce meanwhile."""
    layers, events = nn.Sequential(Layer(), Layer(), Layer()), []
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, i=index: events.append(f"gradient {i}"))
        layer.register_full_backward_pre_hook(lambda *_, i=index: events.append(f"backward {i}"))
    cast_together(layers, by_layer=by_layer)
    for _ in range(2):
        events.clear()
        with torch.autocast("cpu", torch.bfloat16):
            layers(torch.randn(2, 4, requires_grad=True)).sum().backward()
    early = events.index("backward 0") - events.index("backward 2") - 2
    assert early == (2 * 2 * LEAST if by_layer else 0)
    assert len(events) == 3 + 3 * 2 * LEAST


def test_ranks_have_the_gradients_of_those_that_cast_alone() -> None:
    run_ranks(compare_ranks, 2)


def compare_ranks() -> None:
    world = distributed.start(RuntimeConfig(device="cpu", threads=1))
    config = InterFormer.Config(dim=16, num_layers=2, interaction_hidden=[8], head_hidden=[8])
    found = []
    for together, by_layer in ((False, False), (True, False), (True, True)):
        arch, source = built(config)
        if together:
            cast_together(arch, by_layer=by_layer)
        parallel = DistributedDataParallel(arch, gradient_as_bucket_view=True)
        embedding = FeatureEmbedding(source.spec, config.dim, device="cpu")
        for step in range(3):
            batch = source.batch("train", np.arange(4) + 4 * (2 * step + world.rank))
            with torch.autocast("cpu", torch.bfloat16):
                logits = parallel(embedding(batch), batch)
            parallel.zero_grad()
            logits.float().square().mean().backward()
        found.append([p.grad.clone() for p in arch.parameters() if p.grad is not None])
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


def test_compiled_functions_within_are_compiled() -> None:
    compiled = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(module)
        return module.forward

    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 4), torch.compile(Layer(), backend=backend))
    together = copy.deepcopy(alone)
    cast_together(together, by_layer=False)
    x = torch.randn(2, 4)
    for _ in range(3):
        gradients = []
        for layers in (together, alone):
            with torch.autocast("cpu", torch.bfloat16):
                gradients.append(torch.autograd.grad(layers(x).float().sum(), list(layers.parameters())))
        assert_same(*gradients)
    assert len(compiled) == 2  # for a weight in bfloat16 anew


class Reader(nn.Module):
    """Reads weights in all kinds of ways."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.twice, self.frozen, self.exact, self.summed = (nn.Linear(4, 4) for _ in range(5))
        self.left, self.right, self.cast_twice, self.spread = (nn.Parameter(torch.randn(4, 4)) for _ in range(4))
        self.tied = self.plain
        self.logits = FP32Linear(4, 4)
        self.function, self.unread = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain(x) + self.tied(x)  # autocast keeps its cast
        x = self.twice(self.twice(x)) + self.frozen(x)
        x = F.linear(x, torch.cat([self.left, self.right]))
        x = x[:, :4] + x[:, 4:]
        x = x @ self.cast_twice.bfloat16() + x @ self.cast_twice.bfloat16()
        x = x @ self.spread[:1].expand(4, 4)
        x = _OwnCast.apply(x, self.function)
        x = self.exact(x) + self.exact.weight.square().sum()
        x = self.summed(x) + F.linear(x, self.summed.weight + self.left.detach().bfloat16())
        return self.logits(x)


class _OwnCast(torch.autograd.Function):
    """Rounds its weight itself, and gives its gradient in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.to(grad.dtype).t(), x.float().t() @ grad.float()


def reader_step(reader: nn.Module) -> list[Tensor]:
    reader.zero_grad()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        result = reader(x)
    result.square().mean().backward()
    return [result.detach(), *(p.grad for p in reader.parameters() if p.grad is not None)]


def test_weights_that_are_read_in_another_way_stay_out() -> None:
    torch.manual_seed(0)
    reader = Reader()
    expected = reader_step(reader)
    cast_together(reader, by_layer=False)
    for _ in range(3):
        assert_same(reader_step(reader), expected)
    names = {id(parameter): name for name, parameter in reader.named_parameters()}
    cast = {names[id(weight)] for weight in reader.forward._weights}  # type: ignore[union-attr]
    layers = {f"{name}.{part}" for name in ("plain", "twice", "frozen") for part in ("weight", "bias")}
    # Of `left` there is another cast, so `right`, which lies beside it in the first, is alone in being cast once.
    assert cast == {*layers, "right", "exact.bias", "summed.bias"}
    assert all(isinstance(weight, nn.Parameter) for weight in reader.parameters())


def test_parameters_are_back_after_an_error_and_outside_of_training() -> None:
    reader = nn.Sequential(nn.Linear(4, 4))
    cast_together(reader, by_layer=False)
    x, seen = torch.randn(2, 4), []
    reader[0].register_forward_hook(lambda *_: seen.append(type(reader[0].weight)))
    with torch.autocast("cpu", torch.bfloat16):
        reader(x)
        reader(x)
        with pytest.raises(RuntimeError):
            reader(x[:, 1:])
        assert isinstance(reader[0].weight, nn.Parameter)
        with torch.no_grad():
            reader(x)
        reader.eval()(x)
    reader.train()(x)  # in float32
    assert seen == [nn.Parameter, Tensor, *[nn.Parameter] * 3]


def test_quantised_layers_read_their_masters() -> None:
    config = InterFormer.Config(dim=32, num_layers=1, interaction_hidden=[8], head_hidden=[8])
    arch, source = built(config)
    rows = apply_recipe(arch, "mxfp8", ["*.sequence.*"])
    quantised = {row.name for row in rows if row.recipe == "mxfp8"}
    expected, _ = steps(arch, source, config.dim)
    arch, source = built(config)
    apply_recipe(arch, "mxfp8", ["*.sequence.*"])
    cast_together(arch, by_layer=False)
    actual, _ = steps(arch, source, config.dim)
    assert_same(actual, expected)
    weights = arch.forward._weights  # type: ignore[union-attr]
    assert quantised
    assert not any(arch.get_submodule(name).weight in weights for name in quantised)


def test_what_runs_again_finds_the_casts() -> None:
    config = InterFormer.Config(dim=16, num_layers=2, interaction_hidden=[8], head_hidden=[8])

    def run(together: bool) -> tuple[list[Tensor], Dispatches]:
        arch, source = built(config)
        if together:
            cast_together(arch, by_layer=False)
        ranking_model = RankingModel(FeatureEmbedding(source.spec, config.dim, device="cpu"), arch)
        recompute(ranking_model, ["arch.layers.*"], compiled=False)
        return steps(arch, source, config.dim)

    (expected, alone), (actual, dispatches) = run(together=False), run(together=True)
    assert_same(actual, expected)
    assert dispatches.together == 2
    # In the forward, when it runs again, and in the backward.
    layers = build_arch(config, SyntheticSource(DATA).spec).layers
    linears = sum(type(part) is nn.Linear for part in layers.modules())
    assert alone.casts - dispatches.casts > 2.4 * linears


@pytest.mark.parametrize("padded", [True, False])
def test_graphs_of_steps_and_of_layers_cast_within(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_Graphs", Rerun)
    monkeypatch.setattr(graphs, "PATIENCE", 3)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    expected = losses("cpu", graphed=True, padded=padded, rate=0.1 if padded else 0)
    use_graphs = graphs.use_graphs
    casts = []

    def use_both(arch: nn.Module) -> None:
        cast_together(arch, by_layer=False)
        use_graphs(arch)
        casts.append(arch)

    monkeypatch.setattr(graphs, "use_graphs", use_both)
    assert_same_losses(losses("cpu", graphed=True, padded=padded, rate=0.1 if padded else 0), expected)
    parts = [part.forward._forward for part in casts[0].modules() if isinstance(part.forward, graphs._Graphed)]
    assert all(isinstance(part, CastForward) for part in parts)
    assert (len(parts) == 1) == padded


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("padded", [True, False])
def test_replays_that_cast_together_are_those_that_do_not(padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "PATIENCE", 3)
    replays: list[int] = []
    run = graphs._Graphs.run_backward
    monkeypatch.setattr(graphs._Graphs, "run_backward", lambda *a: (replays.append(1), run(*a)))
    # No weight moves: in the step that shows which weights are cast, sums of gradients are in another order.
    expected = losses("cuda", graphed=True, padded=padded, rate=0)
    alone = len(replays)
    use_graphs = graphs.use_graphs
    monkeypatch.setattr(graphs, "use_graphs", lambda a: (cast_together(a, by_layer=False), use_graphs(a)))
    assert_same_losses(losses("cuda", graphed=True, padded=padded, rate=0), expected)
    assert len(replays) == 2 * alone > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_casts_are_few_launches() -> None:
    layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(60)]).cuda()
    x = torch.randn(8, 64, device="cuda")

    def launches() -> int:
        with torch.autocast("cuda", torch.bfloat16):
            layers(x).float().sum().backward()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            with torch.autocast("cuda", torch.bfloat16):
                layers(x).float().sum().backward()
            torch.cuda.synchronize()
        return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())

    alone = launches()
    cast_together(layers, by_layer=False)
    layers(x)
    assert launches() < alone - 200  # of 240 casts of weights and biases and their gradients
