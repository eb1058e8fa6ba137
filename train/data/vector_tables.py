"""Tables whose rows are vectors from files, by id: `data.table_vectors`.

Files are read twice in pieces, first for ids and scales, then for the rows: memory holds the ids as text and one piece.
The rows lie in the prepared folder as an array, from which each rank copies those of its shards.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from modules.batch import VectorFeature, VectorTable
from train.config.schema import EventsConfig, TableVectorsConfig
from train.data.features import mapping
from train.data.features.numeric import AS_IT_IS, scaled_vectors
from train.data.features.vocabulary import Hashing, Occurrences, Vocabulary, first_row
from train.data.storage import store
from train.data.storage.files import Layout, Table, locate
from train.data.storage.find import find_files
from train.data.storage.rows import RowFiles

logger = logging.getLogger(__name__)

PIECE = 1 << 24
"""Numbers of vectors that are in memory at once."""
ALIGNED = 4
"""Columns that kernels of tables read at once."""
DTYPES = {"fp32": "float32", "fp16": "float16"}


def vector_tables(config: EventsConfig) -> dict[str, VectorTable]:
    """The tables as a spec has them."""
    return {
        table: VectorTable(-(-given.width // ALIGNED) * ALIGNED, DTYPES[given.dtype], given.frozen)
        for table, given in config.table_vectors.items()
    }


def array_name(table: str) -> str:
    """Of the array of a table's rows in a prepared folder."""
    return f"vectors.{table}"


class VectorFiles:
    """The files of `data.table_vectors`, or, where a table names none, what an `earlier` run knows of them."""

    def __init__(self, config: EventsConfig, earlier: mapping.Mapping | None) -> None:
        """Reads ids and scales. Raises ValueError, naming file and row, for an id that comes twice and as for rows."""
        self._config = config
        self._features = {name: VectorFeature(name, given.width) for name, given in config.table_vectors.items()}
        self._known = earlier.numeric if earlier else {}
        self.ids: dict[str, pa.StringArray] = {}  # with a vector, by table
        self.statistics: dict[str, dict[str, float]] = {}
        self.digests: dict[str, str] = dict(earlier.vectors) if earlier else {}
        self._without: dict[str, int] = {}  # ids of the files that have no vector
        for table, given in config.table_vectors.items():
            self._survey(table, given)

    def occurrences(self) -> Iterator[Occurrences]:
        """Each id once."""
        for table, ids in self.ids.items():
            yield table, ids, np.ones(len(ids), np.int64)

    def write(self, folder: Path, ids: Vocabulary | Hashing) -> None:
        """The rows of each table as an array [rows, width], zeros where no id has a vector."""
        for table, given in self._config.table_vectors.items():
            if not given.files:
                continue
            spec = vector_tables(self._config)[table]
            rows = np.lib.format.open_memmap(
                store.array_file(folder, array_name(table)), "w+", spec.dtype, (ids.size(table), spec.width)
            )
            for piece in self._pieces(given):
                places = ids.rows(table, piece.ids)[:-1]
                own = places >= first_row(ids.oov_rows)  # without new ids, some have none
                scaled = scaled_vectors(piece.vectors[own], self._features[table], self.statistics)
                if np.abs(scaled).max(initial=0) > np.finfo(spec.dtype).max:
                    raise ValueError(
                        f"data.table_vectors.{table}: numbers of up to {np.abs(scaled).max():.3g} do not fit into "
                        f"dtype={given.dtype}; use dtype: fp32, or scale: standard"
                    )
                rows[places[own], : given.width] = scaled
            digest = hashlib.sha256()
            for begin in range(0, len(rows), max(1, PIECE // spec.width)):
                digest.update(rows[begin : begin + max(1, PIECE // spec.width)].tobytes())
            self.digests[table] = digest.hexdigest()[:16]
            rows.flush()

    def report(self, training: Sequence[Occurrences]) -> None:
        """Log how many ids have vectors, and how many of the training split have none."""
        for table, known in self.ids.items():
            if not self._config.table_vectors[table].files:
                continue
            lacking, lost, total = set[str](), 0, 0
            for _, values, counts in (each for each in training if each[0] == table):
                absent = pc.invert(pc.is_in(values, value_set=known)).to_numpy(zero_copy_only=False)
                lacking |= set(values.take(pa.array(np.flatnonzero(absent & (counts > 0)))).to_pylist())
                lost, total = lost + int(counts[absent].sum()), total + int(counts.sum())
            logger.info(
                "table %r: %s ids have a vector of %d numbers (%s in the files without one); %s ids of the training "
                "split have none, %.2f %% of all occurrences",
                table,
                f"{len(known):,}",
                self._features[table].width,
                f"{self._without[table]:,}",
                f"{len(lacking):,}",
                100 * lost / max(total, 1),
            )

    def _survey(self, table: str, given: TableVectorsConfig) -> None:
        feature = self._features[table]
        names = [table] if given.scale == "none" else list(feature.columns)
        if not given.files:
            self.ids[table] = pa.array([], pa.string())
            self.statistics |= {name: self._known[name] for name in names}
            return
        moments, texts, numbers, piece = _Moments(given.width), list[pa.StringArray](), list[np.ndarray](), None
        for piece in self._pieces(given):
            moments.add(piece.vectors)
            texts.append(piece.ids)
            numbers.append(piece.number)
        assert piece is not None
        ids = pa.chunked_array(texts).combine_chunks()
        if not len(ids):
            raise ValueError(f"data.table_vectors.{table}: no id of {', '.join(given.files)} has a vector")
        if (again := _repeated(ids)) is not None:
            place = locate(piece.table.files, piece.table.first_row, int(np.concatenate(numbers)[again]))
            raise ValueError(f"{place}: {given.id}={ids[again]} is a repeated id")
        self.ids[table], self._without[table] = ids, piece.total - len(ids)
        if given.scale == "none":
            self.statistics[table] = AS_IT_IS
            return
        for name, mean, std in zip(names, moments.mean.tolist(), moments.std().tolist(), strict=True):
            self.statistics[name] = self._known.get(name) or {"mean": mean, "std": std}

    def _pieces(self, given: TableVectorsConfig) -> Iterator[_Piece]:
        config, total, rows = self._config, 0, None
        files = find_files(given.files, config.root)
        reader = RowFiles(
            files, {given.id, given.vector}, Layout(config.csv_separator, quoted=config.csv_quotes), config.bad_rows
        )
        for rows in reader.chunks(max(1, PIECE // given.width)):
            ids = rows.required_ids(given.id)
            vectors = rows.vectors(given.vector, given.width, config.list_separator)
            rows.finish()
            total += int(np.count_nonzero(~rows.bad))
            kept = np.flatnonzero(~rows.bad & ~np.isnan(vectors[:, 0]))
            texts = ids.values.take(pa.array(ids.codes[kept]))
            yield _Piece(rows.table, rows.table.number[kept], texts, vectors[kept], total)
        assert rows is not None
        rows.report(config.max_skipped)


@dataclass
class _Piece:
    """The n rows of some that have a vector."""

    table: Table
    number: np.ndarray  # [n] of the rows
    ids: pa.StringArray  # [n]
    vectors: np.ndarray  # [n, width] float32
    total: int  # rows so far, those without a vector among them


def _repeated(ids: pa.StringArray) -> int | None:
    """The place of an id that stands before it, too."""
    codes = ids.dictionary_encode().indices.to_numpy()
    first = np.zeros(len(codes), bool)
    first[np.unique(codes, return_index=True)[1]] = True
    return None if first.all() else int(np.flatnonzero(~first)[0])


class _Moments:
    """Mean and standard deviation of each column, in float64, of vectors that come in pieces (Chan et al. 1983)."""

    def __init__(self, width: int) -> None:
        self.count, self.mean, self._squares = 0, np.zeros(width), np.zeros(width)

    def add(self, vectors: np.ndarray) -> None:
        """vectors [n, width]."""
        if not len(vectors):
            return
        mean = vectors.mean(0, dtype=np.float64)
        squares = ((vectors - mean) ** 2).sum(0)
        both, apart = self.count + len(vectors), mean - self.mean
        self._squares += squares + apart**2 * (self.count * len(vectors) / both)
        self.mean += apart * (len(vectors) / both)
        self.count = both

    def std(self) -> np.ndarray:
        return np.sqrt(self._squares / max(self.count, 1))
