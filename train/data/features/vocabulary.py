"""From ids to rows of embedding tables, by vocabulary or by hashing. Missing ids get `UNKNOWN_ID`."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from modules.batch import UNKNOWN_ID
from train.data.features.columns import Coded, CodedLists
from train.data.storage.store import file_name

Occurrences = tuple[str, pa.StringArray, np.ndarray]
"""(table, ids, how often each of them occurs in the training split)."""

logger = logging.getLogger(__name__)

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(counter: np.ndarray) -> np.ndarray:
    """A bijective mixing of uint64 counters (the finaliser of SplitMix64, Steele et al. 2014), element by element."""
    mixed = counter ^ (counter >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


class Vocabulary:
    """Ids seen at least `min_count[table]` times in training get rows 1, 2, ... in the order of their text.

    Other ids share the row of missing ones, or are hashed into `oov_rows` rows between that and the first id's.

    Text order rather than popularity spreads the popular rows over the shards of a row-wise sharded table. Ids of
    `earlier` runs, by table, keep their rows, seen or not, and the others get those behind them.
    """

    def __init__(
        self,
        occurrences: Iterable[Occurrences],
        min_count: Mapping[str, float],
        earlier: Mapping[str, pa.StringArray] | None = None,
        oov_rows: int = 0,
    ) -> None:
        self.oov_rows = oov_rows
        seen: dict[str, list[pa.Table]] = {}
        for table, values, counts in occurrences:
            seen.setdefault(table, []).append(pa.table({"value": values, "count": counts}))
        kept = earlier or {}
        self.tables = {
            table: self._known(table, pa.concat_tables(parts), min_count[table], kept.get(table))
            for table, parts in seen.items()
        }

    def _known(self, table: str, seen: pa.Table, min_count: float, earlier: pa.StringArray | None) -> pa.Table:
        goes_on = earlier is not None
        earlier = pa.array([], pa.string()) if earlier is None else earlier
        counts = seen.group_by("value").aggregate([("count", "sum")])
        enough = pc.greater_equal(counts["count_sum"], max(min_count, 1))
        new = pc.and_(enough, pc.invert(pc.is_in(counts["value"], value_set=earlier)))
        values = pa.chunked_array([earlier, *counts.filter(new).sort_by("value")["value"].cast(pa.string()).chunks])
        found = pc.index_in(values, value_set=counts["value"].combine_chunks())
        rows = pa.array(np.arange(len(values)) + first_row(self.oov_rows))
        known = pa.table({"row": rows, "value": values, "count": counts["count_sum"].take(found).fill_null(0)})
        if goes_on:
            strange = pc.and_(
                pc.greater(counts["count_sum"], 0), pc.invert(pc.is_in(counts["value"], value_set=earlier))
            )
            logger.info(
                "table %r: %d ids keep their rows, %d new ones got rows, %d others of the training split have none",
                table,
                len(earlier),
                len(values) - len(earlier),
                pc.sum(strange, min_count=0).as_py() - (len(values) - len(earlier)),
            )
        elif min_count > 1:
            occurred = np.count_nonzero(counts["count_sum"])
            logger.info(
                "table %r: %d ids have rows, %d that occur in training have none; known are %.2f %% of all occurrences",
                table,
                len(values),
                occurred - np.count_nonzero(known["count"]),
                100 * np.sum(known["count"]) / max(1, np.sum(counts["count_sum"])),
            )
        return known

    def size(self, table: str) -> int:
        """Rows of the embedding table."""
        return self.tables[table].num_rows + first_row(self.oov_rows)

    def ids(self, table: str, column: Coded | CodedLists) -> np.ndarray:
        """Row of each code of a column, int32."""
        return self.rows(table, column.values)[column.codes]

    def rows(self, table: str, values: pa.StringArray) -> np.ndarray:
        """[len(values) + 1] int32: the row of each id, and at last that of a missing one."""
        found = pc.index_in(values, value_set=self.tables[table]["value"].combine_chunks())
        known, place = found.is_valid().to_numpy(zero_copy_only=False), found.fill_null(0).to_numpy()
        unknown = rows_of_unknown(values, self.oov_rows)
        return _with_missing(np.where(known, place + first_row(self.oov_rows), unknown))

    def digest(self) -> str:
        """Changes whenever an id of some table would get another row."""
        digest = hashlib.sha256(b"oov %d" % self.oov_rows if self.oov_rows else b"")
        for table in sorted(self.tables):
            lengths, content = _contents(self.tables[table]["value"].combine_chunks())
            digest.update(json.dumps([table, len(lengths)]).encode())
            digest.update(lengths.data)
            digest.update(content.data)
        return digest.hexdigest()

    def save(self, folder: Path) -> None:
        """One parquet file a table: row, value, count in the training split."""
        folder.mkdir()
        for table, known in self.tables.items():
            pq.write_table(known, folder / file_name(table, ".parquet"))


class Hashing:
    """Row 1 + hash(text) mod (rows - 1): no vocabulary, no unseen ids, but collisions.

    Tables of `given`, whose rows come from files, have that vocabulary.
    """

    oov_rows = 0

    def __init__(self, rows: int, given: Vocabulary | None = None) -> None:
        if rows < 2:
            raise ValueError(f"data.hash_rows={rows} leaves no row beside the unknown one; use at least 2, e.g. 100000")
        self.num_rows = rows
        self._given = given or Vocabulary((), {})

    def size(self, table: str) -> int:
        return self._given.size(table) if table in self._given.tables else self.num_rows

    def ids(self, table: str, column: Coded | CodedLists) -> np.ndarray:
        return self.rows(table, column.values)[column.codes]

    def rows(self, table: str, values: pa.StringArray) -> np.ndarray:
        if table in self._given.tables:
            return self._given.rows(table, values)
        hashed = hash_texts(values) % np.uint64(self.num_rows - 1)
        return _with_missing(hashed.astype(np.int64) + UNKNOWN_ID + 1)

    def digest(self) -> str:
        return f"hash into {self.num_rows}" + (f", {self._given.digest()}" if self._given.tables else "")

    def save(self, folder: Path) -> None:
        """As a vocabulary; hashing itself has nothing to save."""
        if self._given.tables:
            self._given.save(folder)


def occurrences(column: Coded | CodedLists, chosen: np.ndarray | slice = slice(None)) -> np.ndarray:
    """How often each of a column's values occurs among the chosen ones of its codes."""
    codes = column.codes[chosen]
    return np.bincount(codes[codes >= 0], minlength=len(column.values))


def first_row(oov_rows: int) -> int:
    """Row of a vocabulary's first id."""
    return UNKNOWN_ID + 1 + oov_rows


def rows_of_unknown(texts: pa.StringArray, oov_rows: int) -> np.ndarray:
    """[N] int64 rows of ids that a vocabulary does not have."""
    if oov_rows == 0:
        return np.full(len(texts), UNKNOWN_ID)
    return (hash_texts(texts) % np.uint64(oov_rows)).astype(np.int64) + UNKNOWN_ID + 1


def hash_texts(texts: pa.StringArray) -> np.ndarray:
    """[N] uint64, the same on every machine: a polynomial in the bytes of each text, mixed."""
    lengths, content = _contents(texts)
    ends = np.append(0, np.cumsum(lengths))
    place = np.arange(len(content)) - np.repeat(ends[:-1], lengths)
    powers = np.full(int(lengths.max(initial=0)), GOLDEN).cumprod()
    terms = (content.astype(np.uint64) + np.uint64(1)) * powers[place]
    sums = np.append(np.uint64(0), np.cumsum(terms))  # wraps modulo 2^64, and so do differences
    return splitmix64(sums[ends[1:]] - sums[ends[:-1]])


def _contents(texts: pa.StringArray) -> tuple[np.ndarray, np.ndarray]:
    """(bytes of each text [N] int64, those of all texts one after another uint8)."""
    array = texts.cast(pa.large_binary())
    lengths = pc.binary_length(array).to_numpy().astype(np.int64)
    total = int(lengths.sum())
    if not total:
        return lengths, np.zeros(0, np.uint8)
    _, starts, data = array.buffers()
    begin = np.frombuffer(starts, np.int64)[array.offset]
    return lengths, np.frombuffer(data, np.uint8)[begin : begin + total]


def _with_missing(rows: np.ndarray) -> np.ndarray:
    return np.append(rows, UNKNOWN_ID).astype(np.int32)
