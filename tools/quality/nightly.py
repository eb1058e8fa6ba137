"""Train one stored row again and fail when it leaves its interval: `python -m tools.quality.nightly [--row NAME]`.

A further seed lies in the interval in 99 % of cases, if seeds are normal with the mean and deviation of those
stored. The default row needs the bundled data alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from scipy import stats

from tools.quality.page import seeds, stored
from tools.quality.run import train

ROW = "bundled/interformer"


def bounds(values: np.ndarray, probability: float = 0.99) -> tuple[float, float]:
    """Between which one further value lies: mean ± t s sqrt(1 + 1 / n)."""
    n = len(values)
    half = stats.t.ppf(0.5 + probability / 2, n - 1) * values.std(ddof=1) * np.sqrt(1 + 1 / n)
    return float(values.mean() - half), float(values.mean() + half)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.quality.nightly", description=__doc__.partition("\n")[0])
    parser.add_argument("--row", default=ROW)
    options, overrides = parser.parse_known_args(arguments)
    rows = seeds(stored("final")[1])
    if len(rows.get(options.row, {})) < 2:
        print(f"--row {options.row} has no interval; there are {', '.join(sorted(rows))}", file=sys.stderr)
        return 2
    runs = rows[options.row]
    with tempfile.TemporaryDirectory() as folder:
        # BF16 is emulated by most CPUs, and no AUC's interval is as narrow as what it changes.
        test = train({"overrides": [*runs[min(runs)]["overrides"], "precision=auto", *overrides]}, Path(folder))["test"]
    outside = False
    for metric in (key for key in test if key.endswith("/auc")):
        low, high = bounds(np.array([run["test"][metric] for run in runs.values()]))
        verdict = "inside" if low <= test[metric] <= high else "OUTSIDE"
        outside |= verdict == "OUTSIDE"
        print(f"{options.row} {metric} {test[metric]:.4f}: {verdict} {low:.4f} to {high:.4f}")
    return int(outside)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
