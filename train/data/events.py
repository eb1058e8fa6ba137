"""Any table of labelled events, described by `train.config.schema.EventsConfig`: a new dataset is a YAML file."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from modules.batch import EventType, FeatureSpec, SparseFeature
from train.config.schema import EventsConfig, HistoryConfig
from train.data import mapping, store
from train.data.columns import NUMBER, Coded, CodedLists, coded_integers
from train.data.files import Layout, find_files
from train.data.histories import History, from_lists, from_log, from_rows
from train.data.numeric import AS_IT_IS, INDICATOR, before_scaling, matching, numeric_features
from train.data.prepare import Dense, standardise, write
from train.data.requests import SPLITS, Requests, group_requests
from train.data.rows import Join, Rows, comparison


def cache_folder(config: EventsConfig) -> Path:
    """Where these events are prepared."""
    others = [join.files for join in config.joins] + [history.files for history in config.histories.values()]
    found = [file for files in (*_parts(config), *(find_files(each, config.root) for each in others)) for file in files]
    return store.cache_folder(
        config, found + (mapping.files(Path(config.vocabulary_of)) if config.vocabulary_of else [])
    )


def prepare(config: EventsConfig, folder: Path) -> None:
    """Write the prepared form of the events into a folder."""
    _check(config)
    spec = feature_spec(config)
    earlier = _earlier(config, spec)
    parts = _parts(config)
    _check_once([file for files in parts for file in files])
    rows, joins = read_rows(config, _wanted(config)), _joins(config)

    user = rows.required_ids(config.user) if config.user else coded_integers(np.arange(len(rows)))
    time = rows.milliseconds(config.time, config.time_format) if config.time else np.arange(len(rows)) * 1000
    request = rows.required_ids(config.request).codes if config.request else None
    labels = np.stack([rows.labels(column, task in config.real_labels) for task, column in config.labels.items()], 1)
    weights = rows.weights(config.weight) if config.weight else None
    numeric = {name: rows.features(name, name in config.log_numeric) for name in _numeric(config)}
    columns: dict[str, Coded | CodedLists] = {name: rows.ids(name) for name in _categorical(config)}
    columns |= {
        name: rows.lists(name, config.list_separator) for name in (*config.request_list, *config.candidate_list)
    }
    builders = {name: _history(config, joins, rows, user, time, history) for name, history in config.histories.items()}
    rows.report(config.max_skipped)

    requests = group_requests(
        np.flatnonzero(~rows.bad),
        user.codes,
        time,
        request=request,
        part=_part(rows, [len(files) for files in parts]),
        window=config.request_window,
        max_candidates=_max_candidates(config),
        split=config.split,
        split_by=config.split_by,
        train_requests=config.train_requests,
    )
    write(
        folder,
        config,
        spec,
        rows.table,
        requests,
        user=user.codes,
        time=time,
        columns=columns,
        labels=labels,
        weights=weights,
        dense=_dense(config, spec, numeric, requests, earlier.numeric if earlier else {}),
        histories={name: build(requests) for name, build in builders.items()},
        earlier=earlier,
        new_ids=config.new_ids,
        real_labels=config.real_labels,
    )


def read_rows(config: EventsConfig, wanted: set[str]) -> Rows:
    """These columns of the labelled rows, numbered as `RequestBatch.row`; those of joined tables, too."""
    files = [file for files in _parts(config) for file in files]
    layout = Layout(config.csv_separator, tuple(config.column_names))
    return Rows(files, wanted, layout, config.bad_rows, _joins(config), matching(_numbers(config), config.missing_nan))


def _parts(config: EventsConfig) -> list[list[Path]]:
    """Files of labelled rows: those that time splits, then those of validation and test."""
    return [find_files(files, config.root) for files in (config.files, config.valid_files, config.test_files)]


def _joins(config: EventsConfig) -> list[Join]:
    headed = Layout(config.csv_separator)  # column_names are those of the labelled rows
    return [
        Join(find_files(join.files, config.root), join.key or join.column, join.column, headed) for join in config.joins
    ]


def feature_spec(config: EventsConfig) -> FeatureSpec:
    """The features that the configuration names; table sizes are not known yet."""

    def features(names: list[str], is_list: bool = False) -> tuple[SparseFeature, ...]:
        return tuple(SparseFeature(name, config.tables.get(name, name), is_list) for name in names)

    request = features(config.request_categorical) + features(config.request_list, True)
    candidate = features(config.candidate_categorical) + features(config.candidate_list, True)
    histories = tuple(EventType(name, features(h.fields), config.max_history) for name, h in config.histories.items())
    used = [feature.table for feature in (*request, *candidate, *(f for event in histories for f in event.fields))]
    return FeatureSpec(
        tables=dict.fromkeys(used, 0),
        request=request,
        candidate=candidate,
        histories=histories,
        request_dense=numeric_features(config.request_numeric, config.missing_indicator),
        candidate_dense=numeric_features(config.candidate_numeric, config.missing_indicator),
        tasks=tuple(config.labels),
        max_candidates=_max_candidates(config),
    )


def _earlier(config: EventsConfig, spec: FeatureSpec) -> mapping.Mapping | None:
    """The mapping of `data.vocabulary_of`. Raises ValueError when it is not for these tables."""
    if not config.vocabulary_of:
        if not config.new_ids:
            raise ValueError("data.new_ids=false knows no id at all without data.vocabulary_of, e.g. runs/first")
        return None
    earlier = mapping.read(Path(config.vocabulary_of))
    if absent := sorted(set(spec.tables) ^ set(earlier.sizes)):
        raise ValueError(
            f"data.vocabulary_of={earlier.path} has the tables {sorted(earlier.sizes)}, this configuration "
            f"{sorted(spec.tables)}: {', '.join(absent)} would have no weights to go on with; use its features"
        )
    fills = {name: used["fill"] for name, used in earlier.numeric.items() if "fill" in used}
    if fills != config.missing_fill:
        raise ValueError(
            f"data.vocabulary_of={earlier.path} filled in missing numbers by {fills}, this configuration by "
            f"{config.missing_fill}; give data.missing_fill the former"
        )
    hashed = sorted(set(earlier.sizes.values())) if earlier.ids is None else []
    if hashed != ([config.hash_rows] if config.id_map == "hash" else []):
        theirs = f"data.id_map=hash data.hash_rows={hashed[0]}" if hashed else "data.id_map=vocabulary"
        raise ValueError(f"data.vocabulary_of={earlier.path} gives ids other rows than this run; use {theirs}")
    if earlier.oov_rows != config.oov_rows:
        raise ValueError(
            f"data.vocabulary_of={earlier.path} has other rows for unknown ids than data.oov_rows={config.oov_rows}; "
            f"use data.oov_rows={earlier.oov_rows}"
        )
    return earlier


def _check(config: EventsConfig) -> None:
    if not config.files:
        raise ValueError("data.files is empty; name the files of labelled rows, e.g. data.files=[log.parquet]")
    for name, history in config.histories.items():
        key = f"data.histories.{name}"
        if not history.fields:
            raise ValueError(f"{key}.fields is empty; name at least one column, e.g. [item_id]")
        if history.lists and (history.where or history.files):
            raise ValueError(f"{key}.lists reads lists of the row itself; where and files go with lists=false")
        if history.times and not config.time:
            raise ValueError(f"{key}.times dates events: data.time must name the time column of the rows")
        if history.times and not history.lists:
            raise ValueError(f"{key}.times names a list column and goes with lists=true; a log's time column is `time`")
        if not history.lists and not config.user:
            raise ValueError(f"{key} collects a user's earlier events: data.user must name the user column")
        if history.files and not config.time:
            raise ValueError(f"{key}.files is a log of timed events: data.time must name the time column of the rows")
    if config.split_by == "last" and (not config.user or not config.time or config.valid_files or config.test_files):
        raise ValueError(
            "data.split_by=last holds out each user's last requests: data.user and data.time must name their columns, "
            "and data.valid_files and data.test_files must be empty"
        )
    if config.train_requests == "last" and config.split_by != "last":
        raise ValueError("data.train_requests=last goes with data.split_by=last, which holds out each user's last ones")
    if config.request and not config.user:
        raise ValueError(
            f"data.request={config.request} groups rows of one user: data.user must name the user column; without "
            f"users, let each request be one, data.user={config.request}"
        )
    formats = {f"data.histories.{name}.time_format": history.time_format for name, history in config.histories.items()}
    for key, time_format in {"data.time_format": config.time_format, **formats}.items():
        if time_format not in (None, "s", "ms") and "%" not in time_format:
            raise ValueError(f"{key}={time_format!r} must be s, ms or a strptime pattern, e.g. '%Y-%m-%d'")
    for task, text in config.labels.items():
        column, sign, value = comparison(text)
        wrong = not value if sign == "==" else sign and not re.match(NUMBER, value)
        if wrong or any(other in column for other in "<>="):
            raise ValueError(
                f"data.labels.{task}={text!r} must name a column of 0 and 1, or compare one as COLUMN >= NUMBER or "
                "COLUMN == ID, e.g. 'rating >= 4' or 'event == buy'"
            )
        if column in (*_features(config), *_numeric(config)):
            raise ValueError(
                f"data.labels.{task} is read from column {column!r}, which is a feature too: the model would be told "
                "the answer; let only fields of histories have it, whose events are earlier ones"
            )
    used = {*_features(config), *(name for history in config.histories.values() for name in history.fields)}
    if not used:
        raise ValueError("no column of ids is named, which tables are for; e.g. data.candidate_categorical=[item_id]")
    numeric, numbers = set(_numeric(config)), set(_numbers(config))
    for key, stray, there in (
        ("tables", set(config.tables) - used, used),
        ("real_labels", set(config.real_labels) - set(config.labels), set(config.labels)),
        ("log_numeric", set(config.log_numeric) - numeric, numeric),
        ("missing_fill", set(config.missing_fill) - numeric, numeric),
        ("missing_indicator", {glob for glob in config.missing_indicator if not matching(numeric, [glob])}, numeric),
        ("missing_nan", {glob for glob in config.missing_nan if not matching(numbers, [glob])}, numbers),
    ):
        if stray:
            raise ValueError(
                f"data.{key} names {sorted(stray)}, which is no such feature or field of this configuration; there are "
                f"{sorted(there)}"
            )
    for name, fill in config.missing_fill.items():
        if not math.isfinite(fill):
            raise ValueError(f"data.missing_fill.{name}={fill} must be a finite number, e.g. 0")
    if taken := sorted({name + INDICATOR for name in numeric} & numeric):
        raise ValueError(f"column {taken[0]!r} has the name of an indicator of data.missing_indicator; rename it")


def _check_once(files: list[Path]) -> None:
    (again, count), *_ = Counter(file.resolve() for file in files).most_common(1)
    if count > 1:
        raise ValueError(
            f"data.files, data.valid_files and data.test_files name {again} twice, so its rows would count twice or be "
            "trained on and tested; let the globs and folders of each leave out the files of the others"
        )


def _max_candidates(config: EventsConfig) -> int:
    """Rows without a time or a request id cannot be told to belong together."""
    return config.max_candidates if config.time or config.request else 1


def _numeric(config: EventsConfig) -> list[str]:
    return [*config.request_numeric, *config.candidate_numeric]


def _numbers(config: EventsConfig) -> list[str]:
    """Every column of numbers: features, labels that are not compared with an id, and the weight."""
    labels = [comparison(text) for text in config.labels.values()]
    return [
        *_numeric(config),
        *(column for column, sign, _ in labels if sign != "=="),
        *([config.weight] if config.weight else []),
    ]


def _features(config: EventsConfig) -> list[str]:
    """Columns of ids that are features themselves."""
    return [*config.request_categorical, *config.request_list, *config.candidate_categorical, *config.candidate_list]


def _categorical(config: EventsConfig) -> list[str]:
    own = [history for history in config.histories.values() if not (history.lists or history.files)]
    fields = [name for history in own for name in history.fields]
    return list(dict.fromkeys([*config.request_categorical, *config.candidate_categorical, *fields]))


def _wanted(config: EventsConfig) -> set[str]:
    """Every column that the configuration names."""
    names = {*_categorical(config), *config.request_list, *config.candidate_list, *_numeric(config)}
    names |= {comparison(text)[0] for text in config.labels.values()}
    names |= {name for name in (config.weight, config.user, config.time, config.request) if name}
    for history in config.histories.values():
        if history.lists:
            names |= {*history.fields, *([history.times] if history.times else [])}
        elif not history.files:
            names |= set(history.where)
    return names


def _part(rows: Rows, file_counts: list[int]) -> np.ndarray:
    """[N] index of the split that a row's file decides, -1 where time does."""
    train, valid, test = file_counts
    part_of_file = np.repeat([-1, SPLITS.index("valid"), SPLITS.index("test")], [train, valid, test])
    if valid and test:
        part_of_file[:train] = SPLITS.index("train")
    return part_of_file[np.searchsorted(rows.table.first_row, rows.table.number, side="right") - 1]


def _dense(
    config: EventsConfig,
    spec: FeatureSpec,
    numeric: Mapping[str, np.ndarray],
    requests: Requests,
    earlier: Mapping[str, dict[str, float]],
) -> Dense:
    scaled, statistics, missing = {}, {}, {}
    training = requests.rows("train")
    for name, values in numeric.items():
        fill = config.missing_fill.get(name)
        numbers = before_scaling(values, fill, name in config.log_numeric)
        scaled[name], statistics[name] = standardise(numbers, training, earlier.get(name))
        if fill is not None:
            statistics[name] = statistics[name] | {"fill": fill}
        missing[name] = float(np.isnan(values[training]).sum() / max(len(training), 1))
    for name in matching(numeric, config.missing_indicator):
        scaled[name + INDICATOR] = np.isnan(numeric[name]).astype(np.float32)
        statistics[name + INDICATOR] = AS_IT_IS

    def stack(names: Sequence[str], rows: np.ndarray) -> np.ndarray:
        return np.stack([scaled[name][rows] for name in names], 1) if names else np.zeros((len(rows), 0), np.float32)

    request, candidate = stack(spec.request_dense, requests.first), stack(spec.candidate_dense, requests.order)
    return Dense(request, candidate, statistics, missing)


def _history(
    config: EventsConfig, joins: list[Join], rows: Rows, user: Coded, time: np.ndarray, history: HistoryConfig
) -> Callable[[Requests], History]:
    """Read the columns of an event type and flag what is wrong in them; the rest needs to know the requests."""
    if history.lists:
        return _list_history(config, rows, time, history)
    if history.files:
        return _log_history(config, joins, user, time, history)
    chosen = _where(rows, history)
    return lambda requests: from_rows(np.flatnonzero(chosen & ~rows.bad), user.codes, time, requests)


def _where(rows: Rows, history: HistoryConfig) -> np.ndarray:
    """[N] bool: rows that meet every condition."""
    chosen = np.ones(len(rows), bool)
    for name, accepted in history.where.items():
        values = accepted if isinstance(accepted, list) else [accepted]
        chosen &= rows.ids(name).having(values, f"where: {{{name}: {accepted}}}")
    return chosen


def _log_history(
    config: EventsConfig, joins: list[Join], user: Coded, time: np.ndarray, history: HistoryConfig
) -> Callable[[Requests], History]:
    assert config.user
    assert config.time
    user_column, time_column = history.user or config.user, history.time or config.time
    wanted = {*history.fields, *history.where, user_column, time_column}
    log = Rows(find_files(history.files, config.root), wanted, Layout(config.csv_separator), config.bad_rows, joins)
    log_user = log.required_ids(user_column)
    log_time = log.milliseconds(time_column, history.time_format or config.time_format)
    log.report(config.max_skipped)
    events = np.flatnonzero(_where(log, history) & ~log.bad)
    owner = log_user.recode(user.values)
    fields = {name: log.ids(name) for name in history.fields}
    return lambda requests: from_log(events, owner, log_time, fields, user.codes, time, requests)


def _list_history(
    config: EventsConfig, rows: Rows, time: np.ndarray, history: HistoryConfig
) -> Callable[[Requests], History]:
    lists = {name: rows.lists(name, config.list_separator) for name in history.fields}
    lengths = np.diff(lists[history.fields[0]].offsets)
    aligned = (
        f"expected as many items as {history.fields[0]!r}; columns that are not aligned are event types of their own"
    )
    for name, other in lists.items():
        rows.flag(np.diff(other.offsets) != lengths, name, aligned)
    times = None
    if history.times:
        times = rows.time_lists(history.times, config.list_separator, history.time_format or config.time_format)
        values, offsets = times
        rows.flag(np.diff(offsets) != lengths, history.times, aligned)
        late = values // 1000 >= np.repeat(time // 1000, np.diff(offsets))
        rows.flag(rows.owners(late, offsets), history.times, "expected times before the row's own", drop=False)
    return lambda requests: from_lists(lists, times, time, requests)
