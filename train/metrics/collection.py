"""`MetricSet`: every metric of every task, accumulated on the device and computed over all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from modules.core.import_object import import_object
from train.metrics.auc import auc, auprc, streaming_auc, streaming_auc_bound
from train.metrics.gauc import gauc_means
from train.metrics.histogram import NUM_BINS, ScoreHistogram, bin_index, class_weights
from train.metrics.ne import log_loss, normalized_entropy, recalibrated_log_loss
from train.metrics.ranking import ranking_names, ranking_sums

OwnMetric = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor | float]
"""Of logits, labels (0 or 1), weights and groups [N] of the rows of all ranks whose label was observed: one number."""
BUILT_IN = (
    "log_loss", "ne", "ne_own_rate", "ne_recalibrated", "auc", "auprc", "gauc", "gauc_unweighted", "auc_error_bound",
    "calibration", "label_rate", "examples", "mrr", "mrr_all", "ranked_requests",
)  # fmt: skip


def own_metrics(paths: Sequence[str]) -> dict[str, OwnMetric]:
    """The named functions by their names. ValueError for a name that another metric has, and if an import fails."""
    found: dict[str, OwnMetric] = {}
    for path in paths:
        name = path.rpartition(".")[2]
        if name in BUILT_IN or name in found:
            raise ValueError(
                f"tracking.metrics={path}: another metric is called {name}; rename the function, e.g. own_{name}"
            )
        found[name] = import_object(path, "tracking.metrics")
    return found


NUM_SUMS = 5  # a task's rows, weight, weighted labels, weighted predictions, weighted log loss


class MetricSet:
    """Log loss, NE, AUC, GAUC and calibration per task, equal on every rank and equal to one process seeing all rows.

    `update` never syncs with the host. `compute` and `histograms` are collectives once `torch.distributed` is
    initialised: all ranks call them, ranks that saw no row too.

    With `exact_auc` the rows are kept (12 bytes a task and 8) and gathered onto every rank, which makes AUC exact and
    GAUC possible: for evaluation. Without, memory is constant and AUC comes from a histogram: for training.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        base_rates: Mapping[str, float],
        device: torch.device,
        *,
        exact_auc: bool,
        own: Mapping[str, OwnMetric] | None = None,
        top_k: Sequence[int] = (),
    ) -> None:
        """`base_rates`: positive rate of the training data by task, which NE is normalised by; `own`, by name, are
        further metrics where AUC is exact. `top_k`: the k of NDCG and recall within requests, beside MRR; none: no
        ranking within requests.
        """
        missing = [task for task in tasks if task not in base_rates]
        if missing:
            raise ValueError(
                f"base_rates lacks {missing}, it has {sorted(base_rates)}; expected e.g. {{{missing[0]!r}: 0.1}}"
            )
        for task in tasks:
            if not 0 <= base_rates[task] <= 1:
                raise ValueError(f"base_rates[{task!r}] is {base_rates[task]}, expected a share of rows such as 0.1")
        self.tasks, self.base_rates = list(tasks), {task: float(base_rates[task]) for task in tasks}
        self.device, self.exact_auc, self.own = device, exact_auc, dict(own or {})
        self.top_k = sorted(set(top_k))
        self.num_sums = NUM_SUMS + (2 + len(ranking_names(self.top_k)) if top_k else 0)
        # Sums and histograms share one buffer, so that one all-reduce carries them.
        self._state = torch.zeros(len(tasks) * (self.num_sums + 2 * NUM_BINS), dtype=torch.float64, device=device)
        self._values: list[Tensor] = []  # [C, 3 * tasks] float32: logits, labels, weights
        self._groups: list[Tensor] = []  # [C] int64

    def reset(self) -> None:
        self._state.zero_()
        self._values.clear()
        self._groups.clear()

    @torch.no_grad()
    def update(
        self, logits: Tensor, labels: Tensor, weights: Tensor, group: Tensor, candidate_offsets: Tensor | None = None
    ) -> None:
        """Add C rows: logits, labels in {0, 1, NaN = not observed} and weights [C, tasks], group [C] int64.

        Ranking within requests needs `candidate_offsets` [R + 1] int64: request r has rows offsets[r]:offsets[r + 1].
        A row whose label was not observed counts in no metric of that task, whatever its logit is.
        """
        expected = (group.shape[0], len(self.tasks))
        for name, tensor in {"logits": logits, "labels": labels, "weights": weights}.items():
            if tensor.shape != expected:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, expected [C, tasks] = {list(expected)}")
        sums, histogram = self._views(self._state)
        observed = ~labels.isnan()
        weight = torch.where(observed, weights, 0.0).double()
        prediction = torch.where(observed, torch.sigmoid(logits.double()), 0.0)
        loss = torch.where(observed, log_loss(logits, labels), 0.0)
        by_class = class_weights(labels, weights)
        parts = [observed, weight, by_class[..., 0], weight * prediction, weight * loss]
        sums[:, :NUM_SUMS] += torch.stack(parts, dim=-1).sum(0)
        if self.top_k:
            if candidate_offsets is None:
                raise ValueError(f"candidate_offsets is None; top_k={self.top_k} needs those of the batch, [R + 1]")
            for task, rows in enumerate(zip(logits.T, labels.T, weights.T, strict=True)):
                sums[task, NUM_SUMS:] += ranking_sums(*rows, candidate_offsets, self.top_k)
        cell = bin_index(logits) + NUM_BINS * torch.arange(len(self.tasks), device=self.device)
        histogram.view(-1, 2).index_add_(0, cell.flatten(), by_class.flatten(0, 1))
        if self.exact_auc:
            self._values.append(torch.cat([logits.float(), labels.float(), weights.float()], dim=1))
            self._groups.append(group.clone())

    def compute(self) -> dict[str, float]:
        """Metrics since the last reset, under `task/name`.

        log_loss (nats, weighted mean), ne, ne_own_rate (by the label rate of these rows), auc, calibration (sum of
        predictions over sum of labels), label_rate, examples (rows with an observed label). Only if exact: auprc, gauc,
        gauc_unweighted, ne_recalibrated and those of `own`; only if not: auc_error_bound. With `top_k` also those of
        `ranking_names`, and ranked_requests, which those are averaged over. A metric without meaning is NaN: of no row,
        AUC of one class, calibration without positives, NE with a base rate of 0 or 1.
        """
        sums, histogram = self._views(self._reduced())
        ranking = self._exact_ranking() if self.exact_auc else _streaming_ranking(histogram)
        examples, weight, label, prediction, loss = sums[:, :NUM_SUMS].unbind(dim=1)
        columns = {
            "log_loss": loss / weight,
            **ranking,
            "calibration": torch.where(label > 0, prediction / label, torch.nan),
            "label_rate": label / weight,
            "examples": examples,
        }
        if self.top_k:
            requests, total, *within = sums[:, NUM_SUMS:].unbind(dim=1)
            means = {name: value / total for name, value in zip(ranking_names(self.top_k), within, strict=True)}
            columns |= means | {"ranked_requests": requests}
        # A NaN score falls into some bin all the same, so the loss decides. Exact AUC is NaN by itself then.
        columns["auc"] = torch.where(loss.isnan(), torch.nan, columns["auc"])
        result: dict[str, float] = {}
        for task, row in zip(self.tasks, torch.stack(list(columns.values()), dim=1).tolist(), strict=True):
            values = dict(zip(columns, row, strict=True))
            mean, rate = values["log_loss"], self.base_rates[task]
            own = normalized_entropy(mean, values["label_rate"])
            values = {"ne": normalized_entropy(mean, rate), "ne_own_rate": own, **values}
            if self.exact_auc:
                values["ne_recalibrated"] = normalized_entropy(values["ne_recalibrated"], rate)
            result |= {f"{task}/{name}": value for name, value in values.items()}
        return result

    def histograms(self) -> dict[str, ScoreHistogram]:
        """Score histogram of each task over all ranks, on the CPU: for calibration curves and plots."""
        _, tables = self._views(self._reduced().cpu())
        return {task: ScoreHistogram(*table.unbind(dim=1)) for task, table in zip(self.tasks, tables, strict=True)}

    def _views(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Sums [tasks, num_sums] and histograms [tasks, bins, 2] (positive, negative weight) in a state buffer."""
        num_tasks = len(self.tasks)
        sums, tables = state.tensor_split([num_tasks * self.num_sums])
        return sums.view(num_tasks, self.num_sums), tables.view(num_tasks, NUM_BINS, 2)

    def _reduced(self) -> Tensor:
        state = self._state.clone()
        if dist.is_initialized():
            dist.all_reduce(state)
        return state

    def _exact_ranking(self) -> dict[str, Tensor]:
        num_tasks = len(self.tasks)
        # The empty head gives the type and shape on a rank without rows.
        values = torch.cat([torch.empty(0, 3 * num_tasks, device=self.device), *self._values])
        group = torch.cat([torch.empty(0, dtype=torch.int64, device=self.device), *self._groups])
        if dist.is_initialized():
            values, group = gather_rows(values), gather_rows(group)
        of_tasks = []
        for scores, labels, weights in zip(*(column.unbind(dim=1) for column in values.chunk(3, dim=1)), strict=True):
            row = scores, labels, weights
            by_impressions, unweighted = gauc_means(scores, labels, weights, group)
            found = {"auc": auc(*row), "auprc": auprc(*row), "gauc": by_impressions, "gauc_unweighted": unweighted}
            found["ne_recalibrated"] = recalibrated_log_loss(*row)  # `compute` divides by the entropy
            of_tasks.append(found | {name: self._own(name, row, group) for name in self.own})
        return {name: torch.stack([found[name] for found in of_tasks]) for name in of_tasks[0]}

    def _own(self, name: str, row: tuple[Tensor, Tensor, Tensor], group: Tensor) -> Tensor:
        observed = ~row[1].isnan()
        scores, labels, weights = (column[observed] for column in row)
        try:
            value = self.own[name](scores, labels, weights, group[observed])
        except Exception as error:
            error.add_note(f"raised by the metric {name} of tracking.metrics, on {len(scores)} rows")
            raise
        value = torch.as_tensor(value, dtype=torch.float64, device=self.device)
        if value.dim():
            raise ValueError(f"the metric {name} of tracking.metrics must be one number, got {list(value.shape)}")
        return value


def gather_rows(rows: Tensor) -> Tensor:
    """The rows [n_rank, ...] of all ranks, in rank order, on every rank; n may differ and be 0."""
    world = dist.get_world_size()
    count = torch.tensor([rows.shape[0]], device=rows.device)
    counts = [torch.empty_like(count) for _ in range(world)]
    dist.all_gather(counts, count)
    sizes = [int(size) for size in counts]
    # Not every backend gathers uneven shapes: all ranks send as many rows as the largest, and the padding is removed.
    sent = rows.new_zeros(max(sizes), *rows.shape[1:])
    sent[: rows.shape[0]] = rows
    received = [torch.empty_like(sent) for _ in range(world)]
    dist.all_gather(received, sent)
    return torch.cat([part[:size] for part, size in zip(received, sizes, strict=True)])


def _streaming_ranking(tables: Tensor) -> dict[str, Tensor]:
    histograms = [ScoreHistogram(*table.unbind(dim=1)) for table in tables]
    return {
        "auc": torch.stack([streaming_auc(histogram) for histogram in histograms]),
        "auc_error_bound": torch.stack([streaming_auc_bound(histogram) for histogram in histograms]),
    }
