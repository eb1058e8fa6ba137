"""Columns made of other columns, as `data.transforms` describes them: the same in files and in requests to be scored.

`train.data.storage.rows.Rows` makes them of columns of files, `train.data.reader.RequestReader` of the values of
requests, both from the description that the run's configuration holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from modules.config import from_saved
from train.config.schema import TransformConfig
from train.data.features.columns import Coded, relabel
from train.data.features.ids import texts_of
from train.data.features.numeric import signed_log
from train.data.features.vocabulary import hash_texts

OF_NUMBERS = ("bucketize", "log", "clip")
TO_NUMBERS = ("log", "clip")
KINDS = ("cross", "bucketize", "log", "clip", "hash", "copy")
SETTINGS = {"bucketize": ("edges",), "clip": ("least", "most"), "hash": ("buckets",)}
BETWEEN = "\x1f"
"""Between the ids of a cross: a character that no id has."""


class Columns(Protocol):
    """Some rows, by column, in which columns that a transform makes count as any other."""

    def ids(self, name: str) -> Coded: ...

    def numbers(self, name: str) -> np.ndarray: ...


class Given(Columns, Protocol):
    """Rows of a request."""

    def given(self, name: str) -> list[Any]:
        """The values of a column as they came."""
        ...


class Transforms:
    """Transforms by the name of the column that they make. Raises ValueError for one that cannot be."""

    def __init__(self, described: Mapping[str, TransformConfig | Mapping[str, Any]]) -> None:
        self._all = {
            name: each
            if isinstance(each, TransformConfig)
            else from_saved(TransformConfig, each, f"data.transforms.{name}")
            for name, each in described.items()
        }
        for name, each in self._all.items():
            _check(name, each)
        for name in self._all:
            self._depends(name, ())

    def __contains__(self, name: object) -> bool:
        return name in self._all

    def reads(self, name: str) -> list[str]:
        """The columns that a transform reads."""
        return _reads(self._all[name])

    def made_of(self, name: str) -> set[str]:
        """The columns that a column is made of, also by way of others; none of a column of files."""
        read = self.reads(name) if name in self._all else []
        return {*read, *(each for part in read for each in self.made_of(part))}

    def inputs(self, names: Iterable[str]) -> set[str]:
        """The columns of files that these columns are, or are made of."""
        found: set[str] = set()
        for name in names:
            found |= self.inputs(_reads(self._all[name])) if name in self._all else {name}
        return found

    def number_inputs(self) -> list[str]:
        """Columns of files that are read as numbers."""
        read = [name for each in self._all.values() if _kind(each) in OF_NUMBERS for name in _reads(each)]
        return [name for name in dict.fromkeys(read) if name not in self._all]

    def ids(self, name: str, columns: Columns) -> Coded:
        """[N] ids of a column that a transform makes."""
        each, kind = self._all[name], _kind(self._all[name])
        if kind in TO_NUMBERS:
            raise ValueError(f"data.transforms.{name} makes numbers ({kind}), and ids are needed; bucketize makes ids")
        if kind == "bucketize":
            return _bucketize(columns.numbers(_reads(each)[0]), each.edges)
        parts = [columns.ids(read) for read in _reads(each)]
        if kind == "copy":
            return parts[0]
        if kind == "cross":
            return _cross(parts)
        return _hash(parts[0], each.buckets)

    def copied(self, name: str) -> str | None:
        """The column that a copy is of, by way of other copies; None for what another transform makes."""
        while name in self._all and (source := self._all[name].copy):
            name = source
        return None if name in self._all else name

    def numbers(self, name: str, columns: Columns) -> np.ndarray:
        """[N] float64 numbers of a column that a transform makes, NaN for missing."""
        each, kind = self._all[name], _kind(self._all[name])
        if kind not in TO_NUMBERS:
            raise ValueError(f"data.transforms.{name} makes ids ({kind}), and numbers are needed; use log or clip")
        numbers = columns.numbers(_reads(each)[0])
        return signed_log(numbers) if kind == "log" else np.clip(numbers, each.least, each.most)

    def derive(self, rows: Sequence[Mapping[str, Any]], names: Iterable[str], columns: Given) -> list[dict[str, Any]]:
        """`rows` of a request, which are also `columns`, with the values of those of `names` that transforms make."""
        made: dict[str, list[Any]] = {}
        for name in names:
            if name not in self._all:
                continue
            if source := self.copied(name):  # which may have lists
                made[name] = columns.given(source)
            elif _kind(self._all[name]) in TO_NUMBERS:
                made[name] = [None if math.isnan(number) else number for number in self.numbers(name, columns).tolist()]
            else:
                ids = self.ids(name, columns)
                texts = [*ids.values.to_pylist(), None]
                made[name] = [texts[code] for code in ids.codes]
        return [{**row, **{name: values[index] for name, values in made.items()}} for index, row in enumerate(rows)]

    def _depends(self, name: str, above: tuple[str, ...]) -> None:
        if name in above:
            raise ValueError(f"data.transforms.{name} is made of itself, by way of {', '.join(above)}")
        for read in _reads(self._all[name]):
            if read in self._all:
                self._depends(read, (*above, name))


def texts_as_ids(values: Sequence[Any]) -> Coded:
    """Values of a request, as files have them. TypeError for one that is no id."""
    return relabel(np.arange(len(values), dtype=np.int32), texts_of(values))


def _kind(each: TransformConfig) -> str:
    return next(kind for kind in KINDS if getattr(each, kind))


def _reads(each: TransformConfig) -> list[str]:
    read = getattr(each, _kind(each))
    return [read] if isinstance(read, str) else list(read)


def _check(name: str, each: TransformConfig) -> None:
    key = f"data.transforms.{name}"
    given = [kind for kind in KINDS if getattr(each, kind)]
    if len(given) != 1:
        raise ValueError(f"{key} must have one of {', '.join(KINDS)}, it has {given}; e.g. {{log: price}}")
    (kind,) = given
    for field in dataclasses.fields(each):
        default = getattr(TransformConfig(), field.name)
        if field.name not in (kind, *SETTINGS.get(kind, ())) and getattr(each, field.name) != default:
            raise ValueError(f"{key}.{field.name} does not go with {kind}")
    bounds = (*each.edges, *(bound for bound in (each.least, each.most) if bound is not None))
    if not all(map(math.isfinite, bounds)):
        raise ValueError(f"{key} has {bounds}, which must be finite numbers")
    if kind == "cross" and len(each.cross) < 2:
        raise ValueError(f"{key}.cross={each.cross} must name two columns or more, e.g. [country, category]")
    if kind == "bucketize" and (not each.edges or sorted(set(each.edges)) != list(each.edges)):
        raise ValueError(f"{key}.edges={each.edges} must be rising numbers, e.g. [1, 10, 100]")
    if kind == "clip" and (each.least is None) & (each.most is None):
        raise ValueError(f"{key} needs least, most or both, e.g. most: 100")
    if each.least is not None and each.most is not None and each.least > each.most:
        raise ValueError(f"{key}.least={each.least} is above most={each.most}")
    if kind == "hash" and each.buckets < 1:
        raise ValueError(f"{key}.buckets={each.buckets} must be at least 1, e.g. 10000")


def _cross(parts: Sequence[Coded]) -> Coded:
    """The combination of ids; missing where one of them is."""
    crossed = parts[0]
    for part in parts[1:]:
        size = max(len(part.values), 1)
        known = (crossed.codes >= 0) & (part.codes >= 0)
        keys = crossed.codes[known].astype(np.int64) * size + part.codes[known]
        distinct, codes = np.unique(keys, return_inverse=True)
        left, right = crossed.values.take(pa.array(distinct // size)), part.values.take(pa.array(distinct % size))
        placed = np.full(len(known), -1, np.int32)
        placed[known] = codes
        crossed = Coded(placed, pc.binary_join_element_wise(left, right, BETWEEN))
    return crossed


def _bucketize(numbers: np.ndarray, edges: Sequence[float]) -> Coded:
    """Bucket i holds edges[i - 1] <= number < edges[i]."""
    buckets = np.searchsorted(np.asarray(edges, np.float64), numbers, side="right").astype(np.int32)
    names = pa.array([str(bucket) for bucket in range(len(edges) + 1)], pa.string())
    return Coded(np.where(np.isnan(numbers), np.int32(-1), buckets), names)


def _hash(ids: Coded, buckets: int) -> Coded:
    hashed = hash_texts(ids.values) % np.uint64(buckets)
    return relabel(ids.codes, pa.array(hashed).cast(pa.string()))
