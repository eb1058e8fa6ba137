"""Generates labelled rows as parquet files and measures how they are prepared: rows/s and the process's largest memory.

    python -m tools.preparation --rows 100000000 --folder /data/generated --output docs/performance/preparation_cpu.json

Each number of rows is generated (unless its files are there) and prepared in a process of its own, whose largest
resident set the kernel states when it ends.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from train.config.schema import EventsConfig, HistoryConfig
from train.data import events
from train.data.source import PreparedSource

FILE = 5_000_000
"""Rows of a file."""
GROUP = 500_000
"""Rows of a row group."""
START = 1_700_000_000
A_USER = 50
"""Rows."""
ITEMS = 1_000_000
STATISTICS = {
    "none": "none",
    "auto": "auto",
    "ten": {
        **{
            "_".join(by): {"by": by}
            for by in (["user_id"], ["item_id"], ["category"], ["city"], ["user_id", "category"])
        },
        **{"_".join(by): {"by": by} for by in (["user_id", "item_id"], ["city", "category"], ["device", "item_id"])},
        "recent_item": {"by": ["item_id"], "half_life": 86400.0, "kinds": ["count", "rate", "recency"]},
        "users_of_category": {"by": ["category"], "kinds": [], "distinct": ["user_id"]},
    },
}
"""What `--statistics` may be."""


def generate(folder: Path, rows: int, seed: int = 0) -> None:
    """Clicks in time order: Zipf items, log-normal activity of users, 8 columns."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    users = max(rows // A_USER, 1)
    activity = np.cumsum(generator.lognormal(sigma=1.0, size=users))
    activity /= activity[-1]
    popularity = np.cumsum(1.0 / np.arange(1, ITEMS + 1))
    popularity /= popularity[-1]
    category = generator.integers(500, size=ITEMS, dtype=np.int32)
    for begin in range(0, rows, FILE):
        with pq.ParquetWriter(folder / f"{begin // FILE:04d}.parquet", _schema()) as writer:
            for first in range(begin, min(begin + FILE, rows), GROUP):
                size = min(GROUP, rows - first)
                item = np.searchsorted(popularity, generator.random(size)).clip(max=ITEMS - 1)
                user = np.searchsorted(activity, generator.random(size)).clip(max=users - 1)
                columns = [
                    START + (first + np.arange(size)) * 30 * 86400 // rows,
                    user + 10**6,
                    item,
                    category[item],
                    user % 200,
                    generator.integers(6, size=size, dtype=np.int8),
                    generator.exponential(10, size).astype(np.float32),
                    (generator.random(size) < 0.05 + 0.1 * (category[item] % 7 == user % 7)).astype(np.int8),
                ]
                writer.write_table(pa.table(columns, schema=_schema()), row_group_size=GROUP)


def config_of(folder: Path, cache: Path, rows_at_once: int, statistics: str) -> EventsConfig:
    return EventsConfig(
        files=[str(folder)],
        cache_dir=str(cache),
        user="user_id",
        time="time",
        labels={"click": "click"},
        request_categorical=["user_id", "city", "device"],
        candidate_categorical=["item_id", "category"],
        candidate_numeric=["price"],
        log_numeric=["price"],
        histories={"click": HistoryConfig(["item_id", "category"], where={"click": 1})},
        max_candidates=4,
        rows_at_once=rows_at_once,
        statistics=STATISTICS[statistics],
    )


def measure(rows: int, folder: Path, rows_at_once: int, statistics: str) -> dict[str, Any]:
    """Prepare `rows` generated rows in a process of its own."""
    generated, cache = folder / f"rows-{rows}", folder / f"cache-{rows}-{rows_at_once}"
    if not generated.exists():
        generate(generated.with_suffix(".partial"), rows)
        generated.with_suffix(".partial").rename(generated)
    shutil.rmtree(cache, ignore_errors=True)
    ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=_prepare, args=(config_of(generated, cache, rows_at_once, statistics), cache, theirs)
    )
    process.start()
    theirs.close()
    result = ours.recv()
    process.join()
    shutil.rmtree(cache)
    result["statistics"] = statistics
    result["bytes_of_files"] = sum(file.stat().st_size for file in generated.iterdir())
    return {"rows": rows, "rows_at_once": rows_at_once, "rows_per_s": round(rows / result["wall_s"])} | result


def _prepare(config: EventsConfig, cache: Path, results: Any) -> None:
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    folder = cache / "prepared"
    folder.mkdir(parents=True)
    events.prepare(config, folder)
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_SELF)
    source = PreparedSource(folder, config.max_history)
    results.send(
        {
            "wall_s": round(wall, 1),
            "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
            "max_rss_gib": round(after.ru_maxrss / 2**20, 3),
            "max_rss_before_gib": round(before.ru_maxrss / 2**20, 3),
            "requests": {split: source.num_requests(split) for split in ("train", "valid", "test")},
            "table_rows": source.spec.tables,
            "bytes_of_cache": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        }
    )


def _schema() -> pa.Schema:
    return pa.schema(
        [
            ("time", pa.int64()),
            ("user_id", pa.int64()),
            ("item_id", pa.int64()),
            ("category", pa.int32()),
            ("city", pa.int64()),
            ("device", pa.int8()),
            ("price", pa.float32()),
            ("click", pa.int8()),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", required=True)
    parser.add_argument("--rows-at-once", type=int, default=EventsConfig().rows_at_once)
    parser.add_argument("--statistics", choices=list(STATISTICS), default="none", help="data.statistics")
    parser.add_argument("--folder", type=Path, required=True, help="for the generated files and the cache")
    parser.add_argument("--output", type=Path, help="JSON; printed as well")
    arguments = parser.parse_args()
    about = {"machine": platform.machine(), "cores": os.cpu_count(), "load_before": round(os.getloadavg()[0], 2)}
    runs = [measure(rows, arguments.folder, arguments.rows_at_once, arguments.statistics) for rows in arguments.rows]
    text = json.dumps(about | {"runs": runs}, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
