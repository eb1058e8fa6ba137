"""Predictions as parquet files: written by each rank, read as one table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from modules.batch import RequestBatch
from modules.loss.base import TaskLoss
from modules.loss.tasks import Loss, TaskLosses
from train.metrics import history_lengths


class PredictionWriter:
    """One parquet file a rank: `part-<rank>.parquet` in `folder`."""

    def __init__(self, folder: Path, tasks: tuple[str, ...], losses: TaskLosses, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.tasks, self.losses = tasks, losses
        columns: list[tuple[str, pa.DataType]] = [(name, pa.int64()) for name in ("row", "request", "group", "events")]
        columns.append(("weight", pa.float32()))
        for task, loss in losses.by_task.items():
            columns += [(f"{task}_{name}", pa.float32()) for name in _columns(loss)]
        self._schema = pa.schema(columns)
        self._writer = pq.ParquetWriter(folder / f"part-{rank:05d}.parquet", self._schema)

    def write(self, batch: RequestBatch, logits: Tensor) -> None:
        logits = logits.float().cpu()
        events = history_lengths(batch).sum(0)[batch.owner]
        request = batch.row[batch.candidate_offsets[batch.owner]]  # its first candidate names it
        columns = [column.cpu() for column in (batch.row, request, batch.group, events, batch.weights[:, 0])]
        of_tasks = logits.split(self.losses.outputs, dim=1)
        for task, (loss, own) in enumerate(zip(self.losses.by_task.values(), of_tasks, strict=True)):
            assert isinstance(loss, TaskLoss)
            columns += [batch.labels[:, task].cpu(), *own.unbind(1)][: 2 if loss.outputs == 1 else 1]
            columns += loss.predict(own).view(logits.shape[0], loss.outputs).unbind(1)
        self._writer.write_batch(pa.record_batch([column.numpy() for column in columns], schema=self._schema))

    def close(self) -> None:
        self._writer.close()


def _columns(loss: Loss) -> list[str]:
    """What predictions say of a task: classes have a probability each, others their logit and what it predicts."""
    if loss.metrics == "classes":
        assert isinstance(loss, TaskLoss)
        return ["label", *(f"probability_{number}" for number in range(loss.outputs))]
    return ["label", "logit", "probability" if loss.metrics == "binary" else "prediction"]


def read_predictions(folder: Path) -> dict[str, np.ndarray]:
    """Columns of every rank's file, ordered by source row."""
    table = pq.read_table(folder).sort_by("row")
    return {name: table[name].to_numpy() for name in table.column_names}
