"""Files that come while a run trains: each row is taken once, on one rank and on two, also by a run that is killed."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modules.batch import RequestBatch
from tests.distributed.checkpoint.test_resume import training
from tests.launching import EVENTS_DLRM, train_here
from tests.processes import run_ranks
from train.trainer import Trainer

ROWS = 60
BASE = (
    *EVENTS_DLRM,
    "data.request_window=0",
    "+data.histories={seen: {fields: [item], where: {click: 1}}}",
    "data.split=[1,0,0]",
    "data.batch_size=8",
    "data.follow_wait=0.2",
    "optimizer.schedule=constant",
)


def table_of(number: int) -> pa.Table:
    """Rows of a day; the first has items below 20."""
    generator = np.random.default_rng(number)
    return pa.table(
        {
            "row": np.arange(ROWS) + ROWS * number,
            "user": generator.integers(5, size=ROWS),
            "item": generator.integers(20 + 10 * number, size=ROWS),
            "time": np.arange(ROWS) * 10 + 10_000 * number,
            "known": np.arange(ROWS) * 10 + 10_000 * number + 1501 * (np.arange(ROWS) % 7),
            "click": generator.integers(2, size=ROWS),
        }
    )


def write(folder: Path, number: int) -> None:
    pq.write_table(table_of(number), folder / f".{number}")
    (folder / f".{number}").rename(folder / f"day{number}.parquet")


def paths(folder: Path) -> tuple[str, ...]:
    return f"data.root='{folder}/log'", "data.files=['*.parquet']", f"data.cache_dir='{folder}/cache'"


class Writing(Trainer):
    """Days come while it trains, one in the second step and one in the last of the first part; notes rows by step."""

    def _step(self, batches: Iterator[RequestBatch]) -> None:
        super()._step(batches)
        log = Path(self.config.data.root)  # type: ignore[attr-defined]
        if self.world.is_first and self.progress.step == 2:
            write(log, 1)
            (log / "half.parquet").write_bytes((log / "day1.parquet").read_bytes()[:-9])
            (log / "note.tmp").write_text("no data")
        if self.world.is_first and self.progress.step == 8:
            write(log, 2)

    def _forward(self, batch: RequestBatch) -> Any:
        with (self.run_dir / f"seen_{self.world.rank}.txt").open("a") as file:
            for row in batch.row.tolist():
                print(self.progress.step + 1, self.training.locate(row), file=file)
        return super()._forward(batch)


class Killed(Writing):
    def _step(self, batches: Iterator[RequestBatch]) -> None:
        super()._step(batches)
        if self.progress.step == 12:
            raise RuntimeError("killed")


def seen(run_dir: Path, first: int, last: int) -> list[str]:
    """Rows of the steps first < step <= last, over all ranks, by file and row."""
    lines = [line.split(" ", 1) for file in run_dir.glob("seen_*.txt") for line in file.read_text().splitlines()]
    return sorted(name.rpartition("/")[2] for step, name in lines if first < int(step) <= last)


def days(*numbers: int) -> list[str]:
    return sorted(f"day{number}.parquet, row {row + 1}" for number in numbers for row in range(ROWS))


@pytest.mark.reliability(
    "a run that follows new files is killed",
    "it resumes on one or two ranks; no row is lost or trained on twice",
)
def test_every_row_is_taken_once(tmp_path: Path) -> None:
    whole, killed, resumed = (tmp_path / name for name in ("whole", "killed", "resumed"))
    (tmp_path / "log").mkdir()
    write(tmp_path / "log", 0)
    options = (*paths(tmp_path), "checkpoint.every=10", "checkpoint.async_save=false")
    train_here(whole, *options, "publish.every=1000", base=BASE, trainer=Writing)
    published = [json.loads(each.read_text())["step"] for each in sorted((whole / "published").glob("*.json"))]
    assert published == [8, 23]  # when it has used up the files that it knows
    assert seen(whole, 0, 8) == days(0)
    assert seen(whole, 8, 23) == days(1, 2)
    assert seen(whole, 23, 1000) == []
    log = (whole / "train.log").read_text()
    assert "3 files with 180 training rows so far; no other has come for 0.2 s" in log
    assert "half.parquet is not complete, and is left out" in log
    results = json.loads((whole / "results.json").read_text())
    assert results["step"] == 23

    for name in ("day1.parquet", "day2.parquet", "half.parquet"):
        (tmp_path / "log" / name).unlink()
    with pytest.raises(RuntimeError, match="killed"):
        train_here(killed, *options, base=BASE, trainer=Killed)
    shutil.copytree(killed, resumed)
    write(tmp_path / "log", 3)
    run_ranks(partial(train_here, base=BASE, trainer=Writing), 2, resumed, *options, "data.batch_size=4")
    assert seen(killed, 0, 8) == days(0)
    # The checkpoint is of step 10. The resumed run appended to the notes of the killed one.
    again = seen(killed, 10, 12)
    assert Counter(seen(resumed, 8, 23)) - Counter(again) == Counter(days(1, 2))
    assert seen(resumed, 23, 1000) == days(3)
    log = (resumed / "train.log").read_text()
    assert "3 files with 180 training rows so far; of the newest 120 requests 16 are trained on" in log
    losses = [record.values["loss"] for record in training(whole)]
    assert [record.values["loss"] for record in training(resumed)][:23] == pytest.approx(losses, rel=1e-4)
