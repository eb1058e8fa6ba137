"""What `train.export` writes beside the program."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kernels.custom_op import custom_op
from modules.embedding import FeatureEmbedding
from modules.models import build
from modules.models.ranking import RankingModel
from tests.unit.factories import random_batch, random_spec
from train.build import model_fields
from train.config import DINConfig
from train.export import export_arch, operator_modules


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


def test_a_model_that_reads_sizes_from_its_data_is_refused_by_name() -> None:
    spec = dataclasses.replace(random_spec(), max_candidates=10)
    config = DINConfig(dim=8, attention_hidden=[8], hidden=[16])
    model = RankingModel(FeatureEmbedding(spec, 8, device="cpu"), build("din", spec, **model_fields(config)))
    with pytest.raises(ValueError, match="DIN reads sizes from its data"):
        export_arch(model, random_batch(spec, (3,), (4,)), torch.float32, 10)
