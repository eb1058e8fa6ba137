"""`python -m tools.figure RESULTS.json FIGURE.png`: latency and memory over the maximum length, as a plot.

Draws the cases `sweep_DIRECTION_LLENGTH` of a results file. Memory is what a call takes at its peak, with its inputs.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from train.record.plots import plain_ticks

DIRECTIONS = {"fwd": "forward", "train": "forward and backward"}
QUANTITIES = {"median_ms": "ms", "mib": "MiB"}

Series = dict[tuple[str, str], dict[str, dict[int, float]]]


def series(results: dict[str, Any]) -> Series:
    """(direction, quantity) -> contender -> maximum length -> value."""
    found: Series = defaultdict(lambda: defaultdict(dict))
    for name, case in results["cases"].items():
        match = re.fullmatch(r"sweep_(\w+)_L(\d+)", name)
        for contender, row in case["contenders"].items():
            if match and "median_ms" in row:
                found[match[1], "median_ms"][contender][int(match[2])] = row["median_ms"]
                if row["peak_mib"] is not None:
                    found[match[1], "mib"][contender][int(match[2])] = row["peak_mib"] + row["input_mib"]
    return found


def draw(results: dict[str, Any]) -> Figure:
    found = series(results)
    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots(len(DIRECTIONS), len(QUANTITIES), squeeze=False)
    for row, (direction, title) in zip(axes, DIRECTIONS.items(), strict=True):
        for ax, (quantity, unit) in zip(row, QUANTITIES.items(), strict=True):
            for contender, values in found[direction, quantity].items():
                ax.plot(list(values), list(values.values()), marker="o", label=contender)
            ax.set(xscale="log", yscale="log", xlabel="maximum length", ylabel=unit, title=title)
            ax.set_xticks([], minor=True)
            lengths = sorted({length for values in found[direction, quantity].values() for length in values})
            ax.set_xticks(lengths, [str(length) for length in lengths])
            plain_ticks(ax.yaxis)
            ax.grid(visible=True, alpha=0.3)
    axes[0][0].legend(fontsize="small")
    figure.suptitle(f"Softmax attention, lengths uniform in 1..L, on {results['environment']['device']}")
    return figure


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(json.loads(Path(sys.argv[1]).read_text())).savefig(sys.argv[2], dpi=120)
