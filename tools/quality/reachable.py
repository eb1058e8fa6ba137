"""Runs' shares of the reachable AUC of a generated log: `python -m tools.quality.reachable RUN_DIR [RUN_DIR ...]`.

The reachable AUC lies between two rankings of the test rows: by the popularity of items, which is the mean label of
their rows in earlier seconds (drawn to the mean of training by `PRIOR` rows), and by the probability that labels were
drawn with, the column p_TASK of `tools.datasets.business_logs`. A run's share is (AUC - popularity) / (generator -
popularity). The same with GAUC. Prints a table, and writes reachable.json into each run directory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from train.config.compose import from_dict
from train.config.schema import Config, EventsConfig
from train.data import build_source
from train.data.events import read_rows
from train.metrics import MetricSet
from train.metrics.predictions import read_predictions
from train.process.files import write_json
from train.record.tracking import format_table

PRIOR = 20.0


def popularity(item: np.ndarray, time: np.ndarray, label: np.ndarray, mean: float) -> np.ndarray:
    """[N] mean label of the item's rows in earlier seconds; unobserved labels (NaN) count nowhere."""
    order = np.lexsort((time, item))
    known = ~np.isnan(label[order])
    totals = np.pad(np.cumsum([np.where(known, label[order], 0), known], axis=1), ((0, 0), (1, 0)))
    new_item = np.append(True, np.diff(item[order]) != 0)
    new_time = new_item | np.append(True, np.diff(time[order]) != 0)
    start, now = (np.maximum.accumulate(np.where(new, np.arange(len(item)), 0)) for new in (new_item, new_time))
    sums, counts = totals[:, now] - totals[:, start]
    result = np.empty(len(item))
    result[order] = (sums + PRIOR * mean) / (counts + PRIOR)
    return result


def reachable(run_dir: Path) -> dict[str, dict[str, float]]:
    """By task: auc, popularity, generator and share, and gauc with the same. ValueError for other data."""
    config: Config = from_dict(json.loads((run_dir / "config.json").read_text())["config"], [])
    data = config.data
    if not isinstance(data, EventsConfig) or not data.candidate_categorical or not data.time:
        raise ValueError(f"{run_dir} is of data={data.name}; use data=shop_log, news_log or video_log")
    item_column, time_column = data.candidate_categorical[0], data.time
    predictions = read_predictions(run_dir / "predictions" / "test")
    rates = build_source(data).label_rates()
    columns = {item_column, time_column, *data.labels.values(), *(f"p_{task}" for task in data.labels)}
    rows = read_rows(data, columns)
    at = np.searchsorted(rows.table.number, predictions["row"])
    item, time = rows.ids(item_column).codes, rows.milliseconds(time_column, data.time_format) // 1000
    found: dict[str, dict[str, float]] = {}
    for task, column in data.labels.items():
        popular = popularity(item, time, rows.numbers(column), rates[task])[at]
        scores = {
            "own": predictions[f"{task}_logit"],
            "popularity": popular,
            "generator": rows.numbers(f"p_{task}")[at],
        }
        values = {
            name: _metrics(score, predictions[f"{task}_label"], predictions["group"], rates[task])
            for name, score in scores.items()
        }
        found[task] = {}
        for metric in ("auc", "gauc"):
            own, least, most = (values[name][f"task/{metric}"] for name in ("own", "popularity", "generator"))
            prefix = "" if metric == "auc" else "gauc_"
            found[task] |= {metric: own, f"{prefix}popularity": least, f"{prefix}generator": most}
            found[task][f"{prefix}share"] = (own - least) / (most - least)
    return found


def _metrics(score: np.ndarray, label: np.ndarray, group: np.ndarray, rate: float) -> dict[str, float]:
    metrics = MetricSet(["task"], {"task": rate}, torch.device("cpu"), exact_auc=True)
    columns = [torch.from_numpy(np.array(each, np.float32))[:, None] for each in (score, label)]
    metrics.update(*columns, torch.ones_like(columns[1]), torch.from_numpy(group.copy()))
    return metrics.compute()


def main(arguments: list[str]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for run_dir in map(Path, arguments):
        values = reachable(run_dir)
        write_json(run_dir / "reachable.json", values)
        table[run_dir.name] = {f"{task}/{name}": value for task, each in values.items() for name, value in each.items()}
    print(format_table(table, "run"))
    return table


if __name__ == "__main__":
    main(sys.argv[1:])
