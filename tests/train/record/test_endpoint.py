"""What a run says of itself over HTTP: metrics, whether it is alive, and who can ask."""

from __future__ import annotations

import json
import logging
import math
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launching import TINY_DLRM, train_here
from train.config.schema import TrackingConfig
from train.record.endpoint import Endpoint
from train.record.tracking import METRICS_FILE, Tracker
from train.trainer import Trainer

LINE = re.compile(r"(\w+)(\{.*\})? (\S+)")


def get(port: int, page: str, host: str = "127.0.0.1") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{host}:{port}{page}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def parsed(text: str) -> dict[str, float]:
    """Name and labels -> value; every other line is a comment of the format."""
    found = {}
    for line in text.splitlines():
        match = LINE.fullmatch(line)
        if match:
            found[match[1] + (match[2] or "")] = float(match[3])
        else:
            assert re.match(r"# (HELP|TYPE) gemsmith_\w+ \w+", line), line
    return found


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    made = Endpoint(tmp_path, "127.0.0.1", 0, step=3, total_steps=10)
    yield made
    made.close()


def test_metrics_are_those_of_the_run(endpoint: Endpoint, tmp_path: Path) -> None:
    before = parsed(get(endpoint.address[1], "/metrics")[1])
    assert before["gemsmith_step"] == 3
    assert not {"gemsmith_loss", "gemsmith_checkpoint_age_seconds"} & before.keys()
    for step in (2, 4):
        folder = tmp_path / f"checkpoints/step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "meta.json").write_text("{}")
    (tmp_path / "checkpoints/step_00000005.partial").mkdir()
    endpoint.advance()
    values = {"loss": 0.5, "examples_per_s": 1e5, "lr": 1e-3, "skipped_steps": 2.0, 'a "b"\\/ne': math.nan, "ne": 0.9}
    endpoint.log(4, "train", values)
    endpoint.log(4, "valid", {"click/ne": 0.875, "loss": math.inf})
    status, text = get(endpoint.address[1], "/metrics")
    assert status == 200
    found = parsed(text)
    assert found["gemsmith_step"] == 4
    assert found["gemsmith_total_steps"] == 10
    assert found["gemsmith_loss"] == 0.5
    assert found["gemsmith_examples_per_second"] == 1e5
    assert found["gemsmith_skipped_batches"] == 2
    assert found["gemsmith_checkpoint_step"] == 4
    assert 0 <= found["gemsmith_checkpoint_age_seconds"] < 1e5
    assert found['gemsmith_metric{split="valid",task="click",metric="ne"}'] == 0.875
    assert found['gemsmith_metric{split="train",task="",metric="ne"}'] == 0.9
    assert math.isinf(found['gemsmith_metric{split="valid",task="",metric="loss"}'])
    assert math.isnan(found['gemsmith_metric{split="train",task="a \\"b\\"\\\\",metric="ne"}'])


def test_a_run_that_ends_no_step_is_not_healthy(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint.advance()
    assert get(endpoint.address[1], "/healthz") == (200, "step 4 of 10\n")
    monkeypatch.setattr("train.record.endpoint.HEALTHY", 0.0)
    status, said = get(endpoint.address[1], "/healthz")
    assert status == 503
    assert "more than 0; the last was step 4" in said
    with endpoint.between_steps():
        assert get(endpoint.address[1], "/healthz")[0] == 200
    assert get(endpoint.address[1], "/healthz")[0] == 503


def test_other_pages_are_not_there(endpoint: Endpoint) -> None:
    assert get(endpoint.address[1], "/../etc/passwd") == (404, "there are /metrics and /healthz\n")


def test_it_is_reached_by_the_interface_that_was_asked_for_alone(endpoint: Endpoint, tmp_path: Path) -> None:
    with pytest.raises(urllib.error.URLError, match="refused"):
        get(endpoint.address[1], "/metrics", host="127.0.0.2")
    everywhere = Endpoint(tmp_path, "0.0.0.0", 0, step=0, total_steps=1)
    assert get(everywhere.address[1], "/metrics", host="127.0.0.2")[0] == 200
    everywhere.close()
    with pytest.raises(urllib.error.URLError, match="refused"):
        get(everywhere.address[1], "/metrics", host="127.0.0.1")


@pytest.fixture
def port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_a_port_in_use_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        options = TrackingConfig(wandb="disabled", tensorboard=False, http_port=other.getsockname()[1])
        tracker = Tracker(tmp_path, options, enabled=True)
        tracker.start({}, total_steps=1)
        with tracker.between_steps():
            tracker.advance()
        tracker.log(1, "train", {"loss": 1.0})
        tracker.finish()
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1
    assert "the endpoint FAILED" in caplog.text
    assert json.loads((tmp_path / METRICS_FILE).read_text())["step"] == 1


def test_a_training_is_followed(tmp_path: Path, port: int) -> None:
    pages = []

    class Asked(Trainer):
        def _log(self) -> None:
            super()._log()
            pages.append((*get(port, "/healthz"), get(port, "/metrics")[1]))

    options = (f"tracking.http_port={port}", "runtime.steps=2", "checkpoint.every=1", "checkpoint.async_save=false")
    train_here(tmp_path, *options, base=TINY_DLRM, trainer=Asked)
    (first, second) = pages
    assert first[:2] == (200, "step 1 of 2\n")
    records = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    values = next(record["values"] for record in records if (record["step"], record["split"]) == (2, "train"))
    found = parsed(second[2])
    assert found["gemsmith_loss"] == values["loss"]
    assert found["gemsmith_examples_per_second"] == values["examples_per_s"]
    assert found["gemsmith_checkpoint_step"] == 1
    with socket.socket() as free:  # the run has let go of it
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", port))
