"""The metrics that fit each task's loss, together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from modules.loss.base import Requests, TaskLoss
from modules.loss.tasks import TaskLosses
from train.metrics.collection import MetricSet, OwnMetric
from train.metrics.histogram import ScoreHistogram
from train.metrics.kinds import ClassSums, OrderSums, RealSums, TaskSums

DEFAULT_TOP_K = [10]
"""Of next items, where `tracking.top_k` names none."""


class TaskMetrics:
    """A `MetricSet` of the binary tasks and the sums of each other one; used as a `MetricSet` is.

    Tasks of next items have no metrics of rows: see `train.evaluate.catalogue`.
    """

    def __init__(
        self,
        losses: TaskLosses,
        base_rates: Mapping[str, float],
        device: torch.device,
        *,
        max_candidates: int,
        exact_auc: bool,
        own: Mapping[str, OwnMetric] | None = None,
        top_k: Sequence[int] = (),
    ) -> None:
        """`max_candidates` of a request; the rest as in `MetricSet`."""
        self.losses, self.max_candidates = losses, max_candidates
        self.top_k = sorted(set(top_k))
        kinds = {task: loss.metrics for task, loss in losses.by_task.items()}
        self._binary = [task for task, kind in kinds.items() if kind == "binary"]
        self._place = {task: place for place, task in enumerate(kinds)}
        starts = torch.tensor([0, *losses.outputs]).cumsum(0).tolist()
        self._columns = {task: slice(starts[i], starts[i + 1]) for task, i in self._place.items()}
        self.base_rates = {task: base_rates[task] for task in self._binary}
        self.set = None
        if self._binary:
            self.set = MetricSet(self._binary, self.base_rates, device, exact_auc=exact_auc, own=own, top_k=top_k)
        self._sums: dict[str, TaskSums] = {}
        for task, loss in losses.by_task.items():
            if isinstance(loss, TaskLoss) and loss.metrics != "binary":
                self._sums[task] = _sums(loss, device, self.top_k, exact_auc)
        self._all_binary = len(self._binary) == len(kinds)

    @property
    def best(self) -> dict[str, tuple[str, bool]]:
        """Of tasks that are not binary: which metric decides what is best, and whether a larger one is better."""
        if self.losses.next_item:
            k = max(self.top_k or DEFAULT_TOP_K)
            return dict.fromkeys(self.losses.by_task, (f"ndcg@{k}", True))
        return {task: sums.best for task, sums in self._sums.items()}

    @property
    def measure(self) -> str:
        """What `Progress.judge` calls NE, in words."""
        names = [f"1 - {name}" if larger else name for name, larger in self.best.values()]
        names = list(dict.fromkeys(["NE"] * bool(self._binary) + ["NE" if name == "ne" else name for name in names]))
        return names[0] if len(names) == 1 else f"the mean of {' and '.join(names)}"

    def reset(self) -> None:
        if self.set is not None:
            self.set.reset()
        for sums in self._sums.values():
            sums.reset()

    @torch.no_grad()
    def update(
        self, logits: Tensor, labels: Tensor, weights: Tensor, group: Tensor, candidate_offsets: Tensor | None = None
    ) -> None:
        """Add C rows: logits [C, outputs], the rest as in `MetricSet.update`."""
        if self.losses.next_item:
            return
        if self._all_binary and self.set is not None:
            self.set.update(logits, labels, weights, group, candidate_offsets)
            return
        if self.set is not None:
            places = [self._place[task] for task in self._binary]
            chosen = torch.cat([logits[:, self._columns[task]] for task in self._binary], dim=1)
            self.set.update(chosen, labels[:, places], weights[:, places], group, candidate_offsets)
        requests = None
        if candidate_offsets is not None:
            rows = torch.arange(candidate_offsets.shape[0] - 1, device=labels.device)
            owner = torch.repeat_interleave(rows, candidate_offsets.diff(), output_size=labels.shape[0])
            requests = Requests(candidate_offsets, owner, self.max_candidates)
        for task, sums in self._sums.items():
            place = self._place[task]
            sums.update(logits[:, self._columns[task]], labels[:, place], weights[:, place], requests)

    def compute(self) -> dict[str, float]:
        """Metrics since the last reset, over all ranks, under `task/name`."""
        values = self.set.compute() if self.set is not None else {}
        for task, sums in self._sums.items():
            total = sums.sums.clone()
            if dist.is_initialized():
                dist.all_reduce(total)
            found = sums.values(total.cpu()) | sums.of_rows()
            values |= {f"{task}/{name}": value for name, value in found.items()}
        return values

    def histograms(self) -> dict[str, ScoreHistogram]:
        """Of the binary tasks."""
        return self.set.histograms() if self.set is not None else {}


SUMS: dict[str, Callable[[TaskLoss, torch.device, Sequence[int], bool], TaskSums]] = {
    "real": lambda loss, device, top_k, exact: RealSums(loss, device, exact),
    "classes": lambda loss, device, top_k, exact: ClassSums(loss, device),
    "order": lambda loss, device, top_k, exact: OrderSums(loss, device, top_k),
}
"""By `TaskLoss.metrics`, of tasks that are not binary."""


def _sums(loss: TaskLoss, device: torch.device, top_k: Sequence[int], exact: bool) -> TaskSums:
    if loss.metrics not in SUMS:
        known = ", ".join(["binary", *SUMS])
        raise ValueError(f"{type(loss).__name__}.metrics={loss.metrics!r} is no kind of metrics; use one of {known}")
    return SUMS[loss.metrics](loss, device, top_k, exact)
