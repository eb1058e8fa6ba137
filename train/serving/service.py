"""Scores of requests in plain Python: the reader and the scorer of an export together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from train.data.reader import RequestReader
from train.serving.scorer import Scorer


class Service:
    """`service(requests)`; may be called from several threads at once."""

    def __init__(self, scorer: Scorer, read: RequestReader) -> None:
        self.scorer, self.read = scorer, read

    @classmethod
    def from_pretrained(cls, folder: Path | str) -> Self:
        """ValueError for a folder that is no export of a run of data=events."""
        return cls(Scorer(folder), RequestReader.from_pretrained(folder))

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.scorer.spec.tasks

    def __call__(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, list[Any]]]:
        """For each request, by task, one prediction a candidate: a number, or for a task of several classes a list.

        Requests are those of `RequestReader.batch`. ValueError for one that is wrong.
        """
        if not requests:
            return []
        batch = self.read.batch(requests)
        ends = batch.candidate_offsets.tolist()
        columns = self._by_task(self.scorer(batch).tolist())
        return [{task: values[first:end] for task, values in columns.items()} for first, end in pairwise(ends)]

    def _by_task(self, rows: list[list[float]]) -> dict[str, list[Any]]:
        spec, columns, first = self.scorer.spec, {}, 0
        for task, width in zip(spec.tasks, spec.outputs or [1] * len(spec.tasks), strict=True):
            end = first + width
            columns[task] = [row[first] for row in rows] if width == 1 else [row[first:end] for row in rows]
            first = end
        return columns
