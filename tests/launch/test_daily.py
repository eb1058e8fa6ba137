"""launch/daily.sh goes on day after day with a task whose labels come late."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.launching import EVENTS_DLRM, ROOT, train_here

DAY, START, DAYS = 86_400, 1_700_006_400, 7
OPTIONS = (
    *(each for each in EVENTS_DLRM if "labels" not in each and "DLRM" not in each),
    "+data.labels={click: click, buy: buy}",
    "+data.known_at={buy: bought_at}",
    "+data.histories={bought: {where: {buy: 1}, fields: [item]}}",
    "data.batch_size=32",
    "runtime.epochs=1",
)


def write_day(folder: Path, day: int) -> None:
    """Purchases are known hours later; of the second day none are yet, of the third those of validation's users are."""
    generator, count = np.random.default_rng(day), 200
    time = np.sort(START + day * DAY + generator.integers(DAY // 2, size=count))
    buy = [int(one) for one in generator.random(count) < 0.3]
    if day == 1:
        buy = [None] * count
    if day == 2:
        buy = [1 if row >= 150 and one else None if row >= 150 else one for row, one in enumerate(buy)]
    table = {
        "user": generator.integers(20, size=count),
        "time": time,
        "item": generator.integers(30, size=count) + 10 * day,
        "click": generator.integers(2, size=count),
        "buy": buy,
        "bought_at": [int(at) + 3 * 3600 if one else None for at, one in zip(time, buy, strict=True)],
    }
    pq.write_table(pa.table(table), folder / f"day{day}.parquet")


def overrides(folder: Path, day: int) -> list[str]:
    """What daily.sh gives a run on that day."""
    command = [str(folder / "launch" / "daily.sh"), f"data.files=[day{day}.parquet]"]
    environment = os.environ | {"RUN_DIR": str(folder / "runs" / f"{day}")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "=" in line]


def test_days_without_a_purchase_are_trained_on(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch" / "daily.sh", tmp_path / "launch")
    (tmp_path / "launch" / "torchrun.sh").write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "launch" / "torchrun.sh").chmod(0o755)
    root = (f"data.root='{tmp_path}'", f"data.cache_dir='{tmp_path}/cache'")
    rates, results = [], []
    for day in range(DAYS):
        write_day(tmp_path, day)
        given = overrides(tmp_path, day)
        assert ("checkpoint.load_what=optimizer" in given) == (day > 0)
        run_dir = tmp_path / "runs" / f"{day}"
        train_here(run_dir, *root, *given, base=OPTIONS)
        results.append(json.loads((run_dir / "results.json").read_text()))
        log = (run_dir / "train.log").read_text()
        rates.append(results[-1]["label_rates"])
        assert ("no training row has a label of buy" in log) == (day == 1)
        assert ("validation has labels of one class only of buy" in log) == (day == 2)
    assert rates[1]["buy"] == rates[0]["buy"]
    assert rates[1]["click"] != rates[0]["click"]
    assert rates[2]["buy"] != rates[0]["buy"]
    for day in (1, 2):  # the task that has nothing to tell, or of one class, does not choose
        assert results[day]["best_ne"] == results[day]["valid"]["click/ne"]
    for day in range(3, DAYS):
        both = [results[day]["valid"][f"{task}/ne"] for task in ("click", "buy")]
        assert results[day]["best_ne"] == np.mean(both)
    counts = [
        json.loads((tmp_path / "runs" / f"{day}" / "statistics" / "prior.json").read_text()) for day in range(DAYS)
    ]
    assert [sum(hour[0][0] for hour in each["counts"]) for each in counts] == [200 * (day + 1) for day in range(DAYS)]
