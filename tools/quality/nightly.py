"""Train one stored row again and fail when it leaves its interval: `python -m tools.quality.nightly [--row NAME]`.

Rows are SECTION/ROW of what `tools.quality.suite` has stored. A further seed lies
in the interval in 99 % of cases, if seeds are normal with the mean and deviation of those stored. The default row needs
the bundled data alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from tools.quality import suite
from tools.quality.page import STORED
from tools.quality.run import train
from tools.quality.sections import SECTIONS

ROW = "bundled/interformer"


def bounds(values: np.ndarray, probability: float = 0.99) -> tuple[float, float]:
    """Between which one further value lies: mean ± t s sqrt(1 + 1 / n)."""
    n = len(values)
    half = stats.t.ppf(0.5 + probability / 2, n - 1) * values.std(ddof=1) * np.sqrt(1 + 1 / n)
    return float(values.mean() - half), float(values.mean() + half)


def rows() -> dict[str, tuple[dict[str, Any], list[dict[str, float]]]]:
    """Of each row of several seeds the job of the first one, and the test metrics of all."""
    found: dict[str, tuple[dict[str, Any], list[dict[str, float]]]] = {}
    for section in SECTIONS:
        file = STORED / "suite" / f"{section}.json"
        content = json.loads(file.read_text()) if file.exists() else {"rows": {}}
        for row, kept in content["rows"].items():
            job = suite.job(section, row, tuple(kept["setting"]), content["about"]["seeds"][0], [])
            job.pop("again", None)
            found[f"{section}/{row}"] = (job, [run["test"] for run in kept["runs"]])
    return {name: row for name, row in found.items() if len(row[1]) > 1}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.quality.nightly", description=__doc__.partition("\n")[0])
    parser.add_argument("--row", default=ROW)
    options, overrides = parser.parse_known_args(arguments)
    known = rows()
    if options.row not in known:
        print(f"--row {options.row} has no interval; there are {', '.join(sorted(known))}", file=sys.stderr)
        return 2
    job, tests = known[options.row]
    with tempfile.TemporaryDirectory() as folder:
        # BF16 is emulated by most CPUs, and no AUC's interval is as narrow as what it changes.
        again = job | {"overrides": [*job["overrides"], "precision=auto", *overrides]}
        test = train(again, Path(folder))["test"]
    outside = False
    for metric in (key for key in test if key.endswith(("/auc", "/ndcg@20"))):
        low, high = bounds(np.array([each[metric] for each in tests]))
        verdict = "inside" if low <= test[metric] <= high else "OUTSIDE"
        outside |= verdict == "OUTSIDE"
        print(f"{options.row} {metric} {test[metric]:.4f}: {verdict} {low:.4f} to {high:.4f}")
    return int(outside)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
