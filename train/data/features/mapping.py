"""What a run knows of its data, kept beside its checkpoints: the row of every id and the scale of every number.

A run on other files can take over both (`data.vocabulary_of`), so that it can continue with the weights. The files
that the ids came from, and their cache, are no longer needed then.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from modules.batch import UNKNOWN_ID
from train.process import saved
from train.process.files import faults, summed, write_json

FOLDER = "vocabulary"
"""Of a prepared folder and of a run directory: a parquet file an embedding table, none with data.id_map=hash."""
ABOUT = "mapping.json"
COLUMNS = "columns.json"
"""Of a prepared folder: what the columns of its files are called."""
COUNTERS = "statistics"
"""Of both, too: what `train.data.statistics.store` writes."""
KEPT = (FOLDER, COUNTERS)
FIELDS = {
    "fingerprint": str, "numeric": dict[str, dict[str, float]], "label_rates": dict[str, float],
    "tables": dict[str, int],
}  # fmt: skip
LATER = {
    "transforms": dict[str, dict], "vectors": dict[str, str], "columns": list[str], "statistics": dict[str, dict],
    "files": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Mapping:
    """Of an earlier run: `ids` by table in the order of their rows; tables without are hashed into `sizes` rows."""

    path: Path
    fingerprint: str
    numeric: dict[str, dict[str, float]]  # mean and std by feature
    label_rates: dict[str, float]  # positive rate of training labels by task
    sizes: dict[str, int]
    ids: dict[str, pa.StringArray]
    transforms: dict[str, dict[str, Any]]  # how columns were made of others
    vectors: dict[str, str]  # digest of the rows of tables that files gave
    columns: list[str] | None  # of the files; None in a mapping of an earlier version
    statistics: dict[str, dict[str, Any]]  # as `data.statistics` has them

    @property
    def hashed(self) -> set[int]:
        """Sizes of the tables whose ids are hashed."""
        return {rows for table, rows in self.sizes.items() if table not in self.ids}

    @property
    def oov_rows(self) -> int:
        """Rows of each table that ids without one of their own are hashed into."""
        if not self.ids:
            return 0
        table, texts = next(iter(self.ids.items()))
        return self.sizes[table] - len(texts) - UNKNOWN_ID - 1


def keep(prepared: Path, meta: dict, run_dir: Path) -> None:
    """Write the mapping of a prepared folder, whose `meta` this is, to a run directory, unless it is there, whole."""
    folder = run_dir / FOLDER
    with suppress(ValueError):
        earlier = about(run_dir)
        if earlier["fingerprint"] == meta["fingerprint"] and "files" in earlier and not _faults(run_dir, earlier):
            return
    left = (folder / ABOUT).exists()  # by a start that reached no checkpoint, or damaged
    for each in KEPT:
        if left:
            shutil.rmtree(run_dir / each, ignore_errors=True)
        if (prepared / each).exists():
            shutil.copytree(prepared / each, run_dir / each, dirs_exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    names = ("fingerprint", "numeric", "label_rates", "transforms", "vectors", "statistics")
    known = {name: meta[name] for name in names if name in meta}
    if (prepared / COLUMNS).exists():
        known["columns"] = json.loads((prepared / COLUMNS).read_text())
    kept = [file for each in KEPT for file in sorted((prepared / each).glob("*"))]
    sums = {str(file.relative_to(prepared)): summed(file) for file in kept}
    write_json(folder / ABOUT, known | {"tables": meta["spec"]["tables"], "files": sums})


def keep_columns(prepared: Path, columns: Iterable[str]) -> None:
    """Write the columns of the files to the folder of their prepared form."""
    write_json(prepared / COLUMNS, sorted(columns))


def files(run_dir: Path) -> list[Path]:
    """What `read` reads. Raises ValueError when there is nothing."""
    folder = run_dir / FOLDER
    if not (folder / ABOUT).exists():
        raise ValueError(
            f"data.vocabulary_of={run_dir}: {folder} holds no {ABOUT}; name a run directory of data=events, such as "
            "runs/first. A run of an earlier version writes it when it is started once more"
        )
    return sorted(folder.iterdir())


def about(run_dir: Path) -> dict[str, Any]:
    """What `read` knows beside the ids. ValueError when there is nothing, or for a field that no mapping has so."""
    path = next(file for file in files(run_dir) if file.name == ABOUT)
    known = saved.fields(path.read_bytes(), path, FIELDS, LATER)
    saved.check_sums(known.get("files", {}), path)
    return known


def _faults(run_dir: Path, known: dict[str, Any]) -> list[str]:
    return faults(run_dir, known.get("files", {}))  # mappings of earlier versions have none


def read(run_dir: Path) -> Mapping:
    """ValueError, too, for ids or counters that are not what was written."""
    known = about(run_dir)
    for fault in _faults(run_dir, known):
        raise ValueError(
            f"{run_dir} is damaged ({fault}): take it from a copy, export anew, or start the run once more, which "
            "writes it again"
        )
    tables = [file for file in files(run_dir) if file.name != ABOUT]
    ids = {
        unquote(file.name.removesuffix(".parquet")): pq.read_table(file, columns=["value"])["value"].combine_chunks()
        for file in tables
    }
    return Mapping(
        run_dir,
        known["fingerprint"],
        known["numeric"],
        known["label_rates"],
        known["tables"],
        ids,
        known.get("transforms", {}),
        known.get("vectors", {}),
        known.get("columns"),
        known.get("statistics", {}),
    )
