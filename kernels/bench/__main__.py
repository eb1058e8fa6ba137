"""`python -m kernels.bench FAMILY [--case GLOB ...] [--contender GLOB ...] [--device cpu|cuda] [--graph] [--alone]
[--out DIR]`."""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.bench.case import Case, Problem
from kernels.bench.environment import commit, environment, slug
from kernels.bench.timing import (
    Timing,
    captured,
    graph_rounds,
    interleaved,
    interleaved_graphs,
    peak_memory,
    turn_of,
)
from kernels.core import dispatch

PACKAGE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Options:
    """The command's options for timing."""

    out: Path
    seconds: float
    min_rounds: int
    graph: bool = False
    alone: bool = False
    contenders: tuple[str, ...] = ("*",)


def families() -> list[str]:
    return sorted(path.stem for path in (PACKAGE / "cases").glob("*.py") if "_" not in path.stem)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=sys.modules["kernels.bench"].__doc__)
    parser.add_argument("family", choices=families())
    parser.add_argument("--case", nargs="+", default=["*"], metavar="GLOB", help="only cases whose name matches one")
    parser.add_argument("--contender", nargs="+", default=["*"], metavar="GLOB", help="only those whose name matches")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--graph", action="store_true", help="time CUDA graph replays, without the launch overhead")
    parser.add_argument("--alone", action="store_true", help="then time each contender alone too, at its own clock")
    parser.add_argument("--seconds", type=float, default=1.0, help="time to spend on a contender (default: 1)")
    parser.add_argument("--min-rounds", type=int, default=10, help="at least this many calls of each (default: 10)")
    parser.add_argument("--out", type=Path, default=PACKAGE / "results", help="where the JSON files are")
    options = parser.parse_args(arguments)
    if options.graph and options.device == "cpu":
        parser.error("--graph needs --device cuda")
    device = torch.device(options.device)
    cases = importlib.import_module(f"kernels.bench.cases.{options.family}").cases(device)
    chosen = [case for case in cases if any(fnmatch.fnmatch(case.name, glob) for glob in options.case)]
    if not chosen:
        parser.error(f"no case matches {' '.join(options.case)!r}; cases: {', '.join(case.name for case in cases)}")
    how = Options(
        options.out, options.seconds, options.min_rounds, options.graph, options.alone, tuple(options.contender)
    )
    return run(options.family, chosen, device, how)


def run(family: str, cases: list[Case], device: torch.device, options: Options) -> int:
    """Run the cases, print a table, write the JSON file. Returns 1 if any contender's result was wrong, else 0."""
    facts = environment(device)
    path = options.out / slug(facts["device"]) / f"{family}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    code = commit()
    wrong = False
    print(", ".join(f"{name} {value}" for name, value in facts.items()), "commit", code)
    for case in cases:
        with turn_of(path.parent):
            problem = case.problem(device)
        result = measure(problem, device, options, turn_of(path.parent)) | {"commit": code}
        _print(case.name, result)
        with turn_of(path.parent):
            _add(path, family, facts, case.name, result)
        wrong = wrong or any("wrong" in row for row in result["contenders"].values())
    print(f"written: {path}")
    return int(wrong)


def _add(path: Path, family: str, facts: dict[str, Any], name: str, result: dict[str, Any]) -> None:
    """Add a case to the file. Results with another torch, compiler or driver are removed from it."""
    earlier = json.loads(path.read_text()) if path.exists() else {}
    cases = earlier["cases"] if earlier.get("environment") == facts else {}
    text = json.dumps({"family": family, "environment": facts, "cases": cases | {name: result}}, indent=1)
    path.write_text(text + "\n")


def measure(
    problem: Problem, device: torch.device, options: Options, turn: AbstractContextManager[None]
) -> dict[str, Any]:
    """Check every contender, then time those that are right, in turns. A row of the result has times, or the reason why
    there are none.

    If one of them cannot be captured, none is: times with and without launch overhead must not be compared.
    """
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], Any]] = {}
    memory: dict[str, dict[str, float | None]] = {}
    stream = torch.cuda.Stream() if options.graph else None
    budget = (device, options.seconds, options.min_rounds)
    for name, prepare in problem.contenders.items():
        if not any(fnmatch.fnmatch(name, glob) for glob in options.contenders):
            continue
        try:
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                runner = prepare()
                result = runner.step()
        except dispatch.UnsupportedError as reason:
            rows[name] = {"unavailable": str(reason)}
            continue
        if stream is not None:
            stream.synchronize()
        fault = problem.check(runner.outputs(result))
        if fault:
            rows[name] = {"wrong": fault}
            continue
        memory[name] = {"input_mib": sum(tensor.nbytes for tensor in runner.inputs) / 2**20} if runner.inputs else {}
        steps[name] = runner.step
    with turn:
        for name, step in steps.items():  # not during the first call, in which some peers try configurations
            with torch.cuda.stream(stream):
                memory[name]["peak_mib"] = peak_memory(step, device)
        timings, uncaptured = _time(steps, stream, *budget) if steps else ({}, {})
        singly = steps if options.alone and not uncaptured else {}
        alone = {name: _time({name: step}, stream, *budget)[0][name] for name, step in singly.items()}
    ours = next((timing.median for timing in timings.values()), None)
    for name, timing in timings.items():
        rows[name] = {f"{field}_ms" if field != "rounds" else field: value for field, value in asdict(timing).items()}
        rows[name]["tflops"] = problem.flops / timing.median / 1e9
        rows[name]["tb_per_s"] = problem.bytes / timing.median / 1e9
        rows[name]["time_over_ours"] = timing.median / ours
        rows[name] |= memory[name]
        if alone:
            rows[name]["alone_ms"] = alone[name].median
    result = {
        "flops": problem.flops,
        "bytes": problem.bytes,
        "graph": options.graph and not uncaptured,
        "contenders": rows,
    }
    return result | ({"uncaptured": uncaptured} if uncaptured else {})


def _time(
    steps: dict[str, Callable[[], Any]],
    stream: torch.cuda.Stream | None,
    device: torch.device,
    seconds: float,
    min_rounds: int,
) -> tuple[dict[str, Timing], dict[str, str]]:
    """(timings, reasons): with graphs if there is a stream and all can be captured; why those that cannot be cannot."""
    uncaptured: dict[str, str] = {}
    if stream is not None:
        rounds = graph_rounds(steps, stream)
        replays, uncaptured = _capture_all(steps, stream, rounds)
        if not uncaptured:
            return interleaved_graphs(replays, stream, device, seconds, min_rounds, rounds), uncaptured
    # A backward runs on the stream of its forward.
    with torch.cuda.stream(stream):
        return interleaved(steps, device, seconds, min_rounds), uncaptured


def _capture_all(
    steps: dict[str, Callable[[], Any]], stream: torch.cuda.Stream, rounds: int
) -> tuple[dict[str, Callable[[], None]], dict[str, str]]:
    """(replays of graphs of all steps, reasons of those that cannot be captured)."""
    replays, uncaptured = {}, {}
    for name, step in steps.items():
        try:
            replays[name] = captured(step, stream, rounds)
        except RuntimeError as error:
            uncaptured[name] = str(error)
    return replays, uncaptured


def _print(name: str, result: dict[str, Any]) -> None:
    print(f"\n{name}: {result['flops'] / 1e9:.4g} GFLOP, {result['bytes'] / 1e6:.4g} MB")
    for contender, reason in result.get("uncaptured", {}).items():
        print(f"  timed with launches: {contender} cannot be captured in a CUDA graph: {reason.splitlines()[0]}")
    for contender, row in result["contenders"].items():
        if "median_ms" not in row:
            (word, reason), *_ = row.items()
            print(f"  {contender:<24} {word}: {reason}")
            continue
        peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:8.1f} MiB "
        alone = f", {row['alone_ms']:.4f} ms alone" if "alone_ms" in row else ""
        print(
            f"  {contender:<24} {row['median_ms']:10.4f} ms ({row['low_ms']:.4f} to {row['high_ms']:.4f})"
            f" {row['tflops']:9.3g} TFLOP/s {row['tb_per_s']:8.3g} TB/s {peak} {row['time_over_ours']:6.2f} x ours"
            + alone
        )


if __name__ == "__main__":
    sys.exit(main())
