"""What `train.commands.export` writes beside the program."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kernels.core.operator import custom_op
from modules.config import ModelConfig
from modules.embedding import FeatureEmbedding
from modules.models import build
from modules.models.baselines import DIN
from modules.models.interformer import InterFormer
from modules.models.ranking import RankingModel
from tests.modules.factories import random_batch, random_spec
from train.commands.export import export_arch, operator_modules


@custom_op("gemsmith_tests::twice")
def twice(x: Tensor) -> Tensor:
    """2 x"""
    return 2 * x


@twice.register_fake
def _(x):
    return torch.empty_like(x)


class Twice(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():  # a graph within the graph
            y = twice(x)
        return y + x


def test_a_program_comes_with_the_modules_of_its_operators() -> None:
    x = torch.ones(3)
    assert operator_modules(torch.export.export(Twice(), (x,))) == [__name__]
    assert operator_modules(torch.export.export(torch.nn.ReLU(), (x,))) == []


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (DIN.Config(dim=8, attention_hidden=[8], hidden=[16]), "DIN reads sizes from its data.* so do DIN"),
        (
            InterFormer.Config(dim=8, num_layers=1, feed_forward="moe"),
            "InterFormer reads sizes from its data.* routed experts on a CPU",
        ),
    ],
)
def test_a_model_that_reads_sizes_from_its_data_is_refused_by_name(config: ModelConfig, named: str) -> None:
    spec = dataclasses.replace(random_spec(num_events=1), max_candidates=10)
    arch = build(config, spec)
    model = RankingModel(FeatureEmbedding(spec, 8, device="cpu"), arch)
    with pytest.raises(ValueError, match=named):
        export_arch(model, random_batch(spec, (3,), (4,)), torch.float32, 10)
