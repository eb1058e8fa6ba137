"""What a description of labelled events must fulfil before any row is read."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from modules.batch import FeatureSpec
from modules.config import check_options
from train.config.schema import EventsConfig, TableVectorsConfig, VectorConfig
from train.data.events.late import check_late
from train.data.events.names import features, lists, numbers, numeric, table_of, vectors, wanted
from train.data.features import mapping, times
from train.data.features.columns import NUMBER
from train.data.features.ids import texts_of
from train.data.features.numeric import INDICATOR, LARGEST, matching
from train.data.features.transforms import Transforms
from train.data.statistics import describe as statistics
from train.data.storage.remote import DataFile, random_access, size
from train.data.storage.rows import comparison

logger = logging.getLogger(__name__)

ENDS = 1 << 16
"""Bytes of the start and of the end of files of one size, by which copies are told."""


def check(config: EventsConfig) -> None:
    check_options(config, "data")
    ids = {f"data.display.{name}": value for name, value in config.display.items()}
    for name, history in config.histories.items():
        ids |= {f"data.histories.{name}.where.{column}": value for column, value in history.where.items()}
    for key, value in ids.items():
        try:
            texts_of(value if isinstance(value, list) and ".where." in key else [value])
        except TypeError:
            raise ValueError(f"{key}={value!r} must be one id, or several of a where: 1, buy or [1, 2]") from None
    formats = {f"data.histories.{name}.time_format": history.time_format for name, history in config.histories.items()}
    for key, time_format in {"data.time_format": config.time_format, **formats}.items():
        if time_format not in (None, "s", "ms") and "%" not in time_format:
            raise ValueError(f"{key}={time_format!r} must be s, ms or a strptime pattern, e.g. '%Y-%m-%d'")
        if time_format and (unknown := times.unknown_directive(time_format)):
            hint = (
                "names of time zones are not read, offsets such as +0100 are, by %z"
                if unknown == "%Z"
                else "e.g. %Y, %m"
            )
            raise ValueError(f"{key}={time_format!r}: {unknown} is not read ({hint}); use e.g. '%Y-%m-%d %H:%M:%S'")
    transforms, columns = Transforms(config.transforms), {*features(config), *numeric(config), *vectors(config)}
    told = transforms.inputs(columns) | {join.column for join in config.joins}
    for task, column in config.known_at.items():
        if column != config.time and transforms.inputs({column}) & told:
            raise ValueError(
                f"data.known_at.{task} is column {column!r}, which a feature is made of, too: the model would be told "
                "whether and when the answer came"
            )
    for task, text in config.labels.items():
        column, sign, value = comparison(text)
        wrong = re.fullmatch("|'.*'|\".*\"", value) if sign == "==" else sign and not re.match(NUMBER, value)
        if wrong or any(other in column for other in "<>="):
            raise ValueError(
                f"data.labels.{task}={text!r} must name a column of 0 and 1, or compare one as COLUMN >= NUMBER or "
                "COLUMN == ID without quotes, e.g. 'rating >= 4' or 'event == buy'"
            )
        if transforms.inputs({column}) & told:
            way = "is a feature too" if column in columns else "data.transforms or data.joins make features of"
            raise ValueError(
                f"data.labels.{task} is read from column {column!r}, which {way}: the model would be told the answer; "
                "let only fields of histories have it, whose events are earlier ones"
            )
    check_late(config)
    shown = {*features(config), *numeric(config)} - {*lists(config)}
    for name, value in config.display.items():
        if name not in shown:
            raise ValueError(f"data.display.{name} is no feature of ids or numbers; there are {sorted(shown)}")
        if name in numeric(config) and not (isinstance(value, int | float) and math.isfinite(value)):
            raise ValueError(f"data.display.{name}={value!r} must be a number, e.g. data.display.{name}=1")
    for name in sorted(shown - config.display.keys()):
        if fixed := sorted(transforms.made_of(name) & config.display.keys()):
            raise ValueError(
                f"feature {name!r} is made of {fixed[0]!r}, which requests do not have (data.display); give {name} a "
                f"value of its own there, e.g. data.display={{{name}: 0}}, or leave it out"
            )
    statistics.check(config, {*numeric(config), *vectors(config)})
    logs = {name for history in config.histories.values() for name in (*history.fields, *history.where)}
    named = {*wanted(config), *logs, *(name for other in config.transforms for name in transforms.reads(other))}
    if unused := sorted(set(config.transforms) - named):
        raise ValueError(f"data.transforms.{unused[0]} makes a column that no feature, label or history names")
    used = {*features(config), *(name for history in config.histories.values() for name in history.fields)}
    if not used:
        raise ValueError("no column of ids is named, which tables are for; e.g. data.candidate_categorical=[item_id]")
    for column in sorted(name for name in used - config.tables.keys() if table_of(config, name) != name):
        others = (name for name in sorted(used - {column}) if config.tables.get(name) != column)
        if same := [name for name in others if table_of(config, name) == table_of(config, column)]:
            raise ValueError(
                f"columns {column!r} and {same[0]!r} would share the table {table_of(config, column)!r}, since no "
                f"table can be called {column!r}; name one or, to share it, both in data.tables, e.g. {column}: other"
            )
    scaled, read = set(numeric(config)), set(numbers(config))
    for key, stray, there in (
        ("tables", set(config.tables) - used, used),
        ("real_labels", set(config.real_labels) - set(config.labels), set(config.labels)),
        ("log_numeric", set(config.log_numeric) - scaled, scaled),
        ("missing_fill", set(config.missing_fill) - scaled, scaled),
        ("missing_indicator", {glob for glob in config.missing_indicator if not matching(scaled, [glob])}, scaled),
        ("missing_nan", {glob for glob in config.missing_nan if not matching(read, [glob])}, read),
    ):
        if stray:
            raise ValueError(
                f"data.{key} names {sorted(stray)}, which is no such feature or field of this configuration; there are "
                f"{sorted(there)}"
            )
    if repeated := [name for name, count in Counter(numeric(config)).items() if count > 1]:
        raise ValueError(f"column {repeated[0]!r} of numbers is named twice; name it once")
    if twice := sorted(set(vectors(config)) & {*features(config), *numeric(config)}):
        raise ValueError(
            f"column {twice[0]!r} is a vector (data.request_vectors, candidate_vectors, vendor_vectors); name it once"
        )
    of_sides = (config.request_vectors, config.candidate_vectors, config.vendor_vectors)
    kinds = ("request", "candidate", "vendor")
    for (kind, mine), (other, theirs) in combinations(zip(kinds, of_sides, strict=True), 2):
        if both := sorted(set(mine) & set(theirs)):
            raise ValueError(f"data.{kind}_vectors and data.{other}_vectors both name {both[0]!r}; name it once")
    tables = {table_of(config, name) for name in used}
    for table, given in config.table_vectors.items():
        key = f"data.table_vectors.{table}"
        if table not in tables:
            raise ValueError(
                f"{key} is no table of a feature or a field; there are {sorted(tables)}. To have a learned row and a "
                f"vector of one id, copy the column, e.g. data.transforms={{{table}: {{copy: item_id}}}}, and name "
                f"{table} among the features"
            )
        if table in {*vectors(config), *numeric(config)}:
            raise ValueError(f"{key} has the name of a column of numbers; give its table another one by data.tables")
        if given.dtype != "fp32" and not given.frozen:
            raise ValueError(f"{key}.dtype={given.dtype} goes with frozen: true; rows that learn need fp32")
    shown_numbers = {name: value for name, value in config.display.items() if name in scaled}
    for key, numbers_of in (("missing_fill", config.missing_fill), ("display", shown_numbers)):
        for name, number in numbers_of.items():
            if not math.isfinite(number) or (name not in config.log_numeric and abs(number) > LARGEST):
                raise ValueError(f"data.{key}.{name}={number} must be a finite number that float32 can hold, e.g. 0")
    if taken := sorted({name + INDICATOR for name in scaled} & scaled):
        raise ValueError(f"column {taken[0]!r} has the name of an indicator of data.missing_indicator; rename it")


def check_once(files: list[DataFile]) -> None:
    """ValueError for a file that is named twice, and a warning for one that another name has as well."""
    (again, count), *_ = Counter(file.resolve() for file in files).most_common(1)
    if count > 1:
        raise ValueError(
            f"data.files, data.valid_files and data.test_files name {again} twice, so its rows would count twice or be "
            "trained on and tested; let the globs and folders of each leave out the files of the others"
        )
    _warn_of_copies(files)


def _warn_of_copies(files: list[DataFile]) -> None:
    by_size: dict[int, list[DataFile]] = {}
    for file in files:
        by_size.setdefault(size(file), []).append(file)
    for same in by_size.values():
        seen: dict[bytes, DataFile] = {}
        for file in same if len(same) > 1 else ():
            with random_access(file) as opened:
                ends = opened.read(ENDS)
                opened.seek(max(0, opened.size() - ENDS))
                digest = hashlib.sha256(ends + opened.read(ENDS)).digest()
            if digest in seen:
                logger.warning("%s seems to be a copy of %s: rows of both count", file, seen[digest])
            seen.setdefault(digest, file)


def check_splits(config: EventsConfig, counts: Sequence[int]) -> None:
    """ValueError for files of a split without a row that can be used: time would split the other files instead.

    counts: of rows or requests of which time decides, then of each split's own files.
    """
    for count, key in zip(counts[2:], ("valid_files", "test_files"), strict=True):
        if getattr(config, key) and not count:
            raise ValueError(
                f"data.{key}={getattr(config, key)} have no row that can be used; name files with rows, or leave the "
                "key out, and data.split decides"
            )


def earlier_mapping(config: EventsConfig, spec: FeatureSpec) -> mapping.Mapping | None:
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
    described: dict[str, VectorConfig | TableVectorsConfig] = {**vectors(config), **config.table_vectors}
    for name, vector in described.items():
        known = "none" if name in earlier.numeric else "standard" if f"{name}[0]" in earlier.numeric else vector.scale
        if known != vector.scale:
            raise ValueError(
                f"data.vocabulary_of={earlier.path} was given {name!r} with scale={known}, this configuration has "
                f"{vector.scale}; use the former"
            )
    if earlier.vectors.keys() != config.table_vectors.keys():
        raise ValueError(
            f"data.vocabulary_of={earlier.path} was given vectors for the tables {sorted(earlier.vectors)}, this "
            f"configuration has data.table_vectors of {sorted(config.table_vectors)}; use the same"
        )
    if earlier.transforms != config.transformed():
        raise ValueError(
            f"data.vocabulary_of={earlier.path} made columns by data.transforms={earlier.transforms}; use the same, "
            "or its weights would be given other ids and numbers"
        )
    if earlier.statistics != config.statistics:
        raise ValueError(
            f"data.vocabulary_of={earlier.path} has data.statistics={earlier.statistics}; use the same, with whose "
            "counters this run goes on, or leave it auto"
        )
    hashed = sorted(earlier.hashed)
    hashing = config.id_map == "hash" and spec.tables.keys() - config.table_vectors.keys()
    if hashed != ([config.hash_rows] if hashing else []):
        theirs = f"data.id_map=hash data.hash_rows={hashed[0]}" if hashed else "data.id_map=vocabulary"
        raise ValueError(f"data.vocabulary_of={earlier.path} gives ids other rows than this run; use {theirs}")
    if earlier.oov_rows != config.oov_rows:
        raise ValueError(
            f"data.vocabulary_of={earlier.path} has other rows for unknown ids than data.oov_rows={config.oov_rows}; "
            f"use data.oov_rows={earlier.oov_rows}"
        )
    if own := [name for name, history in config.histories.items() if not (history.files or history.lists)]:
        logger.warning(
            "data.histories of rows, %s, hold those of the files named here alone; for earlier ones, too, give them as "
            "a log, e.g. files: [logs] with all days",
            ", ".join(own),
        )
    return earlier
