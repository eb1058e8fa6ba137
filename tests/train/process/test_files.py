"""Errors of files that cannot be written name the file, and what is in the way."""

from __future__ import annotations

import logging
import resource
import sys
from pathlib import Path

import pytest

from train.config.schema import TrackingConfig
from train.process.files import room, write_json
from train.process.logs import _LogFile
from train.record.tracking import Tracker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")


@pytest.mark.reliability("the disk is full when metrics are written", "the error names the file and the free space")
def test_metrics_on_a_full_disk_are_named(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, TrackingConfig(wandb="disabled", tensorboard=False, progress="never"), enabled=True)
    tracker.start({}, total_steps=1)
    assert tracker._file is not None
    tracker._file.close()
    tracker._file = open("/dev/full", "w")  # noqa: SIM115
    with pytest.raises(OSError, match=r"No space left on device \([\d,]+ MiB are free in .*metrics\.jsonl"):
        tracker.log(1, "train", {"loss": 0.5})
    with pytest.raises(OSError, match="metrics.jsonl"):  # what was not written is tried again
        tracker.finish()


@pytest.mark.reliability("the disk is full when a log is written", "one line on stderr names it; the run goes on")
def test_a_log_on_a_full_disk_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    handler = _LogFile("/dev/full")
    for number in range(3):
        handler.handle(logging.makeLogRecord({"msg": f"line {number}"}))
    told = capsys.readouterr().err
    assert told.count("/dev/full cannot be written (OSError(28, 'No space left on device')); the run goes on") == 1
    assert "Traceback" not in told
    with pytest.raises(OSError, match="No space left"):
        handler.close()


def test_a_limit_of_file_sizes_is_told(tmp_path: Path) -> None:
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert "ulimit" not in room(tmp_path) or usual[0] != resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, usual[1]))
    try:
        with pytest.raises(OSError, match=r"File too large \(.*a file may have 1\.0 MiB \(ulimit -f\)\).*values\.json"):
            write_json(tmp_path / "values.json", {"text": "x" * (2 << 20)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
