"""A gradient-boosted baseline: `python -m train.commands.baseline data=NAME runtime.run_dir=runs/trees [key=value]`.

Trains LightGBM (`pip install lightgbm`), one model a task, on what a training with the same arguments reads: rows,
splits, labels, weights, features and statistics (`train.data.flat` says how they become columns). Of histories it sees
lengths, times and how often the candidate's ids are in them. Trees are added until validation stops getting better, and
validation decides whether ids of tables with more than 300 rows are categories or no more than counts.

Writes `config.json`, `results.json` (with the columns' shares of the gain) and the predictions of the test split as a
run does, so that `train.commands.segments` compares it with one (`against=`), and the trees as `TASK.txt`.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train.process.imports import lasting

with lasting():
    import numpy as np
    import torch

    from modules.batch import RequestBatch
    from modules.loss import TaskLosses, binary_only
    from train.config.compose import to_config
    from train.config.environment import to_saved
    from train.config.files import composed
    from train.config.schema import Config
    from train.data import build_source
    from train.data.flat import FlatFeatures
    from train.data.source import Source
    from train.metrics.predictions import PredictionWriter
    from train.metrics.tasks import TaskMetrics
    from train.process import errors
    from train.process.files import new_folder, write_json
    from train.process.logs import setup_logging
    from train.record.tracking import format_table

log = logging.getLogger(__name__)
AT_ONCE = 4096  # requests
FEW = 300  # rows of tables whose ids are always categories
PATIENCE = 50  # trees that validation may be no better for
UNVALIDATED = 200  # trees where there is no validation split


def batches(source: Source, split: str) -> Iterator[RequestBatch]:
    numbers = np.arange(source.num_requests(split))
    for begin in range(0, len(numbers), AT_ONCE):
        yield source.batch(split, numbers[begin : begin + AT_ONCE])


def matrix(source: Source, split: str, features: FlatFeatures) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(columns [C, F], labels [C, tasks], weights [C, tasks]) of a split."""
    parts = [(features.rows(batch), batch.labels.numpy(), batch.weights.numpy()) for batch in batches(source, split)]
    tasks = len(source.spec.tasks)
    empty = np.zeros((0, len(features.names)), np.float32), np.zeros((0, tasks)), np.zeros((0, tasks))
    columns, labels, weights = (np.concatenate(each) for each in zip(*(parts or [empty]), strict=True))
    return columns, labels, weights


def main(arguments: list[str]) -> dict[str, Any]:
    options = parse(arguments)
    _import()
    config = to_config(composed(options.overrides, options.config_dir))
    results = train(config, options)
    print(format_table({split: results[split] for split in ("valid", "test") if split in results}, "split"))
    print(f"run directory: {config.runtime.run_dir}")
    return results


def train(config: Config, options: argparse.Namespace) -> dict[str, Any]:
    """What `results.json` holds."""
    parameters = {
        "num_iterations": options.trees,
        "learning_rate": options.rate,
        "num_leaves": options.leaves,
        "min_data_in_leaf": options.least,
        "feature_fraction": 0.7,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
    }
    lightgbm = _import()
    binary_only(config.tasks, "train.commands.baseline")
    run_dir = _claim(config)
    setup_logging(run_dir, 0)
    source = build_source(config.data)
    config.data.batch_size = config.data.batch_size or AT_ONCE
    losses = TaskLosses(config.tasks, source.spec.tasks)
    losses.check_labels(source.label_bounds())
    write_json(run_dir / "config.json", {"config": to_saved(config), "baseline": parameters})

    started = time.monotonic()
    features = FlatFeatures(source.spec, batches(source, "train"), options.categories)
    train, valid = matrix(source, "train", features), matrix(source, "valid", features)
    log.info("%s training rows of %d columns", f"{len(train[0]):,}", len(features.names))
    boosters: dict[str, Trees] = {}
    gains: dict[str, dict[str, float]] = {}
    for place, task in enumerate(source.spec.tasks):
        boosters[task] = found = _boost(lightgbm, parameters, features, train, valid, place, config.runtime.seed)
        found.booster.save_model(str(run_dir / f"{task.replace('/', '_')}.txt"))
        gain = found.booster.feature_importance("gain")
        names = [features.names[number] for number in found.columns]
        named = zip(names, (gain / max(gain.sum(), 1e-9)).tolist(), strict=True)
        gains[task] = {name: share for name, share in sorted(named, key=lambda each: -each[1]) if share}
        log.info("%s: %d trees; %s", task, found.number, _strongest(gains[task]))

    trees = {task: found.number for task, found in boosters.items()}
    results: dict[str, Any] = {"step": max(trees.values()), "best_step": max(trees.values()), "trees": trees}
    results |= {"seconds": time.monotonic() - started, "label_rates": source.label_rates(), "advice": [], "gain": gains}
    for split in ("valid", "test"):
        if source.num_requests(split):
            folder = run_dir / "predictions" / "test" if split == "test" else None
            results[split] = _evaluate(config, source, losses, split, features, list(boosters.values()), folder)
    if "valid" in results:
        results["best_ne"] = float(np.mean([results["valid"][f"{task}/ne"] for task in boosters]))
    write_json(run_dir / "results.json", results)
    return results


@dataclass
class Trees:
    booster: Any
    number: int
    columns: list[int]  # of the matrix, which they read
    loss: float  # of validation

    def logits(self, columns: np.ndarray) -> np.ndarray:
        return self.booster.predict(columns[:, self.columns], num_iteration=self.number, raw_score=True)


def _boost(
    lightgbm: Any, parameters: dict[str, Any], features: FlatFeatures, train: Any, valid: Any, place: int, seed: int
) -> Trees:
    """The trees of the task at `place`, of the rows whose label was observed."""
    large = {name for name, rows in features.categories.items() if rows > FEW}
    choices = [[number for number, name in enumerate(features.names) if name not in large]]
    if large and len(valid[0]):
        choices.append(list(range(len(features.names))))
    found = [_train(lightgbm, parameters, features, train, valid, place, seed, columns) for columns in choices]
    return min(found, key=lambda trees: trees.loss)


def _train(
    lightgbm: Any,
    parameters: dict[str, Any],
    features: FlatFeatures,
    train: Any,
    valid: Any,
    place: int,
    seed: int,
    chosen: list[int],
) -> Trees:
    sets: list[Any] = []
    names = [features.names[number] for number in chosen]
    for columns, labels, weights in (train, valid):
        known = ~np.isnan(labels[:, place]) & (weights[:, place] > 0)
        made = lightgbm.Dataset(
            columns[known][:, chosen],
            labels[known, place],
            weight=weights[known, place],
            feature_name=[_plain(name) for name in names],
            categorical_feature=[number for number, name in enumerate(names) if name in features.categories],
            reference=sets[0] if sets else None,
            params={"verbose": -1},
        )
        sets.append(made if known.any() else None)
    stop = [] if sets[1] is None else [lightgbm.early_stopping(PATIENCE, verbose=False)]
    trees = parameters["num_iterations"] if stop else min(UNVALIDATED, parameters["num_iterations"])
    booster = lightgbm.train(
        {"objective": "binary", "verbose": -1, "seed": seed, "deterministic": True}
        | {key: value for key, value in parameters.items() if key != "num_iterations"},
        sets[0],
        num_boost_round=trees,
        valid_sets=[sets[1]] if stop else [],
        callbacks=stop,
    )
    loss = booster.best_score["valid_0"]["binary_logloss"] if stop else 0.0
    return Trees(booster, booster.best_iteration or trees, chosen, loss)


def _evaluate(
    config: Config,
    source: Source,
    losses: TaskLosses,
    split: str,
    features: FlatFeatures,
    boosters: list[Trees],
    predictions: Path | None,
) -> dict[str, float]:
    """Metrics of a split as those of a run, with the same predictions."""
    metrics = TaskMetrics(
        losses,
        source.label_rates(),
        torch.device("cpu"),
        max_candidates=source.spec.max_candidates,
        exact_auc=True,
        top_k=config.tracking.top_k,
    )
    writer = None if predictions is None else PredictionWriter(predictions, source.spec.tasks, losses, 0)
    for batch in batches(source, split):
        columns = features.rows(batch)
        scores = [trees.logits(columns) for trees in boosters]
        logits = torch.from_numpy(np.stack(scores, axis=1)).float()
        metrics.update(logits, batch.labels, batch.weights, batch.group, batch.candidate_offsets)
        if writer is not None:
            writer.write(batch, logits)
    if writer is not None:
        writer.close()
    return metrics.compute()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m train.commands.baseline", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--trees", type=int, default=2000, help="of a task at most, if validation goes on getting better"
    )
    parser.add_argument("--rate", type=float, default=0.05, help="learning rate")
    parser.add_argument("--leaves", type=int, default=63, help="of a tree")
    parser.add_argument("--least", type=int, default=50, help="rows of a leaf")
    counted = "rows of the largest table whose ids may be categories; of larger ones there are counts alone"
    parser.add_argument("--categories", type=int, default=10_000, help=counted)
    parser.add_argument("--config-dir", type=Path, help="a folder of further configurations, as of a training")
    parser.add_argument("overrides", nargs="*", help="as of the training command, e.g. data=shop")
    options = parser.parse_intermixed_args(arguments)
    least = {"trees": 1, "leaves": 2, "least": 1, "categories": 0}
    if wrong := next((name for name, limit in least.items() if getattr(options, name) < limit), ""):
        parser.error(f"--{wrong} {getattr(options, wrong)} must be at least {least[wrong]}")
    if not 0 < options.rate <= 1:
        parser.error(f"--rate {options.rate} must be above 0 and at most 1, e.g. 0.05")
    return options


def _import() -> Any:
    try:
        import lightgbm
    except ImportError as error:
        raise ValueError("train.commands.baseline needs LightGBM: pip install lightgbm") from error
    return lightgbm


def _claim(config: Config) -> Path:
    """The run's own folder. ValueError if it holds another run."""
    if not config.runtime.run_dir:
        name = f"lightgbm-{config.data.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        config.runtime.run_dir = str(new_folder(Path("runs") / name))
    run_dir = Path(config.runtime.run_dir)
    if (run_dir / "checkpoints").exists() or ((run_dir / "config.json").exists() and not _is_baseline(run_dir)):
        raise ValueError(f"{run_dir} holds a run; name another folder, e.g. runtime.run_dir=runs/trees")
    shutil.rmtree(run_dir / "predictions", ignore_errors=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    return run_dir


def _is_baseline(run_dir: Path) -> bool:
    return '"baseline"' in (run_dir / "config.json").read_text()


def _strongest(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in list(shares.items())[:5])


def _plain(name: str) -> str:
    """LightGBM refuses names with the characters of JSON."""
    return "".join("_" if one in ' ",:[]{}' else one for one in name)


if __name__ == "__main__":
    errors.run(main)
