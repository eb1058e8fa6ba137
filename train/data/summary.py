"""What a source holds, as a table at the start of a run: it shows joins, histories and times that are wrong."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from modules.batch import UNKNOWN_ID, RequestBatch
from train.data.requests import SPLITS
from train.data.source import Source

SAMPLE = 256
"""Requests of a split, evenly spread, whose features are looked at."""
DECADE = 10 * 365 * 86_400


def summarise(source: Source, dated: bool = True) -> tuple[str, str]:
    """Two tables: requests and times of each split with label rates, and features without any known value; how much of
    a feature is known in the first and the last split.

    `dated` false: the source has no times, and none are printed. An id is known if it has a row of its own, a number if
    it is not the mean, which missing numbers become.
    """
    counts = {split: source.num_requests(split) for split in SPLITS if source.num_requests(split)}
    samples = {split: source.batch(split, _spread(count)) for split, count in counts.items()}
    lines = [f"{'split':<5} {'requests':>13}" + (f"  {'first (UTC)':<19}  last" if dated else "  (without a time)")]
    for split, batch in samples.items():
        first, last = (np.datetime64(int(time), "s") for time in batch.request_time[[0, -1]])
        lines.append(f"{split:<5} {counts[split]:>13,}" + (f"  {first!s:<19}  {last}" if dated else ""))
        told = "in the future" if last > np.datetime64("now") + np.timedelta64(1, "D") else ""
        if np.datetime64(10**6, "s") < last < np.datetime64("1971"):
            told = "in 1970"  # as seconds are that are read as milliseconds
        if dated and told:
            lines[-1] += f"  {told}: is data.time_format right?"
    rates = ", ".join(f"{task} {rate:.4g}" for task, rate in source.label_rates().items())
    lines.append(f"positive training labels: {rates}")
    lacking = {name: f"{name} {100 * share:.3g} %" for name, share in source.missing().items() if share}
    for kind, names in (("label", source.spec.tasks), ("number", tuple(lacking.keys() - {*source.spec.tasks}))):
        if shares := [text for name, text in lacking.items() if name in names]:
            lines.append(f"training rows without a {kind}: {', '.join(shares)}")

    counted = source.statistics()
    if keys := dict.fromkeys(" x ".join(each["by"]) for each in counted.values()):
        lines.append(f"statistics of earlier rows, by {', '.join(keys)} (data.statistics=none: without)")

    if dated and (old := list(_old(next(iter(samples.values()))))):
        told = "all events are more than ten years older than their requests: is their time_format right?"
        lines.append(f"{', '.join(old)}: {told}")
    ends = list(samples)[:: max(1, len(samples) - 1)]
    rows = list(zip(*(_features(source, samples[split]) for split in ends), strict=True))
    if empty := [name for (name, _, _, known), *_ in rows if known in ("none", "0.0%")]:
        lines.append(f"nothing is known in {ends[0]} of: {', '.join(empty)}")
    splits, lines = "\n".join(lines), []

    width = max(len(row[0][0]) for row in rows)
    titles = "".join(f"  {f'known in {split}':>14}" for split in ends)
    lines.append(f"{'feature':<{width}} {'table rows':>12}  {'a request':>9}{titles}")
    for row in rows:
        name, table_rows, length, _ = row[0]
        lines.append(f"{name:<{width}} {table_rows:>12}  {length:>9}" + "".join(f"  {known:>14}" for *_, known in row))
    return splits, "\n".join(lines)


def _old(batch: RequestBatch) -> Iterator[str]:
    """Event types without an event in the ten years before its request: seconds read as milliseconds are in 1970."""
    for name in batch.history_times.keys():
        times = batch.history_times[name]
        ages = batch.request_time.repeat_interleave(times.lengths()) - times.values()
        if ages.numel() and ages.min() > DECADE:
            yield name


def _spread(count: int) -> np.ndarray:
    return np.linspace(0, count - 1, min(count, SAMPLE)).astype(np.int64)


def _features(source: Source, batch: RequestBatch) -> Iterator[tuple[str, str, str, str]]:
    """(name, rows of its table, ids a request, what is known of it) of each feature in a batch."""
    spec, features = source.spec, batch.lookup
    for name, table in spec.lookups():
        ids = features[name]
        length = f"{ids.lengths().double().mean().item():.2f}"
        yield name, f"{spec.tables[table]:,}", length, _share(ids.values() > UNKNOWN_ID + source.oov_rows)
    numbers = [(spec.request_dense, batch.request_dense), (spec.candidate_dense, batch.candidate_dense)]
    if batch.vendors is not None:
        numbers.insert(1, (spec.vendor_dense, batch.vendors.dense))
    for names, values in numbers:
        for name, column in zip(names, values.unbind(1), strict=False):  # vectors are behind the numbers
            yield name, "", "", _share(column != 0)
    of_sides = [(spec.request_vectors, batch.request_dense), (spec.candidate_vectors, batch.candidate_dense)]
    if batch.vendors is not None:
        of_sides.insert(1, (spec.vendor_vectors, batch.vendors.dense))
    for vectors, values in of_sides:
        widths = [vector.width for vector in vectors]
        parts = values[:, values.shape[1] - sum(widths) :].split(widths, 1) if widths else ()
        for vector, part in zip(vectors, parts, strict=True):
            yield vector.name, f"[{vector.width}]", "", _share((part != 0).any(1))


def _share(known: Tensor) -> str:
    return f"{known.double().mean().item():.1%}" if known.numel() else "none"
