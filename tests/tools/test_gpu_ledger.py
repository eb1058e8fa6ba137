"""What the ledger of GPU tests takes for a change, what it notes of a run, and what it asks of pages."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest

from tools import gpu_ledger
from tools.device_sources import Sources, digest

TREE = {
    "kernels/own/hopper/kernel.py": """
from kernels.core import arithmetic as shared
from kernels.other import door
from kernels.other.hopper.loader import wait

def kernel(x):
    from ..sizes import SIZE
    return wait(door(shared.add(x, SIZE)))

launch = Launcher(kernel)
""",
    "kernels/own/sizes.py": "SIZE = 3\nUNUSED = 4\n",
    "kernels/core/arithmetic.py": '''"""Shared."""
ONE = 1
def add(x, y):
    """Sum."""
    return one(x) + y
def one(x):
    return x * ONE  # once
def unused(x):
    return x
''',
    "kernels/other/__init__.py": "from kernels.other.operator import door\nfrom kernels.other.operator import closed\n",
    "kernels/other/operator.py": "def door(x):\n    return x\ndef closed(x):\n    return x\n",
    "kernels/other/hopper/loader.py": "def wait(step):\n    return step + 1\n",
}
ABOUT = {"device": "a card", "torch": "2", "triton": "3", "driver": "1", "commit": "0123456789", "sources": "abc"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new", "moves"),
    [
        ("kernels/other/hopper/loader.py", "step + 1", "step", True),
        ("kernels/core/arithmetic.py", "ONE = 1", "ONE = 2", True),
        ("kernels/core/arithmetic.py", "x * ONE", "ONE * x", True),
        ("kernels/own/sizes.py", "SIZE = 3", "SIZE = 5", True),
        ("kernels/other/operator.py", "def door(x):\n    return x", "def door(x):\n    return -x", True),
        ("kernels/own/hopper/kernel.py", "Launcher(kernel)", "Launcher(kernel, num_warps=8)", True),
        ("kernels/own/sizes.py", "UNUSED = 4", "UNUSED = 5", False),
        ("kernels/other/operator.py", "def closed(x):\n    return x", "def closed(x):\n    return -x", False),
        ("kernels/core/arithmetic.py", "def unused(x):\n    return x", "", False),
        ("kernels/core/arithmetic.py", "  # once", "", False),
        ("kernels/core/arithmetic.py", '"""Sum."""', '"""Their sum."""', False),
        ("kernels/core/arithmetic.py", '"""Shared."""', "# Shared.\n", False),
    ],
)
def test_the_hash_moves_with_what_kernels_reach(tree: Path, file: str, old: str, new: str, moves: bool) -> None:
    before = digest(Sources(tree).family("own"))
    text = (tree / file).read_text()
    assert old in text
    (tree / file).write_text(text.replace(old, new))
    assert (digest(Sources(tree).family("own")) != before) == moves


def test_what_families_share_counts_for_each() -> None:
    sources = Sources()
    for family in ("attention", "gdpa", "ikbo"):
        assert ("kernels.attention.hopper.backward_loader", "await_flag") in sources.family(family)
    for family in gpu_ledger.KERNELS:
        assert ("kernels.core.launch", "Launcher") in sources.family(family)


TESTS = """
import pytest, time
from types import SimpleNamespace
from kernels.core import launch

@pytest.mark.gpu
@pytest.mark.parametrize("n", range(4))
def test_numbers(n):
    assert n != 2, "two"

@pytest.mark.gpu
def test_hangs():
    launch._last = SimpleNamespace(kernel=SimpleNamespace(__name__="waits_for_ever"))
    time.sleep(1000)

@pytest.mark.gpu
def test_of_another_chip():
    pytest.skip("other chip")

def test_without_a_gpu():
    raise AssertionError
"""


def test_a_run_notes_what_passed_and_names_the_kernel_that_hangs(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # names of tests begin here, wherever the checkout is
    (tmp_path / "test_fake.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_timeout_set_timer\n")
    ledger = tmp_path / "ledger.json"
    options = argparse.Namespace(workers=1, seconds=3, ledger=ledger, tests={"moe": [str(tmp_path)]})
    # An earlier run was cut short.
    earlier = ABOUT | {"unfinished": True, "seconds": 100, "done": {"test_fake.py::test_numbers[0]": "passed"}}
    row = gpu_ledger.run("moe", ABOUT, earlier, options, time.monotonic() + 200)
    assert row == json.loads(ledger.read_text())["moe"]
    assert row["failed"] == {
        "test_fake.py::test_numbers[2]": "AssertionError: two",
        "test_fake.py::test_hangs": "took more than 3 s; launched last: waits_for_ever",
    }
    assert (row["passed"], row["skipped"]) == (3, 1)
    assert row["seconds"] > 100
    assert "unfinished" not in row
    assert not gpu_ledger.green(row)
    assert "launched last: waits_for_ever" in gpu_ledger.table({"moe": row})


def test_a_run_that_is_cut_short_is_no_run(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.write_text('["collected", 3]\n["a", "passed", ""]\n["b", "passed", ""]\n["b", "failed", "at its end"]\n')
    row = ABOUT | gpu_ledger.counts(results, {"c": "passed"}) | {"unfinished": True, "seconds": 1}
    assert (row["passed"], row["failed"], row["collected"]) == (2, {"b": "at its end"}, 4)
    assert "UNFINISHED, 4 in all" in gpu_ledger.table({"moe": row})


def test_stale_rows_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_ledger, "hash_of", lambda family, sources: family)
    sources = Sources()
    good = {"commit": "0123456789", "device": "a card", "passed": 3, "failed": {}, "skipped": 0}
    ledger = {family: good | {"sources": family} for family in gpu_ledger.TESTS}
    assert gpu_ledger.stale(ledger, sources) == {}
    del ledger["moe"]
    ledger["gdpa"] = ledger["gdpa"] | {"sources": "0"}
    ledger["jagged"] = ledger["jagged"] | {"failed": {"test": "why"}}
    ledger["ikbo"] = ledger["ikbo"] | {"unfinished": True}
    assert gpu_ledger.stale(ledger, sources) == {
        "gdpa": "changed since 01234567 ran on a card",
        "ikbo": "its tests did not end",
        "jagged": "1 tests failed",
        "moe": "no GPU has run its tests",
    }


def test_pages_mark_figures_of_older_code(tree: Path) -> None:
    pages = {
        "README.md": "No figures.\n\n*Figures of older code: moe, gdpa.*\n",
        "docs/gdpa.md": "[fast](benchmarks/gdpa-h200.md)\n",
        "docs/jagged_attention.md": "[fast](benchmarks/jagged-h200.md)\n",
        "docs/big.md": "Fast on an H200.\n",
        "modules/models/big.py": "from kernels.gdpa.operator import gdpa\ndef big():\n    return gdpa\n",
        "kernels/gdpa/operator.py": "gdpa = 1\n",
    }
    for name, text in pages.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)

    def asked(*families: str) -> dict[str, str]:
        lines = gpu_ledger.unmarked(set(families), Sources(tree))
        return dict(line.split(": add the line 'Figures of older code: ") for line in lines)

    assert asked() == {}
    assert asked("gdpa") == {"docs/big.md": "gdpa.'", "docs/gdpa.md": "gdpa.'"}
    assert asked("attention") == {"README.md": "attention, gdpa, moe.'", "docs/jagged_attention.md": "attention.'"}
