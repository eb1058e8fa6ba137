"""The experiments that come with the repository, composed as the training command does."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from modules.layers.moe import Experts
from modules.models import build
from modules.models.interformer import InterFormer
from modules.precision import MXLinear, apply_recipe
from train.checkpoint import load as checkpoint
from train.commands.doctor import ROOT
from train.config import files
from train.config.compose import to_config
from train.config.schema import Config, EventsConfig, SyntheticConfig
from train.data import build_source

CONFIGS = ROOT / "configs"
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


def composed(experiment: str) -> Config:
    return copy.deepcopy(_composed(experiment))


@cache
def _composed(experiment: str) -> Config:
    return to_config(files.composed([f"+experiment={experiment}"]))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_composes_and_resumes_as_it_is(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    current = dataclasses.asdict(composed(name))
    (tmp_path / "meta.json").write_text(json.dumps({"config": current, "progress": {}, "data_fingerprint": ""}))
    with caplog.at_level(logging.WARNING):
        checkpoint.check_config(tmp_path, current)
    assert not caplog.records


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_g128"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_auto_on_hopper_quantises_only_what_gains_in_a_whole_model(name: str, recipe: str) -> None:
    config = composed(name)
    if isinstance(config.data, EventsConfig):
        pytest.skip("its data are not in the repository")
    if isinstance(config.data, SyntheticConfig):
        config.data.num_requests = 64
    with torch.device("meta"):
        arch = build(config.model, build_source(config.data).spec)
    model = torch.nn.ModuleDict({"arch": arch})
    apply_recipe(model, recipe, ["auto"], capability=(9, 0))
    for module in model.modules():
        # Of docs/mxfp8.md: products of whole tiles of 128, by layers that save more than quantising costs.
        if isinstance(module, MXLinear):
            outputs, inputs = module.weight.shape
            assert recipe == "mxfp8_g128"
            assert inputs % 128 == outputs % 128 == 0 <= inputs * outputs / (inputs + outputs) - 600
        elif isinstance(module, Experts):
            wide = all(width % 128 == 0 for width in module.w_down.shape[1:])
            assert module.recipe == (recipe if wide else "none")


def test_a_run_resumes_from_a_checkpoint_that_is_older_than_some_keys(tmp_path: Path) -> None:
    config = dataclasses.asdict(composed("synthetic_moe"))
    current = json.loads(json.dumps(config))
    del config["model"]["interaction"], config["model"]["moe"]["score"]
    config["model"]["moe"]["force_balance"] = False
    config["model"]["dhen_layers"], config["optimizer"]["decay_share"] = 1, 0.2  # keys of before, as they now are fixed
    del config["model"]["wukong"]["rank"]
    config["model"]["wukong_rank"] = current["model"]["wukong"]["rank"] = 3  # a key that has moved
    (tmp_path / "meta.json").write_text(json.dumps({"config": config, "progress": {}, "data_fingerprint": ""}))
    checkpoint.check_config(tmp_path, current)
    current["model"]["interaction"] = "wukong"
    with pytest.raises(ValueError, match="model.interaction=dhen, this run has wukong"):
        checkpoint.check_config(tmp_path, current)
    config["model"]["dhen_layers"] = 2
    (tmp_path / "meta.json").write_text(json.dumps({"config": config, "progress": {}, "data_fingerprint": ""}))
    with pytest.raises(ValueError, match=r"model\.dhen_layers=2 was saved by an earlier version.* all do what 1 did"):
        checkpoint.check_config(tmp_path, current)


@pytest.mark.parametrize(
    ("group", "key", "before", "now"),
    [("optimizer", "dense", "adamw", "torch.optim.NAdam"), ("tasks", "rating", {"loss": "huber"}, None)],
)
def test_a_run_does_not_resume_with_another_optimizer_or_loss(
    group: str, key: str, before: Any, now: Any, tmp_path: Path
) -> None:
    config = dataclasses.asdict(composed("synthetic_moe"))
    current = json.loads(json.dumps(config))
    config[group][key] = before
    if now is not None:
        current[group][key] = now
    (tmp_path / "meta.json").write_text(json.dumps({"config": config, "progress": {}, "data_fingerprint": ""}))
    with pytest.raises(ValueError, match=re.escape(f"{group}.{key}={before}, this run has {now}")):
        checkpoint.check_config(tmp_path, current)


def test_gdpa_experiment_is_the_baseline_with_other_blocks() -> None:
    baseline, ours = composed("synthetic_h200"), composed("synthetic_h200_gdpa")
    assert isinstance(baseline.model, InterFormer.Config)
    baseline.model.pffn = baseline.model.sequence_attention = "gdpa"
    assert ours == baseline
