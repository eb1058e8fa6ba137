"""A run that is told to stop saves a checkpoint, says so by its status, and goes on to what it would have come to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from launch.agent import main as agent
from tests.launching import ROOT, TINY_DLRM, environment, python, train_ranks
from tests.processes import run_ranks
from train.config.schema import RuntimeConfig
from train.process import distributed
from train.process.preemption import PERIOD, Preemption
from train.process.signals import STATUS
from train.record.tracking import read_metrics

STEPS = 60
OPTIONS = (
    "data.num_requests=8192",
    "data.eval_requests=64",
    "data.num_workers=1",
    f"runtime.steps={STEPS}",
    "model.dropout=0.1",
)
SLOW = "tests.distributed.process.slow"
"""As train.main."""


def command(ranks: int, run_dir: Path, *overrides: str) -> tuple[list[str], dict[str, str]]:
    """One process on its own, or several by the launcher."""
    options = [*TINY_DLRM, *OPTIONS, f"runtime.run_dir={run_dir}", *overrides]
    if ranks == 1:
        return python("-m", SLOW, *options), environment()
    launch = {"MODULE": SLOW, "NPROC": str(ranks), "RUN_DIR": str(run_dir)}
    return [str(ROOT / "launch/torchrun.sh"), *options], environment() | launch


def start(ranks: int, run_dir: Path, *overrides: str) -> subprocess.Popen[str]:
    line, variables = command(ranks, run_dir, *overrides)
    return subprocess.Popen(line, cwd=ROOT, env=variables, stderr=subprocess.PIPE, text=True)


def logged(run_dir: Path) -> list[int]:
    file = run_dir / "metrics.jsonl"
    return [record.step for record in read_metrics(file) if record.split == "train"] if file.exists() else []


def family(process: int) -> list[int]:
    """A process and all that descend from it."""
    listed = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True).stdout.split()
    return [process, *(each for child in listed for each in family(int(child)))]


def finish(ranks: int, run_dir: Path) -> dict[str, Any]:
    # Without workers batches are the same, and need no server.
    train_ranks(ranks, run_dir, *OPTIONS, "data.num_workers=0", base=TINY_DLRM)
    return json.loads((run_dir / "results.json").read_text())


def stop(ranks: int, number: signal.Signals, run_dir: Path, *overrides: str, all_processes: bool) -> None:
    """Start a run and tell it to stop amid its steps: its first process, or all of them, loaders included."""
    process = start(ranks, run_dir, *overrides)
    deadline = time.monotonic() + 120
    while len(logged(run_dir)) < 10 and time.monotonic() < deadline:
        time.sleep(0.05)
    for each in family(process.pid) if all_processes else [process.pid]:
        os.kill(each, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == STATUS, errors[-5000:]
    assert "resource_tracker" not in errors, errors[-5000:]
    (saved,) = run_dir.glob("checkpoints/step_????????")
    step = logged(run_dir)[-1]
    assert saved.name == f"step_{step:08d}"
    assert 10 <= step < STEPS
    assert f"told to stop (status 75): step {step} is saved" in (run_dir / "train.log").read_text()
    assert not (run_dir / "results.json").exists()


@pytest.mark.reliability(
    "SIGTERM to every process of a run",
    "a checkpoint, status 75; restarted, it ends with the uninterrupted results",
)
def test_a_run_that_is_told_to_stop_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    ranks = 2
    stop(ranks, signal.SIGTERM, tmp_path / "stopped", all_processes=True)  # as Slurm does
    resumed, whole = finish(ranks, tmp_path / "stopped"), finish(ranks, tmp_path / "whole")
    assert logged(tmp_path / "stopped") == list(range(1, STEPS + 1))
    assert resumed["test"] == whole["test"]
    assert resumed["valid"] == whole["valid"]


def test_the_other_signal_harms_no_process_beside_the_run(tmp_path: Path) -> None:
    stop(1, signal.SIGUSR1, tmp_path / "run", all_processes=True)


def steps_until_all_know(seconds: float, told_at: int, folder: Path) -> None:
    """Steps of one length; the second rank is told within one of them."""
    world = distributed.start(RuntimeConfig(device="cpu", threads=1))
    preemption, step = Preemption(world, 60), 0
    with preemption:
        while True:
            step += 1
            time.sleep(seconds)
            if world.rank == 1 and step == told_at:
                os.kill(os.getpid(), signal.SIGTERM)
                told = time.monotonic()
            if preemption.agreed():
                break
    late = f" {time.monotonic() - told}" if world.rank == 1 else ""
    (folder / str(world.rank)).write_text(f"{step}{late}")
    distributed.stop()


@pytest.mark.parametrize(("seconds", "told_at"), [(1.1 * PERIOD, 3), (0.01, 150)])
@pytest.mark.reliability(
    "a signal to one rank, in long or short steps",
    "all ranks stop at the same step: the current long one, or within two seconds",
)
def test_ranks_agree_to_stop_by_time(seconds: float, told_at: int, tmp_path: Path) -> None:
    run_ranks(steps_until_all_know, 2, seconds, told_at, tmp_path)
    (first,) = (tmp_path / "0").read_text().split()
    second, late = (tmp_path / "1").read_text().split()
    assert first == second
    if seconds > PERIOD:
        assert int(first) == told_at
    else:
        assert told_at + 8 < int(first)  # more steps than slow ones may take
        assert float(late) < 2.5 * PERIOD


def one_hangs() -> None:
    world = distributed.start(RuntimeConfig(device="cpu", threads=1))
    preemption = Preemption(world, 1)
    if world.rank == 0:
        preemption.agreed()
        with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout"):
            preemption.agreed()
    else:
        time.sleep(4)
    os._exit(0)  # the group cannot be left in order


def test_agreeing_waits_no_longer_than_a_collective() -> None:
    run_ranks(one_hangs, 2)


@pytest.mark.reliability("SIGUSR1 to the launcher alone", "it reaches all ranks; a checkpoint, status 75")
def test_the_launcher_hands_on_what_it_is_told(tmp_path: Path) -> None:
    stop(2, signal.SIGUSR1, tmp_path / "run", "data.num_workers=0", all_processes=False)


@pytest.mark.reliability(
    "ranks end with status 75 or another",
    "the launcher returns 75 for a stop; otherwise its last lines say which process failed first, and why",
)
def test_the_launcher_tells_a_stop_from_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another node's signal, or one to the processes alone: torchrun sees nothing but their statuses."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ends.py").write_text("import os, sys; sys.exit(int(sys.argv[1 + int(os.environ['RANK'])]))")
    (tmp_path / "lags.py").write_text(
        f"import os, sys, time; sys.exit({STATUS}) if os.environ['RANK'] == '0' else time.sleep(600)"
    )
    options = ["--standalone", "--nproc-per-node", "2"]
    assert agent([*options, "ends.py", "0", "0"]) == 0
    assert agent([*options, "ends.py", str(STATUS), str(STATUS)]) == STATUS
    assert agent([*options, "lags.py"]) == STATUS
    capfd.readouterr()
    assert agent([*options, "ends.py", "3", "3"]) == 1
    told = capfd.readouterr().err
    assert "of ends.py failed first" in told.splitlines()[-2]
    assert told.splitlines()[-1] == "status 3"
    assert "Traceback" not in told


def test_a_failure_beside_a_stop_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = ChildFailedError("it", {rank: ProcessFailure(rank, 9, code, "") for rank, code in enumerate((STATUS, 3))})

    def run(arguments: Any) -> None:
        raise failed

    monkeypatch.setattr("launch.agent.run.run", run)
    monkeypatch.setattr("launch.agent.run.parse_args", list)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0")  # which the launcher changes, for later tests as well
    assert agent([]) == 1
