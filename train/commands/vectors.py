"""Vectors that a trained model knows things by, as files: `python -m train.commands.vectors run_dir=RUN_DIR of=NAMES`.

`of=` names what is written, several with commas, each into a folder of its name below `out=` (RUN_DIR/vectors), with a
parquet file for each rank:

- `table.NAME`: the rows of an embedding table. Columns `row` (in the table), `id` and `vector`;
- `items`, of next-item models and two towers: the vectors of the whole catalogue, in the same columns;
- `requests`: the vector of each request of `split=` (test; several with commas). Columns `split`, `user`, `time`
  (seconds since 1970), `rows` (of its candidates, as predictions number them) and `vector`. The product of those of
  next-item models and two towers with the vectors of items is the score. docs/scoring.md says what those of ranking
  models are.

`columns=a,b` adds columns of the files of a data=events run to the requests, as text and of a request's first row, such
as its id; `vector=NAME` names the column of vectors. Ids are text. Tables whose ids are hashed (data.id_map=hash) have
no `id`.

Runs alone or under torchrun. `run_dir=` takes the run's best checkpoint, or its newest when none was validated;
`checkpoint=` names one. Further `key=value` arguments override its configuration, e.g.
"data.test_files=[tomorrow.parquet]".
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Self

from train.process.imports import lasting

with lasting():
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from torch import Tensor

    from modules.batch import UNKNOWN_ID
    from modules.models.retrieval import RetrievalModel
    from modules.precision import in_high_precision
    from train.build import Job
    from train.checkpoint import load as checkpoint
    from train.config.overrides import split_options
    from train.config.schema import EventsConfig
    from train.data.events.keys import RowKeys
    from train.data.features import mapping
    from train.data.source import PreparedSource
    from train.data.storage.store import file_name
    from train.evaluate import checked_split, split_loader, trained
    from train.evaluate.catalogue import catalogue_items
    from train.evaluate.vectors import check_request_vectors, request_vectors, table_rows
    from train.process import errors

CHUNK = 16_384
"""Ids that are looked up together by a rank."""
TABLE = "table."
OF_REQUESTS = ("split", "user", "time", "rows")


class VectorWriter:
    """One parquet file a rank, `part-<rank>.parquet` in `folder`: columns, and behind them vectors of float32."""

    def __init__(self, folder: Path, job: Job, name: str, about: dict[str, str]) -> None:
        """`name`: of the column of vectors; `about`: what the files say of themselves. Removes files of before."""
        if job.world.is_first:
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier call, perhaps on more ranks
            folder.mkdir(parents=True)
        job.world.barrier()
        self._path = folder / f"part-{job.world.rank:05d}.parquet"
        self._name, self._about = name, about
        self._writer: pq.ParquetWriter | None = None

    def write(self, columns: dict[str, pa.Array], vectors: Tensor) -> None:
        """vectors [N, width]."""
        numbers = pa.array(vectors.float().cpu().numpy().ravel())
        each = columns | {self._name: pa.FixedSizeListArray.from_arrays(numbers, vectors.shape[1])}
        batch = pa.record_batch(list(each.values()), names=list(each))
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, batch.schema.with_metadata(self._about))
        self._writer.write_batch(batch.replace_schema_metadata(self._about))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.close()


def rows_of_ids(job: Job, table: str) -> Iterator[pa.RecordBatch]:
    """This rank's chunks of the rows that ids have in a table, with columns `row` and, if they are known, `id`; on all
    ranks as many, of which some may be empty. Rows of a chunk are neighbours."""
    source, rank, size = job.source, job.world.rank, job.world.size
    file = Path()
    if isinstance(source, PreparedSource):
        file = source.folder / mapping.FOLDER / file_name(table, ".parquet")
    if file.is_file():
        pieces = (
            piece.rename_columns(["row", "id"])
            for piece in pq.ParquetFile(file).iter_batches(CHUNK, columns=["row", "value"])
        )
    else:
        end = source.spec.tables[table]
        begins = range(UNKNOWN_ID + 1, end, CHUNK)
        pieces = (pa.record_batch([pa.array(range(begin, min(begin + CHUNK, end)))], ["row"]) for begin in begins)
    while group := list(islice(pieces, size)):
        yield group[rank] if rank < len(group) else group[0].slice(0, 0)


def write_rows(job: Job, table: str, writer: VectorWriter, *, scored: bool) -> None:
    """This rank's share of the vectors of a table's ids: as items are `scored`, or the rows themselves."""
    for piece in rows_of_ids(job, table):
        rows = torch.from_numpy(piece["row"].to_numpy(zero_copy_only=False).astype(np.int64))
        asked = rows if len(rows) else rows.new_full((1,), UNKNOWN_ID)  # a rank without a share takes part
        if scored:
            found = catalogue_items(job, int(asked[0]), int(asked[-1]) + 1)
        else:
            found = table_rows(job, table, asked)
        writer.write({name: piece[name] for name in piece.schema.names}, found[: len(rows)])


def write_requests(job: Job, splits: Sequence[str], columns: Sequence[str], writer: VectorWriter) -> None:
    """This rank's share of the vectors of the requests of these splits, with these columns of the files."""
    data, user, keys = job.config.data, None, None
    if isinstance(data, EventsConfig):
        user = data.user
        keys = RowKeys(data, list(dict.fromkeys([*([user] if user else []), *columns])))
    for split in splits:
        for batch in split_loader(job, split):
            vectors = request_vectors(job, batch.to(job.world.device, non_blocking=True))
            rows, offsets = batch.row.numpy(), batch.candidate_offsets.numpy()
            real = np.flatnonzero(np.diff(offsets))  # others are the share of a rank without one
            first = rows[offsets[real]]
            if keys is None:
                users = pa.array(batch.group.numpy()[offsets[real]]).cast(pa.string())
            else:
                users = keys.of(user, first) if user else pa.nulls(len(real), pa.string())
            found = {
                "split": pa.array([split] * len(real), pa.string()),
                "user": users,
                "time": pa.array(batch.request_time.numpy()[real]),
                "rows": pa.ListArray.from_arrays(
                    pa.array(np.append(offsets[real], offsets[-1:]), pa.int32()), pa.array(rows)
                ),
                **{name: keys.of(name, first) for name in columns if keys is not None},
            }
            writer.write(found, vectors[torch.from_numpy(real).to(vectors.device)])


def check(job: Job, names: Sequence[str], columns: Sequence[str], vector: str) -> None:
    """ValueError for what the model does not have, and for columns that cannot be."""
    spec = job.source.spec
    looked_up = list(dict.fromkeys(table for _, table in spec.lookups()))
    managed = job.config.model.managed_tables
    for name in names:
        table = name.removeprefix(TABLE)
        if name == "requests":
            check_request_vectors(job)
        elif name == "items":
            if not isinstance(job.arch, RetrievalModel):
                raise ValueError(
                    f"of=items: model.name={job.config.model.name} scores items together with their requests and has "
                    f"no vectors of them; sasrec, hstu and two_tower have. Its tables are {', '.join(looked_up)}, e.g. "
                    f"of={TABLE}{spec.candidate[0].table}"
                )
        elif table not in looked_up:
            raise ValueError(
                f"of={name}: the tables of this run are {', '.join(looked_up)}, e.g. of={TABLE}{looked_up[0]}"
            )
        elif table in managed and job.config.data.id_map == "hash":
            raise ValueError(
                f"of={name}: it is one of model.managed_tables and its ids are hashed, so nothing names them"
            )
    if columns and not isinstance(job.config.data, EventsConfig):
        raise ValueError(
            f"columns={','.join(columns)} are of the files of data=events; this run is of {job.config.data.name}"
        )
    if taken := sorted({vector} & {*OF_REQUESTS, "row", "id"} | {*columns} & {*OF_REQUESTS, vector}):
        raise ValueError(
            f"{taken[0]!r} would be two columns; choose another, e.g. columns=request_id or vector=teacher"
        )


def parsed(of: str) -> list[str]:
    """The names in `of=`. ValueError for what can be none."""
    names = [name for name in of.split(",") if name]
    wrong = [name for name in names if name not in ("items", "requests") and not name.startswith(TABLE)]
    if wrong or not names:
        raise ValueError(f"of={of}: name requests, items or table.NAME, e.g. of=items,requests")
    return list(dict.fromkeys(names))


def main(arguments: list[str]) -> Path:
    defaults = {
        "run_dir": "", "checkpoint": "", "of": "", "split": "test", "columns": "", "vector": "vector", "out": "",
    }  # fmt: skip
    options, overrides = split_options(arguments, defaults, "run_dir=RUN_DIR of=items,requests")
    names, vector = parsed(options["of"]), options["vector"]
    columns = [each for each in options["columns"].split(",") if each]
    splits = [checked_split(each) for each in options["split"].split(",")]
    path = checkpoint.resolve(options["run_dir"], options["checkpoint"])
    out = Path(options["out"] or path.absolute().parent.parent / "vectors")
    with trained(path, overrides, out) as job, torch.no_grad(), in_high_precision(job.ranking_model):
        check(job, names, columns, vector)
        job.model.eval()
        about = {"model": job.config.model.name, "checkpoint": str(path)}
        for name in names:
            with VectorWriter(out / name, job, vector, about) as writer:
                if name == "requests":
                    write_requests(job, splits, columns, writer)
                else:
                    items = name == "items"
                    table = job.source.spec.candidate[0].table if items else name.removeprefix(TABLE)
                    write_rows(job, table, writer, scored=items)
            job.world.barrier()
            if job.world.is_first:
                written = sum(pq.read_metadata(file).num_rows for file in (out / name).iterdir())
                print(f"{name}: {written:,} vectors in {out / name}")
    return out


if __name__ == "__main__":
    errors.run(main)
