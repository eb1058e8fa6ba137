"""What ran on a GPU: `tests/gpu_ledger.json`.

    python -m tools.gpu_ledger [FAMILY ...] [--workers 8] [--seconds 120] [--limit 570] [--ledger FILE]

runs the tests of kernel families that need a GPU (all families by default) and writes for each the hash of what its
device code reaches, commit, device, versions, and how many tests passed. A test that takes longer than `seconds` fails,
with the kernel that was launched last, and so does its worker, which another replaces. The file is written as tests
end; a run that was cut short, such as by `limit`, goes on from there if neither code nor device have changed since.

    python -m tools.gpu_ledger --check

prints the families whose code is not what the ledger has seen pass, and fails if a page quotes figures of such a family
without the line `Figures of older code: FAMILY, ...`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tools.device_sources import ROOT, Sources, digest

LEDGER = ROOT / "tests/gpu_ledger.json"
KERNELS = sorted(path.parent.name for path in ROOT.glob("kernels/*/reference.py"))
#: The folders of tests of each family, those of training need all that training needs.
TESTS = {family: [f"tests/kernels/{family}"] for family in KERNELS} | {
    "core": ["tests/kernels/core"],
    "train": ["tests/train", "tests/modules", "tests/commands"],
}
# Of those that are no family of kernels: the files whose definitions count, with all that they reach.
ROOTS = {"core": ["kernels/core/*.py"], "train": ["train/speedup/*.py", "modules/core/side_stream.py"]}
#: For pytest below: files of test results, and of tests that are left out.
RESULTS, LEFT_OUT = "GEMSMITH_GPU_RESULTS", "GEMSMITH_GPU_LEFT_OUT"
WRITTEN_EVERY = 5.0  # seconds
MOST_HANGS = 24  # of a family; then it has failed
OLDER = re.compile(r"^\W*Figures of older code: ([\w, ]+)", re.MULTILINE)
Row = dict[str, Any]


def hash_of(family: str, sources: Sources) -> str:
    if family not in ROOTS:
        return digest(sources.family(family))
    return digest(sources.reached(path for glob in ROOTS[family] for path in sources.root.glob(glob)))


# In pytest, which loads this file with `-p`.


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    if file := os.environ.get(LEFT_OUT):
        left_out = set(json.loads(Path(file).read_text()))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    record("collected", len(ids))


def pytest_collectreport(report: Any) -> None:
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        record(report.nodeid, "failed", str(report.longrepr).strip().splitlines()[-1])


def pytest_runtest_logreport(report: Any) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ or (report.passed and report.when != "call"):
        return
    why = ""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = (crash.message if crash else str(report.longrepr)).strip().splitlines()[0][:300]
    record(report.nodeid, report.outcome, why)


def record(*values: Any) -> None:
    """A line of the file of results. Processes append to it, each a line at a time."""
    if file := os.environ.get(RESULTS):
        with open(file, "a") as results:
            results.write(json.dumps(values) + "\n")


# The command.


def facts() -> Row:
    import torch

    from kernels.bench.environment import commit, environment

    known = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return {name: known[name] for name in ("device", "torch", "triton", "driver")} | {"commit": commit()}


def files_of(folders: list[str]) -> list[str]:
    """The files that have tests for a GPU; others may need what is not installed."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("test_*.py"))
    return [str(path) for path in paths if "mark.gpu" in path.read_text(encoding="utf-8")]


def run(family: str, about: Row, earlier: Row, options: argparse.Namespace, ends: float) -> Row:
    """The family's row, after its tests or at `ends`; the ledger file has it all the while."""
    same = earlier.get("unfinished") and all(earlier.get(name) == about[name] for name in about)
    row: Row = about | {"date": time.strftime("%Y-%m-%d"), "unfinished": True}
    row |= {"seconds": earlier["seconds"] if same else 0, "done": dict(earlier["done"]) if same else {}}
    before, started = row["seconds"], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        results, left_out = Path(folder) / "results", Path(folder) / "left_out"
        results.touch()
        left_out.write_text(json.dumps([*row["done"]]))
        command = f"-m pytest -p tools.gpu_ledger -p no:cacheprovider -q -m gpu --tb=short -n {options.workers}"
        command += f" --timeout {options.seconds:g} --max-worker-restart {MOST_HANGS} --continue-on-collection-errors"
        command = [sys.executable, *command.split(), *files_of(options.tests[family])]
        # Inside of a worker of another pytest, this one would take itself for a worker.
        settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        settings |= {RESULTS: str(results), LEFT_OUT: str(left_out), "OMP_NUM_THREADS": "2"}
        process = subprocess.Popen(command, cwd=ROOT, env=settings, start_new_session=True)
        size, grown = -1, time.monotonic()
        try:
            while process.poll() is None:
                time.sleep(min(WRITTEN_EVERY, 0.5))
                now = time.monotonic()
                if results.stat().st_size != size:
                    size, grown = results.stat().st_size, now
                if now > ends or now - grown > 2 * options.seconds + 60:
                    break
                if now - started - (row["seconds"] - before) > WRITTEN_EVERY:
                    row["seconds"] = round(before + now - started)
                    write(options.ledger, family, row | counts(results, row["done"]))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        row["seconds"] = round(before + time.monotonic() - started)
        row |= counts(results, row["done"])
        # 0: all passed, 1: some failed, 5: nothing was left to run. A worker too many has ended: fewer tests are done.
        if code in (0, 1, 5) and len(row["done"]) + len(row["failed"]) >= row.pop("collected"):
            del row["unfinished"], row["done"]
        write(options.ledger, family, row)
    return row


def counts(results: Path, earlier: Row) -> Row:
    """Of the file of results and of tests that were done before: counts, reasons of failures, and what is done."""
    outcomes, failed, collected, hanging = dict(earlier), {}, 0, {}
    for test, *values in map(json.loads, results.read_text().splitlines()):
        if test == "collected":
            collected = values[0]
        elif values[0] == "hangs":
            hanging[test] = values[1]
        elif values[0] == "failed":
            failed[test] = values[1]
        else:
            outcomes[test] = values[0]
    failed |= hanging
    done = {test: outcome for test, outcome in outcomes.items() if test not in failed}
    number = Counter(done.values())
    return {
        "passed": number["passed"],
        "skipped": number["skipped"],
        "failed": failed,
        "collected": collected + len(earlier),
        "done": done,
    }


def read(ledger: Path) -> dict[str, Row]:
    return json.loads(ledger.read_text()) if ledger.exists() else {}


def write(ledger: Path, family: str, row: Row) -> None:
    rows = read(ledger) | {family: row}
    rows = {name: rows[name] for name in TESTS if name in rows} | rows
    new = ledger.with_suffix(".new")
    new.write_text(json.dumps(rows, indent=1) + "\n")
    new.replace(ledger)


def green(row: Row) -> bool:
    return "unfinished" not in row and not row["failed"] and row["passed"] > 0


def table(rows: dict[str, Row]) -> str:
    lines = [f"{'family':<10} {'passed':>6} {'skipped':>7} {'failed':>6} {'seconds':>7}  device"]
    for name, row in rows.items():
        cut = f"  UNFINISHED, {row['collected']} in all" if "unfinished" in row and "collected" in row else ""
        lines.append(
            f"{name:<10} {row['passed']:>6} {row['skipped']:>7} {len(row['failed']):>6} {row['seconds']:>7}  "
            f"{row['device']}, torch {row['torch']}, triton {row['triton']}, {row['commit'][:8]}{cut}"
        )
        lines += [f"    {test}: {why}" for test, why in row["failed"].items()]
    return "\n".join(lines)


# The check.


def stale(ledger: dict[str, Row], sources: Sources) -> dict[str, str]:
    """Why the ledger does not speak for a family as it is."""
    reasons = {}
    for family in TESTS:
        row = ledger.get(family)
        if row is None:
            reasons[family] = "no GPU has run its tests"
        elif row["sources"] != hash_of(family, sources):
            reasons[family] = f"changed since {row['commit'][:8]} ran on {row['device']}"
        elif not green(row):
            reasons[family] = f"{len(row['failed'])} tests failed" if row["failed"] else "its tests did not end"
    return reasons


def quoted(page: Path, text: str, sources: Sources) -> set[str]:
    """The families whose figures a page shows: those of its links to benchmarks, or that its model uses, or all."""
    if page.name == "performance.md" or page == sources.root / "README.md":
        return set(KERNELS)
    families = set(re.findall(r"\bbenchmarks/([a-z0-9]+)-", text))
    families |= {"attention"} if "jagged" in families else set()  # measured together
    model = sources.root / "modules/models" / page.stem
    if re.search(r"\bH[12]00\b", text):
        files = [*model.glob("*.py"), model.with_suffix(".py")]
        definitions = sources.reached(path for path in files if path.exists())
        families |= {module.split(".")[1] for module, _ in definitions if module.startswith("kernels.")}
    return families & set(KERNELS)


def unmarked(families: set[str], sources: Sources) -> list[str]:
    """Pages that quote one of the families and do not say that the figures are older. Benchmarks name their commit."""
    wrong, root = [], sources.root
    for page in sorted([root / "README.md", *root.glob("docs/*.md"), *root.glob("kernels/*/README.md")]):
        text = page.read_text(encoding="utf-8")
        said = {name.strip() for names in OLDER.findall(text) for name in names.split(",")}
        if missing := quoted(page, text, sources) & families - said:
            names = ", ".join(sorted(said | missing))
            wrong.append(f"{page.relative_to(root)}: add the line 'Figures of older code: {names}.'")
    return wrong


def check() -> int:
    sources = Sources()
    reasons = stale(read(LEDGER), sources)
    for family, reason in reasons.items():
        print(f"{LEDGER.relative_to(ROOT)}: {family}: {reason}")
    wrong = unmarked(set(reasons), sources)
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    return bool(wrong)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_ledger", description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(TESTS)} (default: all)")
    parser.add_argument("--workers", type=int, default=8, help="processes that share the GPU (default: 8)")
    parser.add_argument("--seconds", type=float, default=120, help="what a test may take (default: 120)")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds, after which the run stops (default: none)")
    parser.add_argument("--ledger", type=Path, default=LEDGER, help="the file (default: tests/gpu_ledger.json)")
    parser.add_argument("--check", action="store_true", help="only compare the ledger with the code and the pages")
    options = parser.parse_args(arguments)
    if options.check:
        return check()
    if unknown := set(options.families) - set(TESTS):
        parser.error(f"no family {', '.join(sorted(unknown))}; there are {', '.join(TESTS)}")
    import torch

    if not torch.cuda.is_available():
        parser.error("there is no GPU here; what ran elsewhere is in tests/gpu_ledger.json")
    options.tests = TESTS
    ends = time.monotonic() + options.limit
    common, sources = facts(), Sources()
    for family in options.families or TESTS:
        earlier = read(options.ledger).get(family, {})
        about = common | {"sources": hash_of(family, sources)}
        print(f"\n{family}: {', '.join(TESTS[family])}", flush=True)
        if time.monotonic() < ends:
            run(family, about, earlier, options, ends)
    rows = {name: row for name, row in read(options.ledger).items() if name in (options.families or TESTS)}
    print("\n" + table(rows))
    return int(not all(map(green, rows.values())) or len(rows) < len(options.families or TESTS))


if __name__ == "__main__":
    sys.exit(main())
