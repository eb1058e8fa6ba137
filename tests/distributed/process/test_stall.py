"""A rank that hangs ends the run within the timeout, and all of them have written where they stood."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.multiprocessing import ProcessRaisedException

from modules.batch import RequestBatch
from tests.launching import TINY_DLRM, train_here
from tests.processes import run_ranks
from train.trainer import Trainer

TIMEOUT = 5


class Hanging(Trainer):
    def _step(self, batches: Iterator[RequestBatch]) -> None:
        if self.world.rank == 1 and self.progress.step == 2:
            wait_for_nothing()
        super()._step(batches)


def wait_for_nothing() -> None:
    time.sleep(2 * TIMEOUT)


def hang(run_dir: Path) -> None:
    train_here(run_dir, f"runtime.collective_timeout={TIMEOUT}", base=TINY_DLRM, trainer=Hanging)


@pytest.mark.reliability(
    "a rank hangs in a step",
    "the run ends within `runtime.collective_timeout`; the error names the files with all ranks' stacks",
)
def test_a_rank_that_hangs_is_told_by_what_each_of_them_did(tmp_path: Path) -> None:
    message = r"rank 0 waited 5 s \(runtime\.collective_timeout\) behind step \d .*runtime\.collective_timeout=10"
    with pytest.raises(ProcessRaisedException, match=message):
        run_ranks(hang, 2, tmp_path)
    waiting, hanging = ((tmp_path / f"stalled_rank_{rank}.txt").read_text() for rank in range(2))
    assert "in wait_for_nothing" in hanging
    assert "rank 1 behind step 2, kernel launched last: no kernel" in hanging
    assert "in wait_for_nothing" not in waiting
    assert "in progress" in waiting  # of the pipeline, whichever collective of the step comes first


def test_a_run_that_ends_leaves_no_stacks(tmp_path: Path) -> None:
    train_here(tmp_path, "runtime.steps=2", base=TINY_DLRM)
    assert not list(tmp_path.glob("stalled_rank_*"))
