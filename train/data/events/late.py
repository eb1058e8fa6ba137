"""Labels that are known some time after their row: which of them are not known yet when the files end."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from train.config.schema import EventsConfig
from train.data.events.read import Columns
from train.data.features.columns import read_milliseconds, time_format_of


def check_late(config: EventsConfig) -> None:
    """What keys of late labels must fulfil before any row is read."""
    for key, named in (("known_at", {*config.known_at}), ("matures_after", {*config.matures_after})):
        if stray := sorted(named - set(config.labels)):
            raise ValueError(f"data.{key} names {stray[0]!r}, which is no task; there are {sorted(config.labels)}")
        if named and not config.time:
            raise ValueError(f"data.{key} compares times: data.time must name the time column of the rows")
    if config.as_of is not None:
        as_of(config)
    for name, history in config.histories.items():
        if history.known_at and history.lists:
            raise ValueError(f"data.histories.{name}.known_at dates rows and logs; the column of lists is `times`")


def newest(columns: Columns) -> int:
    """Milliseconds of the last time in good rows, of theirs and of those from which labels and events are known."""
    return max(int(times[columns.good].max(initial=0)) for times in (columns.time, *columns.known.values()))


def final(config: EventsConfig, columns: Columns, last: int) -> np.ndarray:
    """[N, tasks] labels, NaN where they are not known or final at `data.as_of`, or at the newest time `last` of all
    rows (milliseconds)."""
    until, labels = last if config.as_of is None else as_of(config), columns.labels.copy()
    for task, name in enumerate(config.labels):
        if name in config.known_at:
            labels[columns.known[config.known_at[name]] > until, task] = np.nan
        if name in config.matures_after:
            labels[columns.time + 1000 * config.matures_after[name] > until, task] = np.nan
    return labels


def as_of(config: EventsConfig) -> int:
    """Milliseconds. ValueError for a `data.as_of` that is no time."""
    text = str(config.as_of)
    column = pa.chunked_array([[text]], pa.string())
    for form in (config.time_format, time_format_of(text)):
        if form is not None:
            times, bad = read_milliseconds(column, form)
            if not bad[0]:
                return int(times[0])
    raise ValueError(
        f"data.as_of={text!r} must be a time as data.time_format={config.time_format} says or a date, e.g. 2026-03-01"
    )
