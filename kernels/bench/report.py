"""`python -m kernels.bench.report RESULTS.json`: the results of `kernels.bench` as a page of `docs/benchmarks`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def page(results: dict[str, Any], source: str) -> str:
    """The page of a results file; `source` is its path as the page names it."""
    facts = results["environment"]
    commits = sorted({case["commit"] for case in results["cases"].values()})
    lines = [
        f"# Benchmark: {results['family']} on {facts['device']}",
        "",
        f"Made by `python -m kernels.bench.report {source}` from what `python -m kernels.bench {results['family']}` "
        f"measured: {', '.join(f'{name} {value}' for name, value in facts.items() if name != 'device')}; "
        f"commit {', '.join(commits)}.",
        "",
        "Median times of interleaved calls, each with a cold L2; cases marked * are replays of CUDA graphs, without "
        "launches. A contender is timed only if its result is right. TFLOP/s and TB/s divide what the problem "
        "needs at least by the time. Memory is what a call takes at its peak beyond its inputs. Behind each peer "
        "stands its time over ours; *alone* is the same of contenders that ran one behind the other, each at the clock "
        "that the power it draws leaves it.",
        "",
        "| case | ours | ms | TFLOP/s | TB/s | MiB | peers |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_row(name, case) for name, case in results["cases"].items()]
    return "\n".join(lines) + "\n"


def _row(name: str, case: dict[str, Any]) -> str:
    timed = {contender: row for contender, row in case["contenders"].items() if "median_ms" in row}
    others = [f"{contender}: {_reason(row)}" for contender, row in case["contenders"].items() if contender not in timed]
    mark = "*" if case["graph"] else ""
    if not timed:
        return f"| {name}{mark} | | | | | | {'; '.join(others)} |"
    (first, ours), *peers = timed.items()
    others = [
        f"{peer} {number(row['median_ms'])} ms, {_memory(row)}{row['time_over_ours']:.2f}x{_alone(row, ours)}"
        for peer, row in peers
    ] + others
    speed = number(ours["tflops"]) if case["flops"] else ""
    memory = number(ours["peak_mib"]) if ours.get("peak_mib") is not None else ""
    return (
        f"| {name}{mark} | {first} | {number(ours['median_ms'])} | {speed} | {number(ours['tb_per_s'])} "
        f"| {memory} | {'; '.join(others)} |"
    )


def _alone(row: dict[str, Any], ours: dict[str, Any]) -> str:
    return f" (alone {row['alone_ms'] / ours['alone_ms']:.2f}x)" if "alone_ms" in row and "alone_ms" in ours else ""


def _memory(row: dict[str, Any]) -> str:
    return f"{number(row['peak_mib'])} MiB, " if row.get("peak_mib") is not None else ""


def _reason(row: dict[str, Any]) -> str:
    (word, reason), *_ = row.items()
    return f"{word} ({reason.splitlines()[0]})" if word == "wrong" else word


def number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(page(json.loads(Path(sys.argv[1]).read_text()), sys.argv[1]), end="")
