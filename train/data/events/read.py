"""Columns of labelled rows and of logs, as a description names them, and the histories that they make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from train.config.schema import EventsConfig, HistoryConfig
from train.data.events.names import categorical, known_at, known_columns, lists, numbers, numeric, vectors, wanted
from train.data.features.columns import Coded, CodedLists
from train.data.features.numeric import matching
from train.data.features.transforms import Transforms
from train.data.histories import History, from_lists, from_log, from_rows
from train.data.requests import SPLITS, Requests
from train.data.storage.files import Layout
from train.data.storage.find import find_files
from train.data.storage.remote import DataFile
from train.data.storage.rows import Join, RowFiles, Rows

Times = tuple[np.ndarray, np.ndarray]
"""(milliseconds of all items one after another, offsets [N + 1])."""


@dataclass
class Columns:
    """What is read of N labelled rows; of those that are not `good` some values are missing."""

    number: np.ndarray  # [N] int64: `RequestBatch.row`
    user: Coded
    time: np.ndarray  # [N] int64 milliseconds
    request: Coded | None
    vendor: Coded | None
    split: np.ndarray  # [N] index of the split that a row's file decides, -1 where time does
    labels: np.ndarray  # [N, tasks] float64
    weights: np.ndarray | None  # [N] float64
    numeric: dict[str, np.ndarray]  # [N] float64, NaN for missing
    vectors: dict[str, np.ndarray]  # [N, width] float32, NaN in all of a missing one
    ids: dict[str, Coded]
    lists: dict[str, CodedLists]
    chosen: dict[str, np.ndarray]  # event type -> [N] bool: rows that are its events
    fields: dict[str, dict[str, CodedLists]]  # event type -> its lists by field
    times: dict[str, Times]  # event type -> times of the items of its lists
    good: np.ndarray  # [N] bool
    known: dict[str, np.ndarray] = field(default_factory=dict)  # column -> [N] int64 milliseconds, NEVER where missing

    @property
    def sparse(self) -> dict[str, Coded | CodedLists]:
        """Every feature, and every field of events that are rows."""
        return {**self.ids, **self.lists}

    @property
    def dense(self) -> dict[str, np.ndarray]:
        """Numbers [N] and vectors [N, width] by column."""
        return {**self.numeric, **self.vectors}


@dataclass
class Log:
    """Entries of another table, E in all."""

    owner: np.ndarray  # [E] code of the user among those of the labelled rows, or -1
    time: np.ndarray  # [E] int64 milliseconds
    fields: dict[str, Coded]
    events: np.ndarray  # those that count


def files_by_split(config: EventsConfig) -> list[list[DataFile]]:
    """Files of labelled rows: those that time splits, then those of validation and test."""
    return [find_files(files, config.root) for files in (config.files, config.valid_files, config.test_files)]


def held_out(config: EventsConfig) -> list[int] | None:
    """Of `group_requests`: the splits that have a share and no files of their own; None if time decides."""
    if config.split_by == "time":
        return None
    files = {"valid": config.valid_files, "test": config.test_files}
    shares = dict(zip(SPLITS, config.split, strict=True))
    return [SPLITS.index(name) for name in ("test", "valid") if shares[name] > 0 and not files[name]]


def row_files(config: EventsConfig, columns: set[str]) -> RowFiles:
    """These columns of the labelled rows, numbered as `RequestBatch.row`; those of joined tables, too."""
    files = [file for files in files_by_split(config) for file in files]
    layout = Layout(config.csv_separator, tuple(config.column_names), quoted=config.csv_quotes)
    missing = matching(numbers(config), config.missing_nan)
    transforms = Transforms(config.transforms)
    return RowFiles(files, columns, layout, config.bad_rows, _joins(config), missing, transforms)


def labelled_rows(config: EventsConfig) -> RowFiles:
    return row_files(config, wanted(config))


def _joins(config: EventsConfig) -> list[Join]:
    headed = Layout(config.csv_separator, quoted=config.csv_quotes)  # column_names are those of the labelled rows
    return [
        Join(find_files(join.files, config.root), join.key or join.column, join.column, headed) for join in config.joins
    ]


def read_columns(config: EventsConfig, rows: Rows, first: int = 0) -> Columns:
    """`first`: how many rows came before these."""
    count = first + np.arange(len(rows))
    user = rows.required_ids(config.user) if config.user else Coded(count.astype(np.int32), pa.array([], pa.string()))
    time = rows.milliseconds(config.time, config.time_format) if config.time else count * 1000
    request = rows.required_ids(config.request) if config.request else None
    vendor = rows.required_ids(config.vendor) if config.vendor else None
    labels = np.stack([rows.labels(column, task in config.real_labels) for task, column in config.labels.items()], 1)
    weights = rows.weights(config.weight) if config.weight else None
    values = {name: rows.features(name, name in config.log_numeric) for name in numeric(config)}
    vectors_of = {name: rows.vectors(name, each.width, config.list_separator) for name, each in vectors(config).items()}
    ids = {name: rows.ids(name) for name in categorical(config)}
    listed = {name: rows.lists(name, config.list_separator) for name in lists(config)}
    fields, times = {}, {}
    for name, history in config.histories.items():
        if history.lists:
            read = {field: rows.lists(field, config.list_separator) for field in history.fields}
            lengths = np.max([np.diff(each.offsets) for each in read.values()], axis=0)
            fields[name] = {field: each.padded(lengths) for field, each in read.items()}
            dated = _times(config, rows, time, history, fields[name])
            if dated:
                times[name] = dated
    own = {name: history for name, history in config.histories.items() if not (history.lists or history.files)}
    chosen = {name: _where(rows, history) for name, history in own.items()}
    known = {name: rows.known(name, config.time_format) for name in known_columns(config)}
    rows.finish()
    counts = [len(files) for files in files_by_split(config)]
    return Columns(
        number=rows.table.number,
        user=user,
        time=time,
        request=request,
        vendor=vendor,
        split=_split_of(rows, counts),
        labels=labels,
        weights=weights,
        numeric=values,
        vectors=vectors_of,
        ids=ids,
        lists=listed,
        chosen=chosen,
        fields=fields,
        times=times,
        good=~rows.bad,
        known=known,
    )


def log_files(config: EventsConfig, history: HistoryConfig, columns: set[str] | None = None) -> RowFiles:
    """The files of a log: the columns that its events are of, or others, and those that choose and date them."""
    user, time = _log_columns(config, history)
    files, layout = find_files(history.files, config.root), Layout(config.csv_separator, quoted=config.csv_quotes)
    wanted_there = {*(columns or {*history.fields, user}), *history.where, time} | {history.known_at or time}
    missing = matching(numbers(config), config.missing_nan)
    transforms = Transforms(config.transforms)
    return RowFiles(files, wanted_there, layout, config.bad_rows, _joins(config), missing, transforms)


def read_log(config: EventsConfig, history: HistoryConfig, log: Rows, users: pa.StringArray) -> Log:
    """`users`: those of the labelled rows, in the order of their codes."""
    log_user = log.required_ids(_log_columns(config, history)[0])
    log_time = log_times(config, history, log)
    chosen = _where(log, history)
    fields = {name: log.ids(name) for name in history.fields}
    log.finish()
    return Log(log_user.recode(users), log_time, fields, np.flatnonzero(chosen & ~log.bad))


def log_times(config: EventsConfig, history: HistoryConfig, log: Rows) -> np.ndarray:
    """[E] int64 milliseconds from which the entries of a log are known."""
    form = history.time_format or config.time_format
    time = log.milliseconds(_log_columns(config, history)[1], form)
    return np.maximum(time, log.known(history.known_at, form)) if history.known_at else time


def histories(
    config: EventsConfig, columns: Columns, logs: Mapping[str, Log], requests: Requests
) -> dict[str, History]:
    """By event type, those of `requests`, whose rows are numbered as in `columns`."""
    user, time, made = columns.user.codes, columns.time, {}
    for name in config.histories:
        if name in columns.fields:
            made[name] = from_lists(columns.fields[name], columns.times.get(name), time, requests)
        elif name in logs:
            log = logs[name]
            made[name] = from_log(log.events, log.owner, log.time, log.fields, user, time, requests)
        else:
            known = known_at(config, config.histories[name])
            events = np.flatnonzero(columns.chosen[name] & columns.good)
            made[name] = from_rows(events, user, time, requests, columns.known[known] if known else None)
    return made


def _log_columns(config: EventsConfig, history: HistoryConfig) -> tuple[str, str]:
    assert config.user
    assert config.time
    return history.user or config.user, history.time or config.time


def _split_of(rows: Rows, file_counts: list[int]) -> np.ndarray:
    """[N] index of the split that a row's file decides, -1 where time does."""
    train, valid, test = file_counts
    split_of_file = np.repeat([-1, SPLITS.index("valid"), SPLITS.index("test")], [train, valid, test])
    if valid and test:
        split_of_file[:train] = SPLITS.index("train")
    return split_of_file[np.searchsorted(rows.table.first_row, rows.table.number, side="right") - 1]


def _where(rows: Rows, history: HistoryConfig) -> np.ndarray:
    """[N] bool: rows that meet every condition."""
    chosen = np.ones(len(rows), bool)
    for name, accepted in history.where.items():
        values = accepted if isinstance(accepted, list) else [accepted]
        chosen &= rows.having(rows.ids(name), values, f"where: {{{name}: {accepted}}}")
    return chosen


def _times(
    config: EventsConfig, rows: Rows, time: np.ndarray, history: HistoryConfig, lists: Mapping[str, CodedLists]
) -> Times | None:
    """Times of the items of an event type's lists, which must be aligned."""
    lengths = np.diff(lists[history.fields[0]].offsets)
    aligned = (
        f"expected as many items as {history.fields[0]!r}; columns that are not aligned are event types of their own"
    )
    for name, other in lists.items():
        rows.flag(np.diff(other.offsets) != lengths, name, aligned)
    if not history.times:
        return None
    values, offsets = rows.time_lists(history.times, config.list_separator, history.time_format or config.time_format)
    rows.flag(np.diff(offsets) != lengths, history.times, aligned)
    late = values // 1000 >= np.repeat(time // 1000, np.diff(offsets))
    rows.flag(rows.owners(late, offsets), history.times, "expected times before the row's own", drop=False)
    return values, offsets
