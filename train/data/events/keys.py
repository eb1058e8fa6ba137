"""Ids of some columns of labelled rows, found by the rows' numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from train.config.schema import EventsConfig
from train.data.events.read import row_files
from train.data.events.spill import Dictionary


class RowKeys:
    """Columns of the labelled rows and of joined tables, as text: 8 bytes a row, 4 a row and column, each id once."""

    def __init__(self, config: EventsConfig, columns: Sequence[str]) -> None:
        """Reads the files in chunks. ValueError for a column that they lack."""
        self._dictionaries = {name: Dictionary() for name in columns}
        numbers = [np.zeros(0, np.int64)]
        codes = {name: [np.zeros(0, np.int32)] for name in columns}
        for rows in row_files(config, set(columns)).chunks(config.rows_at_once) if columns else ():
            numbers.append(rows.table.number)
            for name, dictionary in self._dictionaries.items():
                codes[name].append(dictionary.codes(rows.ids(name)))
        self._numbers = np.concatenate(numbers)
        self._codes = {name: np.concatenate(parts) for name, parts in codes.items()}

    def of(self, name: str, rows: np.ndarray) -> pa.StringArray:
        """Ids of these rows [N], as `RequestBatch.row` numbers them; null where one is missing."""
        codes = self._codes[name][np.searchsorted(self._numbers, rows)]
        return self._dictionaries[name].values.take(pa.array(codes, mask=codes < 0))
