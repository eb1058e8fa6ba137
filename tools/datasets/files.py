"""Finding a data set's files below the folder that the user names, and writing tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def find(folder: Path, path: str, origin: str) -> Path:
    """The file `path`, in `folder` or anywhere below it. FileNotFoundError says where it comes from, `origin`."""
    direct = folder / path
    found = [direct] if direct.is_file() else sorted(folder.rglob(path))
    if not found:
        raise FileNotFoundError(f"{path} is not in {folder} or below it; get it by: {origin}")
    return found[0]


def clone(repository: str) -> str:
    """How to get a file of a GitHub repository."""
    return f"git clone --depth 1 https://github.com/{repository} FOLDER/{repository.split('/')[-1]}"


def integers(file: Path) -> list[list[int]]:
    """The numbers of each line that has any."""
    return [[int(word) for word in line.split()] for line in file.read_text().splitlines() if line.strip()]


def write(out: Path, name: str, columns: dict[str, np.ndarray | list[list[str]]]) -> None:
    """One parquet file, `out/name.parquet`."""
    out.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), out / f"{name}.parquet")


def expect(what: str, found: int, published: int) -> None:
    """ValueError unless the files hold what the published set does: another version would compare with nothing."""
    if found != published:
        raise ValueError(f"the files hold {found:,} {what} and the published set {published:,}: another version of it?")
