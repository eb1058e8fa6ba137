"""A rank that is killed in each part of a step, and restarted by torchrun: the run ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.kills import PLACES
from tests.distributed.test_resume import training
from tests.launching import ROOT, TINY_DLRM, run, torchrun, train_ranks
from train.record.tracking import read_metrics

OPTIONS = ("checkpoint.every=2", "checkpoint.async_save=false", "runtime.steps=8", "checkpoint.keep=9")


@pytest.mark.reliability(
    "a rank is killed (SIGKILL) in a forward, after a restart in a backward, then while it writes a checkpoint",
    "torchrun restarts all ranks from the newest whole checkpoint each time; losses and results are bit for bit those "
    "of a run that was not killed",
)
def test_a_run_survives_a_kill_in_every_part_of_a_step(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train_ranks(2, whole, *OPTIONS, base=TINY_DLRM)
    command = torchrun(2, "-m", "tests.distributed.kills", *TINY_DLRM, *OPTIONS, f"runtime.run_dir={killed}")
    command[command.index("--standalone") : command.index("--standalone")] = ["--max-restarts", str(len(PLACES))]
    run(command, ROOT, timeout=200)
    assert all((tmp_path / f"killed_in_{place}").exists() for place in PLACES)
    assert {r.step: r.values["loss"] for r in training(killed)} == {r.step: r.values["loss"] for r in training(whole)}
    final = [read_metrics(path / "metrics.jsonl")[-1].values for path in (whole, killed)]
    assert final[0] == final[1]
    resumed = [
        line.split("(")[-1] for line in (killed / "train.log").read_text().splitlines() if "resumed from" in line
    ]
    assert resumed == ["step 2, epoch 0)", "step 4, epoch 0)", "step 4, epoch 0)"]
