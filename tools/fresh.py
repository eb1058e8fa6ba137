"""What following a run is worth on a stream that drifts: `python -m tools.fresh docs/performance/fresh.json`.

A day of clicks is trained on, and exported. Then hours come, each a file: before the run trains on it, its requests are
scored by the export as it is, and by one that follows what the run publishes. How much items are liked drifts from hour
to hour. `best` are scores by the probabilities that clicks are drawn with.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.stats import rankdata

from train.commands import export
from train.process.files import write_json
from train.record import versions
from train.serving.following import Follower
from train.serving.service import Service

USERS, ITEMS, SHOWN, VIEWS, HOURS = 500, 100, 5, 600, 24
DRIFT = 0.95
"""Correlation of an item's worth with that of the hour before."""
WAIT = 600
OPTIONS = [
    *("model=dcnv2", "model.dim=16", "precision=fp32", "data=events", "data.user=user", "data.time=time"),
    *("+data.labels={click: click}", "data.request_categorical=[user]", "data.candidate_categorical=[item]"),
    *("data.statistics=none", "data.request_window=1", "data.split=[1,0,0]", "data.batch_size=16"),
    *(
        "runtime.epochs=1",
        "runtime.device=cpu",
        "runtime.threads=1",
        "optimizer.schedule=constant",
        "optimizer.lr=0.003",
    ),
    *("optimizer.sparse_lr=0.1", "data.num_workers=0", "tracking.wandb=disabled", "tracking.tensorboard=false"),
    *("publish.every=1000000", f"data.follow_wait={WAIT}"),
]


class Stream:
    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.worth = self.random.normal(size=ITEMS)
        self.hour = 0

    def next(self) -> list[dict[str, Any]]:
        """Rows of an hour: a few items shown at each view."""
        self.hour += 1
        self.worth = DRIFT * self.worth + np.sqrt(1 - DRIFT**2) * self.random.normal(size=ITEMS)
        rows = []
        for view, user in enumerate(self.random.integers(USERS, size=VIEWS)):
            moment = 1_700_000_000 + 3600 * self.hour + 6 * view
            for item in self.random.choice(ITEMS, SHOWN, replace=False):
                clicked = self.random.random() < 1 / (1 + np.exp(1 - 1.5 * self.worth[item]))
                rows.append({"user": f"u{user}", "item": f"i{item}", "time": moment, "click": int(clicked)})
        return rows


def write(rows: list[dict[str, Any]], path: Path) -> None:
    aside = path.with_name(f".{path.name}")
    pq.write_table(pa.Table.from_pylist(rows), aside)
    aside.rename(path)


def scores_of(service: Service, rows: list[dict[str, Any]]) -> np.ndarray:
    views = [rows[first : first + SHOWN] for first in range(0, len(rows), SHOWN)]
    results = service([{"request": v[0], "candidates": v, "histories": {}, "time": v[0]["time"]} for v in views])
    return np.concatenate([result["click"] for result in results])


def auc(scores: np.ndarray, rows: list[dict[str, Any]]) -> float:
    labels = np.array([row["click"] for row in rows])
    positive = labels.sum()
    ranks = rankdata(scores)[labels == 1].sum() - positive * (positive + 1) / 2
    return float(ranks / (positive * (len(labels) - positive)))


def until(what: Any, run: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + WAIT
    while not what():
        if run.poll() is not None or time.monotonic() > end:
            raise RuntimeError("the run has ended; see its train.log")
        time.sleep(0.2)


def measure(folder: Path) -> list[dict[str, float]]:
    stream, log, run_dir = Stream(), folder / "log", folder / "run"
    log.mkdir()
    write([row for _ in range(24) for row in stream.next()], log / "yesterday.parquet")
    paths = [f"data.root='{log}'", "data.files=['*.parquet']", f"data.cache_dir='{folder}/cache'"]
    command = [sys.executable, "-m", "train.main", *OPTIONS, *paths, f"runtime.run_dir={run_dir}"]
    run = subprocess.Popen(command)
    try:
        until(
            lambda: (
                [*(run_dir / "published").glob("*.json")] and [*run_dir.glob("checkpoints/step_????????/meta.json")]
            ),
            run,
        )
        exported = export.main([f"run_dir={run_dir}", "compile=false"])
        frozen, fresh = (Service.from_pretrained(exported) for _ in range(2))
        follower = Follower(fresh.scorer, run_dir / "published")
        follower.look()
        found = []
        for hour in range(HOURS):
            rows = stream.next()
            best = np.array([stream.worth[int(row["item"][1:])] for row in rows])
            scores = {"export": scores_of(frozen, rows), "follows": scores_of(fresh, rows), "best": best}
            found.append({"hour": hour} | {name: auc(each, rows) for name, each in scores.items()})
            print(json.dumps(found[-1]), flush=True)
            write(rows, log / f"hour_{hour:02d}.parquet")
            until(follower.look, run)
        return found
    finally:
        run.terminate()
        run.wait()


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(Path(scratch))
    write_json(out, {"versions": versions.collect(), "rows": rows})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
