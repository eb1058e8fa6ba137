"""The experiments that come with the repository, composed as the training command does."""

from __future__ import annotations

import pytest
from hydra import compose, initialize_config_dir

from train.config import Config, InterFormerConfig, register_schema, to_config
from train.doctor import ROOT

CONFIGS = ROOT / "configs"
EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))


def composed(experiment: str) -> Config:
    register_schema()
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return to_config(compose("train", overrides=[f"+experiment={experiment}"]))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiment_composes(name: str) -> None:
    assert composed(name).model.dim > 0


def test_gdpa_experiment_is_the_baseline_with_other_blocks() -> None:
    baseline, ours = composed("synthetic_h200"), composed("synthetic_h200_gdpa")
    assert isinstance(baseline.model, InterFormerConfig)
    baseline.model.pffn = baseline.model.sequence_attention = "gdpa"
    assert ours == baseline
