"""The prepared data is cut short while a run reads it."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from modules.batch import RequestBatch
from tests.launching import EVENTS_DLRM, train_here
from train.trainer import Trainer

ROWS = 2000


class Cut(Trainer):
    """Something cuts all arrays of the cache after its second step."""

    folder: Path

    def _step(self, batches: Iterator[RequestBatch]) -> None:
        super()._step(batches)
        if self.progress.step == 2:
            for file in self.folder.glob("*/*.npy"):
                os.truncate(file, 200)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.reliability(
    "a prepared file is cut short while mapped",
    "an error names it, no SIGBUS; a restart prepares the data anew and resumes",
)
def test_data_that_is_cut_short_is_named_and_prepared_anew(workers: int, tmp_path: Path) -> None:
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        rows = ({"user": row // 8, "time": row * 100, "item": row % 50, "click": row % 3 == 0} for row in range(ROWS))
        writer = csv.DictWriter(file, ["user", "time", "item", "click"])
        writer.writeheader()
        writer.writerows({**row, "click": int(row["click"])} for row in rows)
    options = (f"data.files=['{tmp_path}/rows.csv']", f"data.cache_dir='{tmp_path}/cache'", "data.batch_size=32")
    steps = ("runtime.steps=30", "checkpoint.every=1", f"data.num_workers={workers}", "data.prefetch=1")
    Cut.folder = tmp_path / "cache"
    with pytest.raises(RuntimeError, match=rf"\.npy of the prepared data in {tmp_path}/cache/events-\w+ had .* bytes"):
        train_here(tmp_path / "run", *options, *steps, base=EVENTS_DLRM, trainer=Cut)
    train_here(tmp_path / "run", *options, *steps, base=EVENTS_DLRM)
    log = (tmp_path / "run" / "train.log").read_text()
    assert "is damaged (" in log
    assert "is prepared anew" in log
    assert (tmp_path / "run" / "results.json").exists()
