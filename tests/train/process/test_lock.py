"""A run directory has one run at a time, and is free again when that ends, however it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.launching import ROOT, TINY_DLRM, environment, python, train_here
from train.process import lock

HOLD = "import pathlib, sys, time; from train.process import lock; lock.take(pathlib.Path(sys.argv[1])); print('held')"


@pytest.mark.reliability(
    "a second run starts in a directory in use; the first is killed",
    "the second is refused, naming host and process; the kill frees the directory",
)
def test_a_second_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    # A forked worker of the first run outlives it.
    fork = "import os; worker = os.fork(); worker and print(worker, flush=True); time.sleep(60)"
    command = python("-c", f"{HOLD}; {fork}", str(tmp_path))
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        worker = int([first.stdout.readline() for _ in range(2)][1])  # after "held"
        holder = rf"is in use by process {first.pid} on {re.escape(socket.gethostname())}, since .*runtime.run_dir"
        with pytest.raises(ValueError, match=holder):
            train_here(tmp_path, "runtime.steps=1", base=TINY_DLRM)
        assert not (tmp_path / "train.log").exists()
        first.send_signal(signal.SIGKILL)
        first.wait()
        try:
            os.kill(worker, 0)
            train_here(tmp_path, "runtime.steps=1", base=TINY_DLRM)
        finally:
            os.kill(worker, signal.SIGKILL)
    assert (tmp_path / "results.json").exists()


def test_a_run_that_ended_leaves_no_lock(tmp_path: Path) -> None:
    lock.take(tmp_path)
    lock.release(tmp_path)
    lock.release(tmp_path)
    ended = subprocess.run(python("-c", HOLD, str(tmp_path)), cwd=ROOT, env=environment(), capture_output=True)
    assert ended.stdout == b"held\n", ended.stderr


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    # Of a file system in which not even root makes folders.
    with pytest.raises(ValueError, match=r"runtime\.run_dir=/sys/run cannot be written: .*/sys/run.*runtime\.run_dir="):
        train_here(Path("/sys/run"), base=TINY_DLRM)
