"""Metrics by segment, and the gap to another run: `python -m train.commands.segments run_dir=RUN_DIR by=country`.

`by=a,b` names columns of the files of a `data=events` run, including those of joined tables; they need not be features.
The `most=10` ids with the most rows are segments, and all others together are one; numeric features are cut into five
ranges of about as many rows each. `by=events` is the number of events in the request's histories, for a run on any
data; no events is a segment. Without `by=` all rows are one segment.

`against=OTHER_RUN` names a run that was tested on the same rows, of any model: the gap of RUN_DIR to it has a 95 %
bootstrap interval over users (`resamples=200`), for which both runs are resampled together.

It reads the predictions of the test split, or with `predictions=DIR` those that `train.evaluate` wrote; then add the
`key=value` arguments that `train.evaluate` was given. Prints tables and writes them as JSON to `out=`, by default
segments.json in RUN_DIR or DIR.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from train.process.imports import lasting

with lasting():
    import numpy as np
    import torch

    from modules.loss import binary_only
    from train.config.compose import from_dict
    from train.config.overrides import split_options
    from train.config.schema import Config, EventsConfig
    from train.data.events import read_rows
    from train.data.events.names import numeric as numeric_columns
    from train.data.features.columns import Coded
    from train.data.storage.rows import Rows
    from train.metrics import MetricSet, paired_gaps
    from train.metrics.predictions import read_predictions
    from train.process import errors
    from train.process.files import write_json
    from train.record.tracking import format_table

RANGES = 5  # that a numeric column is cut into
EVENTS = "events"  # a column of the predictions that segments can be made of, too
Columns = Mapping[str, np.ndarray]


def tasks_of(predictions: Columns) -> list[str]:
    return [name.removesuffix("_logit") for name in predictions if name.endswith("_logit")]


def metrics(predictions: Columns, rates: Mapping[str, float]) -> dict[str, float]:
    """Those of `MetricSet`, exact ones, of rows of `read_predictions`; `rates`: training label rates by task."""
    tasks = tasks_of(predictions)
    exact = MetricSet(tasks, rates, torch.device("cpu"), exact_auc=True)
    logits, labels = (
        torch.from_numpy(np.stack([predictions[f"{task}_{name}"] for task in tasks], 1)) for name in ("logit", "label")
    )
    weights = torch.from_numpy(predictions["weight"].copy())[:, None].expand_as(labels)
    exact.update(logits, labels, weights, torch.from_numpy(predictions["group"].copy()))
    return exact.compute()


def gaps(predictions: Columns, others: Columns, rates: Mapping[str, float], resamples: int) -> dict[str, float]:
    """`ne_percent`, `auc` and `gauc` of `paired_gaps` from the others to these, and both ends of their intervals."""
    values: dict[str, float] = {}
    for task in tasks_of(predictions):
        found = paired_gaps(
            predictions[f"{task}_label"],
            others[f"{task}_logit"],
            predictions[f"{task}_logit"],
            base_rate=rates[task],
            group=predictions["group"],
            weights=predictions["weight"],
            resamples=resamples,
        )
        for name, interval in found.items():
            if name != "ne":
                values |= {f"{task}/{name}": interval.estimate}
                values |= {f"{task}/{name}_low": interval.low, f"{task}/{name}_high": interval.high}
    return values


Segment = tuple[str, np.ndarray]
"""The name of a segment, and the mask [N] of its rows."""


def segments(config: Config, columns: list[str], predictions: Columns, most: int) -> Iterator[tuple[str, Segment]]:
    """(column, segment) of the rows of `read_predictions`, each row once for a column."""
    data, of_files = config.data, [column for column in columns if column != EVENTS]
    if of_files and not isinstance(data, EventsConfig):
        raise ValueError(f"by={','.join(of_files)} reads columns of data=events; this run is of data={data.name}")
    rows = read_rows(data, set(of_files)) if of_files and isinstance(data, EventsConfig) else None
    at = _places(rows, predictions["row"]) if rows else np.zeros(0)
    numeric = numeric_columns(data) if isinstance(data, EventsConfig) else []
    for column in columns:
        if rows is None or column == EVENTS:
            found = _lengths(predictions[EVENTS])
        elif column in numeric:
            numbers = rows.numbers(column)[at]
            found = chain(_ranges(numbers), [("(missing)", np.isnan(numbers))])
        else:
            found = _ids(rows.ids(column), at, most)
        for segment in found:
            yield column, segment


def _places(rows: Rows, row: np.ndarray) -> np.ndarray:
    """[N] indices in `rows` of the rows of the predictions."""
    at = np.searchsorted(rows.table.number, row).clip(max=len(rows) - 1)
    if (rows.table.number[at] != row).any():
        raise ValueError(
            "the predictions are of other files than the run's; give train.commands.segments the data.* overrides that "
            "train.evaluate was given, e.g. data.test_files=[tomorrow.parquet]"
        )
    return at


def _ids(ids: Coded, at: np.ndarray, most: int) -> Iterator[Segment]:
    codes = ids.codes[at]
    counts = np.bincount(codes[codes >= 0], minlength=len(ids.values))
    order = np.argsort(-counts, kind="stable")
    kept = order[counts[order] > 0][:most]
    for code in kept:
        yield ids.values[int(code)].as_py(), codes == code
    yield "(others)", (codes >= 0) & ~np.isin(codes, kept)
    yield "(missing)", codes < 0


def _lengths(events: np.ndarray) -> Iterator[Segment]:
    yield "0", events == 0
    yield from _ranges(np.where(events > 0, events, np.nan))


def _ranges(numbers: np.ndarray) -> Iterator[Segment]:
    """Ranges of the numbers [N] that are not NaN. Equal numbers stay together, so there may be fewer ranges."""
    known = np.sort(numbers[~np.isnan(numbers)])
    middle = (np.searchsorted(known, numbers) + np.searchsorted(known, numbers, side="right")) / 2
    of_row = np.where(np.isnan(numbers), -1, middle * RANGES // max(len(known), 1))
    for index in np.unique(of_row[of_row >= 0]):
        inside = of_row == index
        yield f"{numbers[inside].min():.4g} to {numbers[inside].max():.4g}", inside


def main(arguments: list[str]) -> list[dict[str, Any]]:
    defaults = {
        "run_dir": "", "by": "", "against": "", "predictions": "", "most": "10", "resamples": "200", "out": "",
    }  # fmt: skip
    options, overrides = split_options(arguments, defaults, "run_dir=RUN_DIR by=country")
    for name in ("most", "resamples"):
        if not options[name].isdecimal() or not int(options[name]):
            raise ValueError(f"{name}={options[name]} must be a number of at least 1, e.g. {name}={defaults[name]}")
    run_dir = Path(options["run_dir"])
    config = from_dict(_json(run_dir, "config.json")["config"], overrides)  # refuses unknown arguments
    binary_only(config.tasks, "train.commands.segments")
    predictions = _read(Path(options["predictions"] or run_dir))
    rates = _json(run_dir, "results.json")["label_rates"]
    others = _read(Path(options["against"])) if options["against"] else None
    if others is not None:
        _check_same(predictions, others, options["against"])
    columns = [name for name in options["by"].split(",") if name]
    found = [("", ("", np.ones(len(predictions["row"]), bool)))]
    if columns:
        found += segments(config, columns, predictions, int(options["most"]))
    records: list[dict[str, Any]] = []
    for column, (value, mask) in found:
        if mask.any():
            chosen = {name: each[mask] for name, each in predictions.items()}
            records.append({"column": column, "value": value, "metrics": metrics(chosen, rates)})
            if others is not None:
                theirs = {name: each[mask] for name, each in others.items()}
                records[-1]["gaps"] = gaps(chosen, theirs, rates, int(options["resamples"]))
    for kind in ("metrics", "gaps") if others is not None else ("metrics",):
        named = {f"{each['column']}={each['value']}" if each["value"] else "all": each[kind] for each in records}
        print(format_table(named, "segment"), end="\n\n")
    out = Path(options["out"] or Path(options["predictions"] or run_dir) / "segments.json")
    write_json(out, records)
    print(f"segments: {out}")
    return records


def _json(run_dir: Path, name: str) -> dict[str, Any]:
    try:
        return json.loads((run_dir / name).read_text())
    except OSError as error:
        raise ValueError(f"{run_dir} is no finished run ({error}); name one, e.g. run_dir=runs/first") from error


def _read(path: Path) -> dict[str, np.ndarray]:
    """Predictions of a run's test split, or those that a folder of `train.evaluate` holds."""
    for folder in (path / "predictions" / "test", path / "predictions", path):
        if list(folder.glob("part-*.parquet")):
            return read_predictions(folder)
    raise ValueError(f"{path} holds no predictions; name a finished run, or the folder that train.evaluate wrote")


def _check_same(predictions: Columns, others: Columns, name: str) -> None:
    """ValueError unless both have the same rows and labels."""
    for column in ("row", *(f"{task}_label" for task in tasks_of(predictions))):
        if not np.array_equal(predictions[column], others.get(column, np.zeros(0)), equal_nan=column != "row"):
            raise ValueError(
                f"against={name} was tested on other rows, tasks or labels: {column} differs; evaluate both runs on "
                "the same files with train.evaluate, and name the folders by predictions= and against="
            )


if __name__ == "__main__":
    errors.run(main)
