"""The model of docs/training.md, as its page has it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from modules import models
from modules.embedding import FeatureEmbedding
from modules.models.ranking import RankingModel
from tests.launching import ROOT
from tests.unit.factories import random_batch, random_spec
from train import config
from train.build import model_fields


@pytest.mark.parametrize("num_events", [0, 2])
def test_the_page_s_model_is_one(num_events: int, monkeypatch: pytest.MonkeyPatch) -> None:
    arch, configuration = re.findall(r"```python\n(.*?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {"dataclass": dataclasses.dataclass, "field": dataclasses.field, **vars(config)}
    exec(arch + configuration, names)
    monkeypatch.setitem(models.MODELS, "two_tower", names["TwoTower"])
    spec, fields = random_spec(num_events), model_fields(names["TwoTowerConfig"](dim=8))
    model = RankingModel(FeatureEmbedding(spec, 8, device="cpu"), models.build("two_tower", spec, **fields))
    batch = random_batch(spec)
    logits = model(batch)
    assert logits.shape == (batch.num_candidates, len(spec.tasks))
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.arch.parameters())
    assert model.arch.aux_loss() == 0
    assert model.arch.flops_per_batch(5, 7, 20, 90) == 2 * model.arch.flops_per_batch(2.5, 3.5, 10, 45)
    torch.testing.assert_close(model(batch.expand()), logits)
