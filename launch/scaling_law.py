"""NE against operations an example, from finished sweeps over sizes: a line for each model, with its interval.

    python -m launch.scaling_law SWEEP [SWEEP ...] [--out DIR]

A SWEEP is the folder of `launch.sweep` over what changes a model's size, e.g. `--over model.dim=8,32,128
runtime.seed=0,1,2`. Of each run it takes the NE of its best validation and the FLOPs of training (forward and
backward, true lengths) of an example, and fits NE = intercept + slope log10(FLOPs) by least squares to the runs of each
model: the line that scaling laws of recommendation models are drawn as (arXiv 2403.02545, 2602.10016). It is fitted up
to the size with the least NE, if that is the third or a larger one: larger sizes gain nothing, and no line goes through
a U. `slope` is what ten times the operations change; its 95 % interval (Student's t) takes runs as independent. Written
into --out, by default the first folder: `scaling_law.json`, `scaling_law.md` and `scaling_law.png`. A line is no
promise beyond the sizes and the data that it was fitted to.
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
    decades: float  # log10 of the largest over the smallest FLOPs that were fitted
    runs: int  # that were fitted
    until: float  # FLOPs of the largest size that was fitted, the one with the least NE
    beyond: int  # larger sizes, which are no better


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


def fit(runs: Sequence[Run]) -> Law | None:
    """Least squares over the runs of one model, up to the size with the least NE; None if that is one of the two
    smallest. ValueError with fewer than `SIZES` sizes."""
    import numpy as np  # with scipy, which takes half a second: not for --help
    from scipy import stats

    x, y = np.log10([run.flops for run in runs]), np.array([run.ne for run in runs])
    sizes, size_of = np.unique(x.round(3), return_inverse=True)
    if len(sizes) < SIZES:
        raise ValueError(
            f"{runs[0].model} has {len(sizes)} sizes; a line needs {SIZES}, e.g. --over model.dim=8,32,128"
        )
    best = int(np.argmin([y[size_of == size].mean() for size in range(len(sizes))]))
    if best + 1 < SIZES:
        return None
    x, y = x[size_of <= best], y[size_of <= best]
    line = stats.linregress(x, y)
    half = float(stats.t.ppf(0.975, len(x) - 2) * line.stderr)
    until, beyond = float(10 ** x.max()), len(sizes) - 1 - best
    return Law(float(line.intercept), float(line.slope), half, float(np.ptp(x)), len(x), until, beyond)


def table(laws: Mapping[str, Law | None]) -> str:
    """Markdown: a row for each model, steepest first."""
    heads = ("model", "runs", "decades of FLOPs", "NE for ten times the FLOPs", "larger sizes, no better")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for model, law in sorted(laws.items(), key=lambda item: item[1].slope if item[1] else 0):
        cells = ["", "", "no line: one of the two smallest sizes is best", ""]
        if law is not None:
            cells = [f"{law.runs}", f"{law.decades:.1f}", f"{law.slope:+.4f} ± {law.half:.4f}", f"{law.beyond}"]
        lines.append(f"| {' | '.join([model, *cells])} |")
    return "\n".join(lines) + "\n"


def lines_of(laws: Mapping[str, Law | None]) -> dict[str, tuple[float, float, float] | None]:
    """As `train.record.plots.plot_scaling_law` draws them."""
    return {name: law and (law.intercept, law.slope, law.until) for name, law in laws.items()}


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
    written = {name: law and asdict(law) for name, law in laws.items()}
    write_json(out / "scaling_law.json", {"laws": written, "runs": runs})
    (out / "scaling_law.md").write_text(table(laws))
    points = {name: [(run.flops, run.ne) for run in each] for name, each in by_model.items()}
    plot_scaling_law(points, lines_of(laws), out / "scaling_law.png")
    print(table(laws) + f"\nplot: {out / 'scaling_law.png'}")
    return 0


if __name__ == "__main__":
    errors.run(main)
