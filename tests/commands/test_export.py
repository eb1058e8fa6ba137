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
from modules.models.gem import GEM
from modules.models.interformer import InterFormer
from modules.models.kunlun import Kunlun
from modules.models.ranking import RankingModel
from modules.models.scoring import scoring_inputs
from modules.models.wukong import Wukong
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


@pytest.mark.parametrize(
    "config",
    [
        Kunlun.Config(dim=8, pffn_hidden=8, window=2, interaction_hidden=[16], head_hidden=[16]),
        Kunlun.Config(dim=8, comp_skip=False, num_layers=1, shared_kv=False, machine="plain", event_stacks="merged"),
        Wukong.Config(dim=8, num_layers=2, machine="attentive", hidden=[16], head_hidden=[16]),
        GEM.Config(dim=8, pffn_hidden=8, window=2, interaction_hidden=[16], head_hidden=[16]),
    ],
    ids=["kunlun", "kunlun merged", "wukong", "gem"],
)
def test_kunlun_wukong_and_gem_are_exported_for_any_request(config: ModelConfig) -> None:
    spec = dataclasses.replace(random_spec(), max_candidates=10)
    torch.manual_seed(0)
    model = RankingModel(FeatureEmbedding(spec, 8, device="cpu"), build(config, spec)).eval()
    program = export_arch(model, random_batch(spec, (3,), (4,)), torch.float32, 10).module()
    for candidates, events in ((3, 4), (10, 6), (1, 2), (2, 0)):
        batch = random_batch(spec, (candidates,), (events,), seed=1)
        scored = program(*scoring_inputs(model.embedding(batch), batch.candidate_offsets))
        torch.testing.assert_close(scored, model(batch), atol=1e-5, rtol=1e-4)
