"""Values from the environment are used, and not written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from tests.launching import ROOT, TINY_DLRM, train_here
from train.config.compose import from_dict, to_config
from train.config.environment import refuse_other_sections, to_saved
from train.config.schema import register_schema

SECRET = "entity-of-the-environment"
TOKEN = "0123456789abcdef" * 2
TOKENS = ("WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY")


@pytest.fixture
def forgotten_by_wandb() -> Iterator[None]:
    """W&B reads the environment once a process, and later tests have another."""
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.mark.usefixtures("forgotten_by_wandb")
@pytest.mark.reliability(
    "a value of the configuration is `${oc.env:NAME}`, perhaps a secret, and tokens are in the environment",
    "the run uses it; config.json, checkpoints and W&B get the text `${oc.env:NAME}`, which is read anew; no file of "
    "the run and nothing printed has a token",
)
def test_values_of_the_environment_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OF_THE_TEST", SECRET)
    for name in TOKENS:
        monkeypatch.setenv(name, f"{TOKEN}-{name}")
    options = ("tracking.entity=${oc.env:OF_THE_TEST}", "tracking.tags=[plain,'${tracking.entity}-2']")
    for steps, mode in ((1, "disabled"), (2, "offline")):
        train_here(tmp_path, *options, f"runtime.steps={steps}", f"tracking.wandb={mode}", base=TINY_DLRM)
    assert (tmp_path / "wandb").exists()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert [path for path, text in files.items() if TOKEN.encode() in text] == []
    # W&B is told its entity and tags, and keeps them for the upload.
    assert {path.relative_to(tmp_path).parts[0] for path in files if SECRET.encode() in files[path]} <= {"wandb"}
    assert TOKEN not in (printed := "".join(capfd.readouterr()))
    assert SECRET not in printed
    tracking = json.loads((tmp_path / "config.json").read_text())["config"]["tracking"]
    assert tracking["entity"] == "${oc.env:OF_THE_TEST}"
    assert tracking["tags"] == ["plain", "${tracking.entity}-2"]
    assert "resuming with tracking.entity" not in (tmp_path / "train.log").read_text()


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


def composed_with(*overrides: str) -> DictConfig:
    register_schema()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        return compose("train", ["data=movielens_ids", *overrides])


@pytest.mark.reliability(
    "a data YAML of somebody else reads the environment, `root: ${oc.env:AWS_SECRET_ACCESS_KEY}`, also by other keys",
    "refused by the name of the key, before anything is read",
)
@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:OF_THE_TEST}",
        "s3://${oc.env:OF_THE_TEST}/x",
        "${oc.${tracking.project}:OF_THE_TEST}",
        "${oc.decode:${oc.env:OF_THE_TEST}}",
        "${tracking.entity}",
        "${data.user}",
        "${.user}",
        "${..tracking.entity}",
        "${runtime.run_dir}",
    ],
)
def test_data_reads_no_environment(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_TEST", SECRET)
    composed = composed_with("tracking.entity=${oc.env:OF_THE_TEST}")
    OmegaConf.update(composed, "data.user", "${tracking.entity}" if "user" in value else "user_id")
    OmegaConf.update(composed, "data.root", value)
    with pytest.raises(
        ValueError, match=r"data.(root|user) is .*: nothing in `data` may read the environment"
    ) as error:
        to_config(composed)
    assert SECRET not in str(error.value)


def test_data_may_name_other_keys() -> None:
    composed = composed_with("data.cache_dir=/cache/${model.name}")
    assert to_config(composed).data.cache_dir == "/cache/interformer"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# @package _global_\ntracking: {project: mine}\n", "sets the section _global_"),
        ("#@package tracking\nentity: a\n", "sets the section tracking"),
        ("defaults:\n  - events_schema\n  - /tracking: default\n", "brings in '/tracking'"),
        ("defaults:\n  - events_schema\n  - override /model: dlrm\n", "brings in 'override /model'"),
        ("defaults:\n  - events_schema@_global_\n", "brings in 'events_schema@_global_'"),
    ],
)
def test_a_file_of_data_sets_nothing_else(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "theirs.yaml"
    sources = [SimpleNamespace(schema="structured", path=""), SimpleNamespace(schema="file", path=str(tmp_path))]
    hydra: Any = SimpleNamespace(runtime=SimpleNamespace(choices={"data": "theirs"}, config_sources=sources))
    file.write_text("# a comment\n# @package data\ndefaults: [events_schema, _self_]\nfiles: [a.parquet]\n")
    refuse_other_sections(hydra)
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        refuse_other_sections(hydra)


@pytest.mark.reliability(
    "a URL with a password in the configuration",
    "refused by the name of its key; neither error nor log has the password",
)
def test_a_password_in_a_url_is_refused_without_being_shown() -> None:
    with pytest.raises(ValueError, match=r"data.files.0 is a URL with a password.*AWS_SECRET_ACCESS_KEY") as error:
        to_config(composed_with("data.files=['s3://key:hunter2@bucket/log/*.parquet']"))
    assert "hunter2" not in str(error.value)
    to_config(composed_with("data.files=['s3://bucket/a:b/c@d.parquet', 'http://host:80/a.csv']"))
