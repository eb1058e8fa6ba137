"""Values from the environment are used, and not written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf.errors import InterpolationResolutionError

from tests.launching import ROOT, TINY_DLRM, train_here
from train.config.compose import from_dict, to_config
from train.config.environment import to_saved
from train.config.schema import register_schema

SECRET = "entity-of-the-environment"


@pytest.mark.reliability(
    "a value of the configuration is `${oc.env:NAME}`, perhaps a secret",
    "the run uses it; config.json, checkpoints and W&B get the text `${oc.env:NAME}`, which is read anew",
)
def test_values_of_the_environment_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_TEST", SECRET)
    options = ("tracking.entity=${oc.env:OF_THE_TEST}", "tracking.tags=[plain,'${tracking.entity}-2']")
    for steps in (1, 2):
        train_here(tmp_path, *options, f"runtime.steps={steps}", base=TINY_DLRM)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert written == []
    tracking = json.loads((tmp_path / "config.json").read_text())["config"]["tracking"]
    assert tracking["entity"] == "${oc.env:OF_THE_TEST}"
    assert tracking["tags"] == ["plain", "${tracking.entity}-2"]
    assert "resuming with tracking" not in (tmp_path / "train.log").read_text()


def test_they_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_TEST", SECRET)
    register_schema()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        composed = compose(
            "train", [*TINY_DLRM, "tracking.entity=${oc.env:OF_THE_TEST}", "tracking.group=${model.name}"]
        )
    config = to_config(composed)
    saved = to_saved(config)
    assert config.tracking.entity == SECRET
    assert saved["tracking"]["group"] == "dlrm"
    monkeypatch.setenv("OF_THE_TEST", "another")
    assert from_dict(saved, []).tracking.entity == "another"
    assert to_saved(from_dict(saved, [])) == saved
    monkeypatch.delenv("OF_THE_TEST")
    with pytest.raises(InterpolationResolutionError, match="Environment variable 'OF_THE_TEST' not found"):
        from_dict(saved, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda saved: saved.clear(), "has no model.name"),
        (lambda saved: saved["runtime"].update(pace=3), "none of this version: runtime.pace: .*pace"),
        (lambda saved: saved["runtime"].update(steps="many"), "none of this version: runtime.steps: .*many"),
    ],
)
def test_a_saved_configuration_of_no_run_is_named(change: Callable[[dict[str, Any]], None], message: str) -> None:
    register_schema()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        saved = to_saved(to_config(compose("train", list(TINY_DLRM))))
    change(saved)
    with pytest.raises(ValueError, match=message):
        from_dict(saved, [])
