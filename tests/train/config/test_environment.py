"""Values from the environment are used, and not written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from omegaconf import OmegaConf

from launch.sweep import claim
from tests.launching import TINY_DLRM, train_here
from train.checkpoint.load import check_config
from train.config.compose import from_dict, to_config
from train.config.environment import to_saved
from train.config.files import composed

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
    "`${oc.env:NAME}` in the configuration, tokens in the environment",
    "config.json, checkpoints and W&B keep the text `${oc.env:NAME}`; no output has a token",
)
def test_values_of_the_environment_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OF_THE_TEST", SECRET)
    for name in TOKENS:
        monkeypatch.setenv(name, f"{TOKEN}-{name}")
    options = ("tracking.name=${oc.env:OF_THE_TEST}", "tracking.tags=[plain,'${tracking.name}-2']")
    for steps, mode in ((1, "disabled"), (2, "offline")):
        train_here(tmp_path, *options, f"runtime.steps={steps}", f"tracking.wandb={mode}", base=TINY_DLRM)
    assert (tmp_path / "wandb").exists()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert [path for path, text in files.items() if TOKEN.encode() in text] == []
    # W&B is told its name and tags, and keeps them for the upload.
    assert {path.relative_to(tmp_path).parts[0] for path in files if SECRET.encode() in files[path]} <= {"wandb"}
    assert TOKEN not in (printed := "".join(capfd.readouterr()))
    assert SECRET not in printed
    tracking = json.loads((tmp_path / "config.json").read_text())["config"]["tracking"]
    assert tracking["name"] == "${oc.env:OF_THE_TEST}"
    assert tracking["tags"] == ["plain", "${tracking.name}-2"]
    assert "resuming with tracking.name" not in (tmp_path / "train.log").read_text()


def test_they_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_TEST", SECRET)
    options = ["tracking.name=${oc.env:OF_THE_TEST}", "tracking.group=${model.name}"]
    config = to_config(composed([*TINY_DLRM, *options]))
    saved = to_saved(config)
    assert config.tracking.name == SECRET
    assert saved["tracking"]["group"] == "dlrm"
    monkeypatch.setenv("OF_THE_TEST", "another")
    assert from_dict(saved, []).tracking.name == "another"
    assert to_saved(from_dict(saved, [])) == saved
    monkeypatch.delenv("OF_THE_TEST")
    with pytest.raises(ValueError, match=r"tracking.name is .*, and the environment has no OF_THE_TEST: set it"):
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
    saved = to_saved(to_config(composed(TINY_DLRM)))
    change(saved)
    with pytest.raises(ValueError, match=message):
        from_dict(saved, [])


READS = [
    "${oc.env:OF_THE_TEST}",
    "${ oc.env:OF_THE_TEST}",
    "${oc.env: OF_THE_TEST}",
    "${oc.env:OF_THE_TEST,default}",
    "a-${oc.env:OF_THE_TEST}-b",
    "${oc.select:tracking.project}",
    "${.project}",
    "${..tracking.project}",
    "${tracking[project]}",
    "${tracking.${model_key}}",
    "${oc.${.name}:OF_THE_TEST}",
    "${oc.decode:${oc.env:OF_THE_TEST}}",
    "${.tags.0}",
]


@pytest.mark.parametrize("value", READS)
def test_however_a_value_reads_the_environment_it_is_not_saved(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_TEST", SECRET)
    monkeypatch.setenv("NAME_OF_A_KEY", "project")
    value = value.replace("${model_key}", "${oc.env:NAME_OF_A_KEY}")
    whole = composed([*TINY_DLRM, "tracking.name=env"])
    OmegaConf.update(whole, "tracking.project", "${ oc.env:OF_THE_TEST }")
    OmegaConf.update(whole, "tracking.tags", ["${oc.env:OF_THE_TEST}"])
    OmegaConf.update(whole, "tracking.group", value)
    config = to_config(whole)
    assert SECRET in str(config.tracking.group)
    saved = to_saved(config)
    assert SECRET not in json.dumps(saved)
    assert saved["tracking"]["group"] == value
    assert from_dict(saved, []).tracking.group == config.tracking.group


def test_what_changes_at_a_resume_is_told_without_values_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, now = (to_config(composed([*TINY_DLRM, f"tracking.name={text}"])) for text in ("mine", "also"))
    monkeypatch.setenv("OF_THE_TEST", SECRET)
    secret = to_config(composed([*TINY_DLRM, "tracking.name=${oc.env:OF_THE_TEST}"]))
    for earlier, later in ((before, secret), (secret, now)):
        meta = {"config": to_saved(earlier), "progress": {}, "data_fingerprint": ""}
        (tmp_path / "meta.json").write_text(json.dumps(meta))
        check_config(tmp_path, dataclasses.asdict(later), to_saved(later))
    assert "tracking.name=${oc.env:OF_THE_TEST} (was mine)" in caplog.text
    assert "tracking.name=also (was ${oc.env:OF_THE_TEST})" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("key", ["optimizer.lr", "optimizer.sparse", "runtime.steps", "model.dim"])
def test_errors_do_not_show_what_the_environment_had(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_TEST", SECRET)
    with pytest.raises(ValueError, match=key) as error:
        to_config(composed([*TINY_DLRM, f"{key}=${{oc.env:OF_THE_TEST}}"]))
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:OF_THE_TEST}",
        "s3://${oc.env:OF_THE_TEST}/x",
        "${oc.${tracking.project}:OF_THE_TEST}",
        "${oc.decode:${oc.env:OF_THE_TEST}}",
        "${tracking.name}",
        "${data.user}",
        "${.user}",
        "${..tracking.name}",
        "${runtime.run_dir}",
    ],
)
@pytest.mark.reliability("a foreign data YAML reads the environment", "refused before anything is read, naming the key")
def test_data_reads_no_environment(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_TEST", SECRET)
    whole = composed(["data=movielens_ids", "tracking.name=${oc.env:OF_THE_TEST}"])
    OmegaConf.update(whole, "data.user", "${tracking.name}" if "user" in value else "user_id")
    OmegaConf.update(whole, "data.root", value)
    with pytest.raises(
        ValueError, match=r"data.(root|user) is .*: nothing in `data` may read the environment"
    ) as error:
        to_config(whole)
    assert SECRET not in str(error.value)


def test_data_may_name_other_keys() -> None:
    whole = composed(["data=movielens_ids", "data.cache_dir=/cache/${model.name}"])
    assert to_config(whole).data.cache_dir == "/cache/interformer"


HIDDEN = "hunter2-of-the-test"


@pytest.mark.parametrize(
    "url",
    [
        f"s3://key:{HIDDEN}@bucket/log/*.parquet",
        f"https://user:a/{HIDDEN}@host/log.csv",
        f"https://user:80/{HIDDEN}@host/log.csv",
        f"https://:{HIDDEN}@host/log.csv",
        f"https://{HIDDEN}@host/log.csv",
        f"https://bucket.s3.amazonaws.com/a.csv?X-Amz-Credential=x&X-Amz-Signature={HIDDEN}",
        f"https://bucket.s3.amazonaws.com/a.csv?x%2Damz%2Dsignature={HIDDEN}",
        f"https://x.blob.core.windows.net/a.csv?sv=2024&sig={HIDDEN}&se=2026",
        f"https://host/a.csv?access_token={HIDDEN}",
        f"https://host/a.csv#api-key={HIDDEN}",
        f"gs://bucket/a.csv?X-Goog-Signature={HIDDEN}",
    ],
)
@pytest.mark.reliability(
    "a URL with a password, token or signature in the configuration",
    "refused by key; no error, log or sweep file shows it",
)
def test_a_secret_in_a_url_is_refused_without_being_shown(url: str, tmp_path: Path) -> None:
    for override in (f'data.files=["{url}"]', f'+data.flies="{url}"', f'tracking.project="{url}"', f"data.root={url}"):
        with pytest.raises(ValueError, match=r"^(data|tracking)\.[\w.]+ is a URL with a .*AWS_SECRET") as error:
            to_config(composed(["data=movielens_ids", override]))
        assert HIDDEN not in str(error.value)
        with pytest.raises(ValueError, match="is a URL with a "):
            claim(tmp_path / "sweep", "sweep", {"overrides": [override], "jobs": []})
        assert not (tmp_path / "sweep").exists()


def test_urls_without_a_secret_are_taken() -> None:
    urls = [
        "s3://bucket/a:b/c@d.parquet",
        "http://host:80/a.csv",
        "abfss://container@account.dfs.core.windows.net/log",
        "sftp://user@host/log",
        "https://host/a.csv?version=3&signed=no&design=1",
        "https://host:8080/a%40b.csv",
    ]
    to_config(composed(["data=movielens_ids", f"data.files={json.dumps(urls)}"]))
