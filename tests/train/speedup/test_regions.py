"""Layers compiled one by one: what is compiled how often, and that a step stays the step."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from modules.batch import RequestBatch
from modules.config import ModelConfig
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.models import build as build_arch
from modules.models.baselines import DLRM
from modules.models.interformer import InterFormer
from tests.train.speedup.test_graphs import DATA, Rerun
from train.data import SyntheticSource
from train.speedup import graphs, regions


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers are traced, with their backwards, and what was traced runs as it is: Inductor takes a minute."""
    compiler = torch.compile
    monkeypatch.setattr(regions.torch, "compile", lambda function, **_: compiler(function, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def num_compiled() -> int:
    return counters["stats"]["unique_graphs"]


def layers(number: int) -> InterFormer.Config:
    return InterFormer.Config(dim=16, num_layers=number, interaction_hidden=[8], head_hidden=[8])


def model(config: ModelConfig) -> tuple[SyntheticSource, FeatureEmbedding, nn.Module]:
    torch.manual_seed(0)
    source = SyntheticSource(DATA)
    arch = build_arch(config, source.spec)
    return source, FeatureEmbedding(source.spec, 16, device="cpu").to("cpu"), arch


def steps(arch: nn.Module, embedding: FeatureEmbedding, batches: list[RequestBatch]) -> list[Tensor]:
    """Losses of steps of plain gradient descent."""
    losses = []
    for batch in batches:
        loss = arch(embedding(batch), batch).square().mean()
        gradients = torch.autograd.grad(loss, list(arch.parameters()))
        with torch.no_grad():
            torch._foreach_sub_(list(arch.parameters()), gradients, alpha=0.1)
        losses.append(loss.detach())
    return losses


def batches_of(source: SyntheticSource, *sizes: int) -> list[RequestBatch]:
    return [source.batch("train", np.arange(size, 2 * size)).packed() for size in sizes]


def test_layers_and_batches_share_what_was_compiled() -> None:
    source, embedding, arch = model(layers(2))
    plain, keys = copy.deepcopy(arch), list(arch.state_dict())
    regions.compile_regions(arch)
    assert list(arch.state_dict()) == keys
    batches = batches_of(source, 4, 6, 3)
    torch.testing.assert_close(steps(arch, embedding, batches), steps(plain, embedding, batches), rtol=1e-4, atol=1e-6)
    # History, heads, and of two kinds of layers: summaries (three widths), crosses, interactions, a sequence arch.
    assert num_compiled() == 10
    assert not counters["graph_break"]
    for batch in batches[:2]:  # evaluation is not compiled
        with torch.no_grad():
            torch.testing.assert_close(arch(embedding(batch), batch), plain(embedding(batch), batch), atol=1e-4, rtol=0)
    source, embedding, deeper = model(layers(3))
    regions.compile_regions(deeper)
    steps(deeper, embedding, batches)
    twin = copy.deepcopy(deeper)
    with torch.no_grad():
        next(twin.parameters()).add_(1)
    losses = steps(twin, embedding, batches[:1]), steps(deeper, embedding, batches[:1])
    assert losses[0] != losses[1]  # a copy has its own weights
    assert num_compiled() == 10


def test_a_capture_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []

    class Capture(Rerun):
        def _capture(self, plain: nn.Module, arguments: Any, pool: Any) -> None:
            before = num_compiled()
            torch.func.functional_call(plain, graphs.leaves_of(plain), *arguments)
            compiled.append(num_compiled() - before)
            super()._capture(plain, arguments, pool)

    monkeypatch.setattr(graphs, "_Graphs", Capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    source, embedding, arch = model(DLRM.Config(dim=16, hidden=[8]))
    regions.compile_regions(arch)
    graphs.use_graphs(arch)
    steps(arch, embedding, batches_of(source, 4, 4, 4, 4))
    assert compiled == [0]


def test_what_has_no_layers_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        regions.compile_regions(nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.SiLU()])))
    assert "compiles nothing: below Sequential" in caplog.text
