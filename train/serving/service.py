"""Scores of requests in plain Python: the reader and the scorer of an export together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from train.data.reader import RequestReader
from train.serving.scorer import Scorer

MOST_PADDED = 1 << 16
"""Rows of a batch of requests that are padded to the longest. On a CPU that takes memory for each of them."""


class Service:
    """`service(requests)`; may be called from several threads at once."""

    def __init__(self, scorer: Scorer, read: RequestReader) -> None:
        self.scorer, self.read = scorer, read

    @classmethod
    def from_pretrained(cls, folder: Path | str, user_side_bytes: int = 0) -> Self:
        """`user_side_bytes`: see `Scorer`. ValueError for a folder that is no export of a run of data=events."""
        return cls(Scorer(folder, user_side_bytes), RequestReader.from_pretrained(folder))

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.scorer.spec.tasks

    def __call__(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, list[Any]]]:
        """For each request, by task, one prediction a candidate: a number, or for a task of several classes a list;
        None in place of a number that overflowed in the model.

        Requests are those of `RequestReader.batch`. ValueError for one that is wrong.
        """
        if not requests:
            return []
        on_cpu = self.scorer.device.type == "cpu"
        groups = alike([_length(each) for each in requests]) if on_cpu else [[*range(len(requests))]]
        try:
            batches = [self.read.batch([requests[place] for place in group]) for group in groups]
        except ValueError:
            self.read.batch(requests)  # numbers them as the caller does
            raise
        results: list[dict[str, list[Any]]] = [{}] * len(requests)
        with self.scorer.gate.passing():  # all of a call by one version
            for group, batch in zip(groups, batches, strict=True):
                columns = self._by_task(_numbers(self.scorer(batch).cpu()))
                for place, (first, end) in zip(group, pairwise(batch.candidate_offsets.tolist()), strict=True):
                    results[place] = {task: values[first:end] for task, values in columns.items()}
        return results

    def check(self, requests: Sequence[Mapping[str, Any]]) -> None:
        """ValueError for requests that a call refuses."""
        if requests:
            self.scorer.check(self.read.batch(requests))

    def _by_task(self, rows: list[list[float | None]]) -> dict[str, list[Any]]:
        spec, columns, first = self.scorer.spec, {}, 0
        for task, width in zip(spec.tasks, spec.outputs or [1] * len(spec.tasks), strict=True):
            end = first + width
            columns[task] = [row[first] for row in rows] if width == 1 else [row[first:end] for row in rows]
            first = end
        return columns


def _numbers(scores: Tensor) -> list[list[float | None]]:
    """What JSON can say: it has neither NaN nor infinity."""
    if scores.isfinite().all():
        return scores.tolist()
    return [[score if math.isfinite(score) else None for score in row] for row in scores.tolist()]


def _length(request: Any) -> int:
    """Of its candidates or the longest of its histories, if it is a request."""
    if not isinstance(request, Mapping):
        return 1
    histories = request.get("histories")
    lists = [request.get("candidates"), *(histories.values() if isinstance(histories, Mapping) else ())]
    return max((len(each) for each in lists if isinstance(each, Sequence)), default=1)


def alike(lengths: Sequence[int]) -> list[list[int]]:
    """Places of requests by batch: all in one, unless `MOST_PADDED` needs those of like lengths to be together."""
    if len(lengths) * max(lengths) <= MOST_PADDED:
        return [list(range(len(lengths)))]
    groups: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > MOST_PADDED:
            groups.append([])
        groups[-1].append(place)
    return groups
