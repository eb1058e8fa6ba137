"""Trainings in processes of their own: a few at a time, what failed, what is left, and being told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launching import ROOT
from train.process import jobs
from train.process.jobs import Job, Launch
from train.process.signals import STATUS

WRITES = "import os, pathlib; pathlib.Path(os.environ['FOLDER'], 'results.json').write_text('{}')"
FAILS = "raise SystemExit(3)"
NOTHING = "print('done')"


def launch(job: Job, code: str = WRITES) -> Launch:
    job.folder.mkdir(exist_ok=True)
    return Launch([sys.executable, "-c", code], job.folder / "console.log", {"FOLDER": str(job.folder)})


def test_one_that_fails_stops_no_other_and_only_what_is_left_runs_again(tmp_path: Path) -> None:
    codes = {"whole": WRITES, "failing": FAILS, "empty": NOTHING}
    some = [Job(tmp_path / name) for name in codes]
    jobs.run(some, lambda job: launch(job, codes[job.folder.name]), [{}, {}])
    assert [job.status.split(":")[0] for job in some] == ["ok", "failed, exit code 3", "failed, no results.json"]
    assert (tmp_path / "empty" / "console.log").read_text() == "done\n"
    assert [job.folder.name for job in jobs.unfinished(some)] == ["failing", "empty"]


def test_a_slot_is_one_jobs_at_a_time(tmp_path: Path) -> None:
    code = f"{WRITES}; print(os.environ['SLOT'], open(os.environ['HELD'], 'x').close(), os.remove(os.environ['HELD']))"
    some = [Job(tmp_path / str(number)) for number in range(4)]
    slots = [{"SLOT": name, "HELD": str(tmp_path / f"held-{name}")} for name in "ab"]
    jobs.run(some, lambda job: launch(job, code), slots)
    assert [job.status for job in some] == ["ok"] * 4
    assert {(job.folder / "console.log").read_text()[0] for job in some} == {"a", "b"}


def test_an_error_of_the_caller_ends_what_runs(tmp_path: Path) -> None:
    codes = {"fails": FAILS, "sleeps": "import time; time.sleep(60)"}

    def ended(job: Job) -> None:
        raise RuntimeError(job.status)

    handler, started = signal.getsignal(signal.SIGTERM), time.monotonic()
    with pytest.raises(RuntimeError, match="exit code 3"):
        jobs.run([Job(tmp_path / n) for n in codes], lambda job: launch(job, codes[job.folder.name]), [{}, {}], ended)
    assert time.monotonic() - started < 50
    assert signal.getsignal(signal.SIGTERM) is handler


def test_told_to_stop_it_stops_its_jobs_and_waits_for_them(tmp_path: Path) -> None:
    waits = (
        "import os, pathlib, signal, sys, time; folder = pathlib.Path(os.environ['FOLDER'])\n"
        "signal.signal(signal.SIGTERM, lambda *_: ((folder / 'told').touch(), sys.exit(75)))\n"
        "(folder / 'waits').touch(); time.sleep(60)"
    )
    code = (
        "import sys, pathlib\nfrom train.process import jobs\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        f"start = jobs.Launch([sys.executable, '-c', {waits!r}], folder / 'log', {{'FOLDER': str(folder)}})\n"
        "jobs.run([jobs.Job(folder), jobs.Job(folder / 'next')], lambda job: start, [{}])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 60
    while not (tmp_path / "waits").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(timeout=60) == STATUS
    assert (tmp_path / "told").exists()
