"""NE against operations an example, from finished sweeps over sizes: a line for each model, with its interval.

    python -m launch.scaling_law SWEEP [SWEEP ...] [--out DIR]

A SWEEP is the folder of `launch.sweep` over what changes a model's size, e.g. `--over model.dim=8,32,128
runtime.seed=0,1,2`. Of each run it takes the NE of its best validation and the FLOPs of training (forward and
backward, true lengths) of an example, and fits NE = intercept + slope log10(FLOPs) by least squares to the runs of each
model: the line that scaling laws of recommendation models are drawn as (arXiv 2403.02545, 2602.10016). `slope` is what
ten times the operations change; its 95 % interval (Student's t) takes runs as independent. Written into --out, by
default the first folder: `scaling_law.json`, `scaling_law.md` and `scaling_law.png`. A line is no promise beyond the
sizes and the data that it was fitted to.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from train.process import errors
from train.process.files import write_json

SIZES = 3
"""The fewest different sizes of a model that a line is fitted to: two would always lie on one."""


@dataclass(frozen=True)
class Run:
    """One size and seed of a model."""

    folder: str
    model: str
    flops: float  # of training, an example
    ne: float  # of the best validation


@dataclass(frozen=True)
class Law:
    """NE = intercept + slope log10(FLOPs of an example)."""

    intercept: float
    slope: float
    half: float  # of the slope's 95 % interval
    decades: float  # log10 of the largest over the smallest FLOPs
    runs: int


def read(folders: Iterable[Path]) -> list[Run]:
    """The finished runs of the sweeps. ValueError names a folder without any, and a run without a validation."""
    runs = []
    for folder in folders:
        files = sorted(folder.glob("*/results.json"))
        if not files:
            raise ValueError(f"{folder} has no finished runs; expected the folder of a sweep, e.g. runs/sweep-sizes")
        runs += [_run(file) for file in files]
    return runs


def _run(file: Path) -> Run:
    results = json.loads(file.read_text())
    missing = [name for name in ("best_ne", "tflops_per_s", "examples_per_s") if not results.get(name)]
    if missing:
        raise ValueError(
            f"{file} has no {', '.join(missing)}; runs need a validation split, e.g. runtime.evals_per_epoch=4"
        )
    record = json.loads((file.parent / "config.json").read_text())
    flops = 1e12 * results["tflops_per_s"] * record["world_size"] / results["examples_per_s"]
    return Run(str(file.parent), record["config"]["model"]["name"], flops, results["best_ne"])


def fit(runs: Sequence[Run]) -> Law:
    """Least squares over the runs of one model. ValueError with fewer than `SIZES` sizes."""
    import numpy as np  # with scipy, which takes half a second: not for --help
    from scipy import stats

    x, y = np.log10([run.flops for run in runs]), np.array([run.ne for run in runs])
    sizes = len(np.unique(x.round(3)))
    if sizes < SIZES:
        raise ValueError(f"{runs[0].model} has {sizes} sizes; a line needs {SIZES}, e.g. --over model.dim=8,32,128")
    line = stats.linregress(x, y)
    half = float(stats.t.ppf(0.975, len(runs) - 2) * line.stderr)
    return Law(float(line.intercept), float(line.slope), half, float(np.ptp(x)), len(runs))


def table(laws: Mapping[str, Law]) -> str:
    """Markdown: a row for each model, steepest first."""
    lines = ["| model | runs | decades of FLOPs | NE for ten times the FLOPs |", "|---|---|---|---|"]
    for model, law in sorted(laws.items(), key=lambda item: item[1].slope):
        lines.append(f"| {model} | {law.runs} | {law.decades:.1f} | {law.slope:+.4f} ± {law.half:.4f} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m launch.scaling_law", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("sweeps", nargs="+", type=Path, metavar="SWEEP", help="folders of sweeps over sizes")
    parser.add_argument("--out", type=Path, help="where the files go; default: the first folder")
    options = parser.parse_args(arguments)
    by_model: dict[str, list[Run]] = defaultdict(list)
    try:
        for run in read(options.sweeps):
            by_model[run.model].append(run)
        laws = {model: fit(runs) for model, runs in by_model.items()}
    except ValueError as error:
        parser.error(str(error))
    from train.record.plots import plot_scaling_law  # imports matplotlib

    out = options.out or options.sweeps[0]
    out.mkdir(parents=True, exist_ok=True)
    runs = [asdict(run) for each in by_model.values() for run in each]
    write_json(out / "scaling_law.json", {"laws": {name: asdict(law) for name, law in laws.items()}, "runs": runs})
    (out / "scaling_law.md").write_text(table(laws))
    points = {name: [(run.flops, run.ne) for run in each] for name, each in by_model.items()}
    plot_scaling_law(points, {name: (law.intercept, law.slope) for name, law in laws.items()}, out / "scaling_law.png")
    print(table(laws) + f"\nplot: {out / 'scaling_law.png'}")
    return 0


if __name__ == "__main__":
    errors.run(main)
