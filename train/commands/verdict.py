"""What a comparison has shown: within a budget, not within it, or neither.

The mean gap of a task has an interval: the t interval over its seeds and, by root sum of squares, the mean bootstrap
interval of a seed over users, which all seeds share. With one seed it is the latter alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

STATUS = {"NOT within budget": 1, "no verdict": 4, "unresolved": 3, "within budget": 0}
"""Exit statuses of verdicts, that which decides over several tasks or arms first; 2 is that of wrong arguments."""


def worst(verdicts: list[str]) -> str:
    """What several verdicts are together."""
    return min(verdicts, key=list(STATUS).index)


def judge(task: dict[str, Any], budget: float) -> dict[str, Any]:
    """The verdict on a task of a comparison's report, why, and what it could resolve; `budget` in per cent.

    - no verdict: the baseline's NE is not below 1, so it has learnt nothing that could be lost;
    - NOT within budget: the whole interval of the mean gap is above it;
    - unresolved: the interval ends above the budget or is wider than it, or the baseline's spread over seeds is;
    - within budget: otherwise.
    """
    gaps = np.array([row["ne_percent"]["estimate"] for row in task["per_seed"]])
    halves = np.array([(row["ne_percent"]["high"] - row["ne_percent"]["low"]) / 2 for row in task["per_seed"]])
    mean, spread, ne = gaps.mean(), task["baseline_spread_percent"], task["baseline"]["ne"]["mean"]
    over_seeds = stats.t.ppf(0.975, len(gaps) - 1) * stats.sem(gaps) if len(gaps) > 1 else 0.0
    half = float(np.hypot(over_seeds, halves.mean()))
    low, high = float(mean - half), float(mean + half)
    resolved = max(high - low, high, spread)
    if not ne < 1:
        verdict, why = "no verdict", f"the baseline has NE {ne:.3f}, no better than predicting the label rate"
    elif low > budget:
        verdict, why = "NOT within budget", "the interval is above the budget"
    elif not resolved <= budget:
        beside = "ends above" if high > budget else "is wider than"
        reasons = [f"the interval {beside} the budget"] * (max(high - low, high) > budget)
        reasons += ["the spread is wider than the budget"] * (spread > budget)
        verdict, why = "unresolved", " and ".join(reasons) or "a metric is not a number"
    else:
        verdict, why = "within budget", ""
    return {
        "verdict": verdict,
        "why": why,
        "ne_gap_interval_percent": [low, high],
        "least_budget_percent": resolved,
        "passed": verdict == "within budget",
    }


def headline(result: dict[str, Any]) -> str:
    """The first line of a report: the verdict, and of each task the figures that decide it."""
    lines = []
    for name, task in result["tasks"].items():
        low, high = task["ne_gap_interval_percent"]
        figures = (
            f"{name}: mean NE gap {task['ne_gap_percent']:+.3f} % [{low:+.3f}, {high:+.3f}], "
            f"spread of {result['baseline']} over seeds {task['baseline_spread_percent']:.3f} %"
        )
        if task["verdict"] == "unresolved":
            task = task | {"why": f"{task['why']}; {task['least_budget_percent']:.3g} % would be resolved"}
        lines.append(f"- {figures}: {task['verdict']}" + (f", as {task['why']}" if task["why"] else ""))
    return "\n".join([f"**Verdict: {result['verdict']}** (budget: {result['budget_percent']} % of NE).", "", *lines])
