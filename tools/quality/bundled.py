"""A quality table: every model over several seeds on the bundled data, against a logistic model.

    python -m tools.quality [--seeds 0 1 2 3 4] [--out runs/quality] [--doc runs/quality.md]

Runs `+experiment=movielens_quality` for each model and seed through `launch.sweep` (finished jobs are kept when started
again), fits a logistic model on the user's and the movie's mean rating so far, and writes the table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from scipy import stats
from torch import Tensor

from launch import sweep
from launch.runs import Runner
from launch.trials import Trial
from train.config.compose import to_config
from train.config.schema import register_schema
from train.data import Source, build_source
from train.metrics import MetricSet
from train.record import versions

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = "+experiment=movielens_quality"
MODELS = ("interformer", "din", "dcnv2", "dlrm")
METRICS = ("auc", "gauc", "ne")
BEST = "interformer"

INTRODUCTION = """\
MovieLens latest-small, global time split 80/10/10 by rating, so that most test users are new. Tasks: `like`, a rating
of 4 or more; `love`, a rating of 5. Every model gets the same features, histories, optimiser and budget
(`configs/experiment/movielens_quality.yaml`) and is tested at its best validation NE. Mean over {seeds} seeds with the
95 % interval of the mean (Student's t); leads are paired by seed. NE below 1 beats predicting the training rate."""


def logistic_baseline() -> dict[str, float]:
    """Test metrics of a logistic model on `user_mean` and `movie_mean`, fitted to convergence on the training split."""
    register_schema()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        source = build_source(to_config(compose("train", [EXPERIMENT])).data)
    features, labels, _ = _rates(source, "train")
    weights = torch.zeros(features.shape[1], labels.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(features @ weights, labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    features, labels, group = _rates(source, "test")
    metrics = MetricSet(source.spec.tasks, source.label_rates(), torch.device("cpu"), exact_auc=True)
    metrics.update((features @ weights).detach().float(), labels.float(), torch.ones_like(labels).float(), group)
    return metrics.compute()


def _rates(source: Source, split: str) -> tuple[Tensor, Tensor, Tensor]:
    """Features [C, 3] (user's mean, movie's mean, 1), labels [C, tasks] and users [C]."""
    batch = source.batch(split, np.arange(source.num_requests(split)))
    user = batch.request_dense[batch.owner, source.spec.request_dense.index("user_mean")]
    movie = batch.candidate_dense[:, source.spec.candidate_dense.index("movie_mean")]
    features = torch.stack([user, movie, torch.ones_like(user)], 1).double()
    return features, batch.labels.double(), batch.group


def table(jobs: list[Trial], logistic: dict[str, float], task: str) -> list[str]:
    """One task: mean over seeds with the 95 % interval of the mean (Student's t), and the lead of the best model."""
    lines = [f"| model | {' | '.join(name.upper() for name in METRICS)} | AUC lead of {BEST} |", "|---|" + "---|" * 4]
    auc = {}
    for model in MODELS:
        runs = [job.metrics for job in jobs if job.values["model"] == model]
        values = {name: np.array([run[f"{task}/{name}"] for run in runs]) for name in METRICS}
        auc[model] = values["auc"]
        lead = "" if model == BEST else _interval(auc[BEST] - auc[model])
        lines.append(f"| {model} | {' | '.join(_interval(values[name]) for name in METRICS)} | {lead} |")
    cells = [f"{logistic[f'{task}/{name}']:.4f}" for name in METRICS]
    lines.append(
        f"| logistic, user and movie means | {' | '.join(cells)} | {_interval(auc[BEST] - logistic[f'{task}/auc'])} |"
    )
    return lines


def _interval(values: np.ndarray) -> str:
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return f"{values.mean():.4f} ± {half:.4f}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.quality", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=Path("runs/quality"))
    parser.add_argument("--doc", type=Path, default=Path("runs/quality.md"))
    parser.add_argument("--parallel", type=int, default=1, help="jobs at a time, of one process each")
    options, overrides = parser.parse_known_args(arguments)
    over = [f"model={','.join(MODELS)}", f"runtime.seed={','.join(map(str, options.seeds))}"]
    jobs = sweep.plan(options.out, [EXPERIMENT, *overrides], over)
    Runner([EXPERIMENT, *overrides], nproc=1, parallel=options.parallel).run(jobs)
    failed = [str(job.folder) for job in jobs if job.status != "ok"]
    if failed:
        raise RuntimeError(f"jobs failed, see console.log in: {', '.join(failed)}")
    logistic = logistic_baseline()
    lines = ["# Quality on the bundled data", "", INTRODUCTION.format(seeds=len(options.seeds)), ""]
    for task in ("like", "love"):
        lines += [f"## {task}", "", *table(jobs, logistic, task), ""]
    commit = versions.collect()["commit"]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines += [
        f"Written by `python -m tools.quality` on {device} at commit {commit}. 610 users make a development set, no "
        "benchmark.",
        "",
    ]
    options.doc.write_text("\n".join(lines))
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
