"""Any table of labelled events, described by `train.config.schema.EventsConfig`: a new dataset is a YAML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from modules.batch import FeatureSpec
from train.config.schema import EventsConfig
from train.data.events import streamed
from train.data.events.check import check, check_once, check_splits, earlier_mapping
from train.data.events.dense import Numbers, dense
from train.data.events.late import final, newest
from train.data.events.names import feature_spec, max_candidates
from train.data.events.read import (
    files_by_split,
    held_out,
    histories,
    labelled_rows,
    log_files,
    read_columns,
    read_log,
    row_files,
)
from train.data.events.shared import FirstRows, order_by_vendor
from train.data.features import mapping
from train.data.prepare import Dense, write
from train.data.requests import SPLITS, Requests, group_requests, rounded, vendor_runs
from train.data.statistics.compute import Statistics, settled
from train.data.storage import store
from train.data.storage.files import locate
from train.data.storage.find import find_files
from train.data.storage.rows import Rows
from train.data.vector_tables import VectorFiles

__all__ = ["cache_folder", "feature_spec", "prepare", "read_rows"]


def cache_folder(config: EventsConfig) -> Path:
    """Where these events are prepared."""
    others = [join.files for join in config.joins] + [history.files for history in config.histories.values()]
    others += [vectors.files for vectors in config.table_vectors.values()]
    sets = (*files_by_split(config), *(find_files(each, config.root) for each in others))
    found = [file for files in sets for file in files]
    known = mapping.files(Path(config.vocabulary_of)) if config.vocabulary_of else []
    known += sorted(Path(config.vocabulary_of).glob(f"{mapping.COUNTERS}/*")) if config.vocabulary_of else []
    return store.cache_folder(config, [*found, *known])


def read_rows(config: EventsConfig, wanted: set[str]) -> Rows:
    """These columns of the labelled rows, numbered as `RequestBatch.row`; those of joined tables, too."""
    return row_files(config, wanted).whole()


def prepare(config: EventsConfig, folder: Path) -> None:
    """Write the prepared form of the events into a folder: in memory, or if there are many through the disk."""
    config = settled(config)
    check(config)
    spec = feature_spec(config)
    earlier = earlier_mapping(config, spec)
    check_once([file for files in files_by_split(config) for file in files])
    files = labelled_rows(config)
    vectors = VectorFiles(config, earlier) if config.table_vectors else None
    chunks = files.chunks(config.rows_at_once)
    first, second = next(chunks), next(chunks, None)
    logs = [log_files(config, history) for history in config.histories.values() if history.files]
    mapping.keep_columns(folder, set().union(*(each.columns for each in (files, *logs))))
    counts = [log.count() for log in logs]
    if second is None and max(counts, default=0) <= config.rows_at_once:
        _prepare_whole(config, folder, spec, earlier, vectors, first)
        return
    begun = iter([first] if second is None else [first, second])
    del first, second  # which are freed one after the other
    streamed.prepare(config, folder, spec, earlier, vectors, max(files.count(), *counts, 0), chain(begun, chunks))


def _prepare_whole(
    config: EventsConfig,
    folder: Path,
    spec: FeatureSpec,
    earlier: mapping.Mapping | None,
    vectors: VectorFiles | None,
    rows: Rows,
) -> None:
    columns = read_columns(config, rows)
    rows.report(config.max_skipped)
    logs = {}
    for name, history in config.histories.items():
        if history.files:
            log = log_files(config, history).whole()
            logs[name] = read_log(config, history, log, columns.user.values)
            log.report(config.max_skipped)
    check_splits(config, np.bincount(columns.split[columns.good] + 1, minlength=len(SPLITS) + 1).tolist())
    requests = group_requests(
        np.flatnonzero(columns.good),
        columns.user.codes,
        columns.time,
        request=columns.request.codes if columns.request else None,
        split_of=columns.split,
        window=config.request_window,
        max_candidates=max_candidates(config),
        split=config.split,
        held_out=held_out(config),
        train_requests=config.train_requests,
    )
    if max_candidates(config) is None:
        spec = replace(spec, max_candidates=rounded(int(np.diff(requests.offsets).max(initial=1))))
    order = order_by_vendor(config, columns, requests.order, requests.offsets, partial(_locate, rows))
    requests, vendors = replace(requests, order=order), None
    firsts = FirstRows(config)
    firsts.add(columns, requests.order, requests.offsets)
    firsts.report()
    columns.numeric |= Statistics(config, folder).whole(columns, requests)
    if columns.vendor is not None:
        vendors = vendor_runs(columns.vendor.codes[order], np.diff(requests.offsets))
    write(
        folder,
        config,
        spec,
        rows.table,
        requests,
        user=columns.user.codes,
        time=columns.time,
        columns=columns.sparse,
        labels=final(config, columns, newest(columns)),
        weights=columns.weights,
        dense=_dense(config, spec, columns.dense, requests, vendors, earlier.numeric if earlier else {}),
        histories=histories(config, columns, logs, requests),
        vendors=vendors,
        earlier=earlier,
        new_ids=config.new_ids,
        real_labels=config.real_labels,
        vectors=vectors,
    )


def _dense(
    config: EventsConfig,
    spec: FeatureSpec,
    columns: Mapping[str, np.ndarray],
    requests: Requests,
    vendors: tuple[np.ndarray, np.ndarray] | None,
    earlier: Mapping[str, dict[str, float]],
) -> Dense:
    def of(chosen: np.ndarray) -> dict[str, np.ndarray]:
        return {name: values[chosen] for name, values in columns.items()}

    numbers = Numbers(config)
    numbers.train(of(requests.rows("train")))
    statistics = numbers.statistics(earlier)
    first, order = requests.first, requests.order
    request = dense(config, spec.request_dense, of(first), len(first), statistics, spec.request_vectors)
    candidate = dense(config, spec.candidate_dense, of(order), len(order), statistics, spec.candidate_vectors)
    vendor = np.zeros((0, 0), np.float32)
    if vendors is not None:
        begins = order[np.cumsum(vendors[1]) - vendors[1]]
        vendor = dense(config, spec.vendor_dense, of(begins), len(begins), statistics, spec.vendor_vectors)
    return Dense(request, candidate, statistics, vendor, numbers.missing())


def _locate(rows: Rows, number: int) -> str:
    return locate(rows.table.files, rows.table.first_row, number)
