"""Preparation of more rows than memory holds, through the disk.

1. Chunks of rows are read, their ids coded, and dealt by user over partitions: files of records.
2. Each partition, which has all rows of its users, forms its requests and histories as `train.data.events.prepare` does
   with all rows, and is written back in the order of its requests.
3. Statistics are computed, see `train.data.statistics.compute`.
4. Partitions are counted: ids, numbers and labels of training rows.
5. Slices of all partitions that are neighbours in time are merged, mapped to rows of tables, scaled and written.

Memory holds `data.rows_at_once` rows, or those of the busiest user, beside the distinct ids of every column. Every row
is read once, and written and read twice more as a record, before it is written in its final form.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from modules.batch import FeatureSpec
from train.config.schema import EventsConfig
from train.data.batch import ranges
from train.data.events.check import check_splits
from train.data.events.dense import Numbers, dense
from train.data.events.late import final, newest
from train.data.events.names import max_candidates
from train.data.events.read import held_out, histories, log_files, read_columns, read_log
from train.data.events.shards import Shards
from train.data.events.shared import FirstRows, order_by_vendor
from train.data.events.spill import Dictionary, Fields, LogFields, Partition, PartitionFiles
from train.data.features import mapping
from train.data.features.columns import Coded
from train.data.features.vocabulary import Occurrences
from train.data.histories import History
from train.data.prepare import Dense, Labels, empty_training, make_ids, save_meta
from train.data.requests import Requests, form_requests, rounded, split_bounds, vendor_runs, warn_of_long
from train.data.statistics.compute import Spilled
from train.data.storage.files import locate
from train.data.storage.rows import Rows
from train.data.storage.writer import Block, VendorBlock, Writer
from train.data.vector_tables import VectorFiles

MOST_PARTS = 1024


def prepare(
    config: EventsConfig,
    folder: Path,
    spec: FeatureSpec,
    earlier: mapping.Mapping | None,
    vectors: VectorFiles | None,
    count: int,
    chunks: Iterator[Rows],
) -> None:
    """`count`: about how many rows the chunks have together."""
    work = folder / "work"
    work.mkdir()
    number = min(-(-count // config.rows_at_once), MOST_PARTS)
    fields = Fields(config)
    dealt = PartitionFiles(work / "rows", fields.record, fields.items)
    last, read, until = None, 0, 0
    for last in chunks:
        chunk = read_columns(config, last, read)
        until = max(until, newest(chunk))
        partition = fields.pack(chunk)
        read += len(last)
        _deal(partition, partition.records["user"], number, dealt)
    assert last is not None
    last.report(config.max_skipped)
    logs = {
        name: _deal_log(config, name, fields, number, work) for name, each in config.histories.items() if each.files
    }
    shards = Shards(work / "shards", number, fields, list(config.histories))
    statistics = Spilled(config, folder, work / "statistics", number)
    place = partial(locate, last.table.files, last.table.first_row)
    most = _form(config, fields, dealt, logs, shards, statistics, until, place)
    statistics.run()
    if max_candidates(config) is None:
        spec = replace(spec, max_candidates=rounded(most))
    fractions = config.split if config.split_by == "time" else None
    splits, free = shards.requests_of_split()
    check_splits(config, splits)
    bounds = split_bounds(splits, free, shards.request_after, fractions)
    counts = _Counts(config, spec, fields, logs)
    train = [shards.positions(end) for end in bounds["train"]]
    for shard in range(number):
        counts.add(shards, statistics, shard, int(train[0][shard]), int(train[1][shard]))
    if not counts.rows:
        raise ValueError(empty_training(config, shards.candidates))
    ids, spec = make_ids(folder, config, spec, counts.occurrences(), earlier, config.new_ids, vectors)
    scales = counts.numbers.statistics(earlier.numeric if earlier else {})
    writer = Writer(folder, spec, ids)
    for run in range(shards.runs):
        writer.add(_block(config, spec, fields, shards, run, statistics, scales))
    for event in spec.histories:
        dictionaries = [counts.dictionary(event.name, field.name) for field in event.fields]
        for shard in range(number):
            codes, times = shards.events(shard, event.name)
            coded = [Coded(codes[:, index], each.values) for index, each in enumerate(dictionaries)]
            writer.events(event, coded, times)
    writer.close()
    none = np.zeros((0, 0), np.float32)
    known = Dense(none, none, scales, missing=counts.numbers.missing())
    save_meta(folder, config, spec, last.table, bounds, ids, counts.labels, known, earlier, config.new_ids, vectors)
    shutil.rmtree(work)


def _deal(partition: Partition, owner: np.ndarray, number: int, files: PartitionFiles) -> None:
    """Append each owner's records to the partition of the owner, in order."""
    whose = (owner % number).astype(np.int16)
    partition = partition.take(np.argsort(whose, kind="stable"))
    ends = np.cumsum(np.bincount(whose, minlength=number))
    item_ends = np.pad(np.cumsum(partition.records["lengths"], 0, dtype=np.int64), ((1, 0), (0, 0)))
    for index, (begin, end) in enumerate(zip(np.append(0, ends[:-1]), ends, strict=True)):
        if begin < end:
            items = [
                values[item_ends[begin, column] : item_ends[end, column]]
                for column, values in enumerate(partition.items)
            ]
            files.append(index, Partition(partition.records[begin:end], items))


def _deal_log(
    config: EventsConfig, name: str, fields: Fields, number: int, work: Path
) -> tuple[LogFields, PartitionFiles]:
    history = config.histories[name]
    log_fields = LogFields(history.fields)
    files = PartitionFiles(work / f"log{list(config.histories).index(name)}", log_fields.record, [])
    rows = None
    for rows in log_files(config, history).chunks(config.rows_at_once):
        partition = log_fields.pack(read_log(config, history, rows, fields.users.values))
        _deal(partition, partition.records["owner"], number, files)
    assert rows is not None
    rows.report(config.max_skipped)
    return log_fields, files


def _form(
    config: EventsConfig,
    fields: Fields,
    dealt: PartitionFiles,
    logs: Mapping[str, tuple[LogFields, PartitionFiles]],
    shards: Shards,
    statistics: Spilled,
    until: int,
    locate: Callable[[int], str],
) -> int:
    """Requests and histories of each partition; returns the candidates of the largest request."""
    sizes, most, firsts = [], 1, FirstRows(config)
    for shard in range(shards.number):
        partition = dealt.read(shard)
        dealt.remove(shard)
        columns = fields.unpack(partition)
        partition.records["labels"] = final(config, columns, until)
        formed = form_requests(
            np.arange(len(partition.records)),
            columns.user.codes,
            columns.time,
            request=columns.request.codes if columns.request else None,
            split_of=columns.split,
            window=config.request_window,
            max_candidates=max_candidates(config),
            held_out=held_out(config),
            train_requests=config.train_requests,
        )
        sizes.append(np.bincount(formed.sizes))
        most = max(most, int(np.diff(formed.offsets).max(initial=1)))
        formed = replace(formed, order=order_by_vendor(config, columns, formed.order, formed.offsets, locate))
        firsts.add(columns, formed.order, formed.offsets)
        requests = Requests(formed.order, formed.offsets, {}, formed.earlier)
        entries = {name: log_fields.unpack(files.read(shard)) for name, (log_fields, files) in logs.items()}
        made = histories(config, columns, entries, requests)
        codes = {}
        for name, history in made.items():
            names = config.histories[name].fields
            each = [
                history.fields[field].codes if history.rows is None else columns.ids[field].codes[history.rows]
                for field in names
            ]
            codes[name] = np.stack(each, 1)
        shards.add(shard, partition, formed, columns, made, codes)
        statistics.add(shard, columns, formed)
    warn_of_long(sizes, max_candidates(config))
    firsts.report()
    return most


class _Counts:
    """What training rows hold."""

    def __init__(
        self,
        config: EventsConfig,
        spec: FeatureSpec,
        fields: Fields,
        logs: Mapping[str, tuple[LogFields, PartitionFiles]],
    ) -> None:
        self._spec, self._fields, self._logs = spec, fields, logs
        self.rows = 0
        self.numbers, self.labels = Numbers(config), Labels(spec, config.real_labels)
        # of ("", column), of ("", list feature) and of (event type, field) where events are not rows
        self._counts: dict[tuple[str, str], np.ndarray] = {}

    def dictionary(self, event: str, field: str) -> Dictionary:
        if event in self._fields.rows:
            return self._fields.dictionaries[field]
        if event in self._logs:
            return self._logs[event][0].dictionaries[field]
        return self._fields.dictionaries[event, field]

    def add(self, shards: Shards, statistics: Spilled, shard: int, first: int, end: int) -> None:
        """The requests first:end of a shard, which train, and rows that are trained on as history only."""
        rows = shards.whole(shard)
        self.labels.see(rows.records["labels"])
        begins = shards.first_rows(shard)
        taken = np.arange(begins[first], begins[end])
        training = rows.take(taken)
        columns = self._fields.unpack(training)
        self.numbers.train(columns.dense | statistics.named(statistics.of(shard, int(begins[first]), int(begins[end]))))
        earlier = self._fields.unpack(shards.earlier(shard))
        self.labels.see(earlier.labels)
        for each in (columns, earlier):
            self.rows += len(each.number)
            self.labels.train(each.labels, each.weights)
            for name, column in each.sparse.items():
                self._add("", name, column.codes, len(column.values))
        for event in self._spec.histories:
            if event.name in self._fields.rows:
                continue
            codes, times = shards.events(shard, event.name)
            starts, ends = shards.ranges(shard, event.name)
            seen = History(times, starts, ends).seen(first, end)
            for index, field in enumerate(event.fields):
                size = len(self.dictionary(event.name, field.name).values)
                self._add(event.name, field.name, codes[seen, index], size)

    def occurrences(self) -> Iterator[Occurrences]:
        tables = {("", feature.name): feature.table for feature in self._spec.of_rows}
        for event in self._spec.histories:
            whose = "" if event.name in self._fields.rows else event.name
            tables |= {(whose, field.name): field.table for field in event.fields}
        for (event_name, name), table in tables.items():
            dictionaries = self._fields.dictionaries
            known = (
                self.dictionary(event_name, name)
                if event_name
                else dictionaries[name if name in self._fields.ids else ("", name)]
            )
            yield table, known.values, self._counts[event_name, name]

    def _add(self, event: str, name: str, codes: np.ndarray, size: int) -> None:
        counts = np.bincount(codes[codes >= 0], minlength=size)
        before = self._counts.get((event, name))
        self._counts[event, name] = counts if before is None else before + counts


def _block(
    config: EventsConfig,
    spec: FeatureSpec,
    fields: Fields,
    shards: Shards,
    run: int,
    statistics: Spilled,
    scales: dict[str, dict[str, float]],
) -> Block:
    partition, requests, order = shards.rows_of(run)
    counts = requests["count"]
    starts = np.cumsum(counts) - counts
    taken = ranges(starts[order], counts[order])
    columns = fields.unpack(partition.take(taken))
    values = np.concatenate([statistics.of(*each) for each in shards.slices(run)])[taken]
    columns.numeric |= statistics.named(values)
    requests, counts = requests[order], counts[order]
    first = np.cumsum(counts) - counts
    firsts = {name: values[first] for name, values in columns.dense.items()}
    vendor = None
    if columns.vendor is not None:
        runs = vendor_runs(columns.vendor.codes, counts)
        begins = np.cumsum(runs[1]) - runs[1]
        numbers = {name: values[begins] for name, values in columns.dense.items()}
        vendor = VendorBlock(
            *runs,
            sparse={feature.name: columns.sparse[feature.name].take(begins) for feature in spec.vendor},
            dense=dense(config, spec.vendor_dense, numbers, len(begins), scales, spec.vendor_vectors),
        )
    return Block(
        time=requests["time"],
        user=requests["user"],
        counts=counts,
        row=columns.number,
        labels=columns.labels,
        weights=columns.weights,
        request={feature.name: columns.sparse[feature.name].take(first) for feature in spec.request},
        candidate={feature.name: columns.sparse[feature.name] for feature in spec.candidate},
        request_dense=dense(config, spec.request_dense, firsts, len(first), scales, spec.request_vectors),
        candidate_dense=dense(
            config, spec.candidate_dense, columns.dense, len(columns.number), scales, spec.candidate_vectors
        ),
        events={
            event.name: (requests["ranges"][:, index, 0], requests["ranges"][:, index, 1])
            for index, event in enumerate(spec.histories)
        },
        vendor=vendor,
    )
