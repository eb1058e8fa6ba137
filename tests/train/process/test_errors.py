"""How a command ends that fails."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from train.config.overrides import split_options
from train.process import errors


def wrong(arguments: list[str]) -> NoReturn:
    split_options(arguments, {}, "key=value")
    raise KeyError("a bug")


def ended(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    monkeypatch.setattr(sys, "argv", ["it", *arguments])
    with pytest.raises(SystemExit) as status:
        errors.run(wrong)
    return status.value.code


@pytest.fixture
def no_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for name in ("ERROR_FILE", "RESTART_COUNT", "MAX_RESTARTS"):
        monkeypatch.delenv(f"TORCHELASTIC_{name}", raising=False)


@pytest.mark.usefixtures("no_logs")
def test_what_a_user_did_wrong_is_said_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(monkeypatch, "wrong") == 1
    assert capsys.readouterr().err == "ValueError: 'wrong' is not key=value; e.g. key=value\n"
    assert ended(monkeypatch, "a=b") == 1
    told = capsys.readouterr().err
    assert told.startswith("Traceback")
    assert told.endswith("KeyError: 'a bug'\n")


@pytest.mark.usefixtures("no_logs")
@pytest.mark.reliability(
    "a command fails, below torchrun or not",
    "the error is the console's last line, once; the traceback is in the log or `error.json`",
)
def test_the_traceback_is_in_the_log_and_the_error_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, file = logging.FileHandler(tmp_path / "train.log"), tmp_path / "error.json"
    monkeypatch.setattr(logging.getLogger(), "handlers", [log])
    ended(monkeypatch, "a=b")
    assert capsys.readouterr().err == f"the traceback is in {tmp_path / 'train.log'}\nKeyError: 'a bug'\n"
    assert "Traceback (most recent call last)" in (tmp_path / "train.log").read_text()

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    for attempt, told in (("0", "KeyError: 'a bug'\n"), ("1", "")):  # the launcher tells the last failure
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        ended(monkeypatch, "a=b")
        assert capsys.readouterr().err == told
    message = json.loads(file.read_text())["message"]
    assert message["message"] == message["extraInfo"]["py_callstack"] == "KeyError: 'a bug'"
    assert message["traceback"].startswith("Traceback")
    log.close()
