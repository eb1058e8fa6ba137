"""What each feature is worth to a trained model: `python -m train.commands.importance run_dir=RUN_DIR split=valid`.

Permutation importance: the values of one feature at a time are shuffled among the rows of each batch, which keeps its
distribution and removes its meaning; how much NE rises, and AUC falls, is what the model gets from it. An event type is
one feature, its events with all their fields, and so is a number with its indicator of missing ones. Features with the
same information stand in for one another, so each alone seems to be worth little.

Runs alone or under torchrun. `run_dir=` takes the run's best checkpoint, `checkpoint=` names one; `steps=N` takes the
first N batches only (0: all), each of which goes through the model once for every feature. Further `key=value`
arguments override the checkpoint's configuration. Prints a table, ordered by importance for the first task, and writes
`importance.json` into `out=`, by default a folder beside the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from train.process.imports import lasting

with lasting():
    import torch
    from torch import Tensor
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from modules.batch import FeatureSpec, RequestBatch, VectorFeature, select_rows
    from modules.loss import binary_only
    from modules.precision import in_high_precision
    from train.build import Job
    from train.checkpoint import load as checkpoint
    from train.config.overrides import split_options
    from train.data.features.numeric import INDICATOR
    from train.evaluate import checked_split, split_loader, trained
    from train.metrics import MetricSet
    from train.process import errors
    from train.process.files import write_json
    from train.record.tracking import format_table


def features_of(spec: FeatureSpec) -> list[str]:
    """Every feature, numeric ones too, and every event type; a column that is two of these is one.

    A number and its indicator are one as well.
    """
    dense = (*spec.request_dense, *spec.vendor_dense, *spec.candidate_dense)
    indicators = {name + INDICATOR for name in dense}
    numeric = [name for name in dense if name not in indicators]
    sparse = [feature.name for feature in spec.of_rows]
    vectors = [vector.name for vector in (*spec.request_vectors, *spec.vendor_vectors, *spec.candidate_vectors)]
    events = [event.name for event in spec.histories]
    return list(dict.fromkeys([*sparse, *numeric, *vectors, *events]))


def permuted(batch: RequestBatch, spec: FeatureSpec, name: str, generator: torch.Generator) -> RequestBatch:
    """The batch with the values of one of `features_of` shuffled among its requests, vendors or candidates."""

    def shuffled(count: int) -> Tensor:
        return torch.randperm(count, generator=generator).to(batch.row.device)

    changes: dict[str, Any] = {}
    for side, features, vectors, columns, count in (
        ("request", spec.request, spec.request_vectors, spec.request_columns, batch.num_requests),
        ("candidate", spec.candidate, spec.candidate_vectors, spec.candidate_columns, batch.num_candidates),
    ):
        rows = shuffled(count)
        if name in [feature.name for feature in features]:
            changes[f"{side}_sparse"] = _with_rows(getattr(batch, f"{side}_sparse"), [name], rows)
        if chosen := _columns_of(name, vectors, columns):
            changes[f"{side}_dense"] = _with_columns(getattr(batch, f"{side}_dense"), chosen, rows)
    vendors, chosen = batch.vendors, _columns_of(name, spec.vendor_vectors, spec.vendor_columns)
    if vendors is not None and (chosen or name in [feature.name for feature in spec.vendor]):
        rows = shuffled(vendors.num_vendors)
        changes["vendors"] = replace(
            vendors,
            sparse=_with_rows(vendors.sparse, [name], rows),
            dense=_with_columns(vendors.dense, chosen, rows),
        )
    for event in spec.histories:
        if event.name == name:
            rows = shuffled(batch.num_requests)
            changes["histories"] = _with_rows(batch.histories, event.keys, rows)
            changes["history_times"] = _with_rows(batch.history_times, [name], rows)
    return replace(batch, **changes)


def _columns_of(name: str, vectors: Sequence[VectorFeature], columns: Sequence[str]) -> list[int]:
    """Where the numbers of a vector are, or a number and its indicator."""
    own = next((vector.columns for vector in vectors if vector.name == name), (name, name + INDICATOR))
    return [columns.index(each) for each in own if each in columns]


def _with_columns(numbers: Tensor, columns: list[int], rows: Tensor) -> Tensor:
    """Numbers [N, m] with the given rows of some columns."""
    numbers = numbers.clone()
    numbers[:, columns] = numbers[rows][:, columns]
    return numbers


def _with_rows(features: KeyedJaggedTensor, names: Sequence[str], rows: Tensor) -> KeyedJaggedTensor:
    parts = features.split([1] * len(features.keys()))
    return KeyedJaggedTensor.concat([select_rows(part, rows) if part.keys()[0] in names else part for part in parts])


@torch.no_grad()
def importance(job: Job, split: str, steps: int) -> dict[str, dict[str, float]]:
    """Rise of each task's NE, in per cent of the model's, and fall of its AUC; by feature, by the first task's NE."""
    spec, rates, device = job.source.spec, job.source.label_rates(), job.world.device
    generator = torch.Generator().manual_seed(0)
    sets = {name: MetricSet(spec.tasks, rates, device, exact_auc=False) for name in ["", *features_of(spec)]}
    job.model.eval()
    with in_high_precision(job.ranking_model):
        for batch in islice(split_loader(job, split), steps or None):
            batch = batch.to(device, non_blocking=True)
            for name, metrics in sets.items():
                with job.autocast():
                    logits = job.model(permuted(batch, spec, name, generator) if name else batch)
                metrics.update(logits, batch.labels, batch.weights, batch.group)
    whole, *others = (metrics.compute() for metrics in sets.values())
    worth = {
        name: {
            f"{task}/{key}": value
            for task in spec.tasks
            for key, value in (
                ("ne_rise_percent", 100 * (values[f"{task}/ne"] / whole[f"{task}/ne"] - 1)),
                ("auc_fall", whole[f"{task}/auc"] - values[f"{task}/auc"]),
            )
        }
        for name, values in zip(features_of(spec), others, strict=True)
    }
    first = f"{spec.tasks[0]}/ne_rise_percent"
    return dict(sorted(worth.items(), key=lambda item: -item[1][first]))


def main(arguments: list[str]) -> dict[str, dict[str, float]]:
    defaults = {"run_dir": "", "checkpoint": "", "split": "valid", "steps": "0", "out": ""}
    options, overrides = split_options(arguments, defaults, "run_dir=RUN_DIR split=valid")
    split = checked_split(options["split"])
    if not options["steps"].isdecimal():
        raise ValueError(f"steps={options['steps']} must be a number of batches, e.g. steps=100, or 0 for all")
    path = checkpoint.resolve(options["run_dir"], options["checkpoint"])
    out = Path(options["out"] or path.with_name(f"{path.name}-importance-{split}"))
    with trained(path, overrides, out) as job:
        binary_only(job.config.tasks, "train.commands.importance")
        worth = importance(job, split, int(options["steps"]))
        if job.world.is_first:
            write_json(out / "importance.json", worth)
            print(f"{format_table(worth, 'feature')}\n\nimportance: {out / 'importance.json'}")
        job.world.barrier()
    return worth


if __name__ == "__main__":
    errors.run(main)
