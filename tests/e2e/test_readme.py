"""Every `bash` block of README.md runs, in order, in a scratch copy of the repository; `python` ones in test_docs.py.

A comment `<!-- test: ... -->` above a block, which readers do not see, holds what is appended to each of its commands
so that they end in seconds; nothing else is changed. A `yaml` block is saved under the path that its first line names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, environment

README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"(?:<!-- test:(?P<appended>.*?)-->\n)?```(?P<language>\w+)\n(?P<body>.*?)```", re.DOTALL)
BLOCKS = [match.groupdict() for match in BLOCK.finditer(README)]


def commands() -> list[str]:
    """The README's commands with what the test appends."""
    found = []
    for block in BLOCKS:
        if block["language"] == "bash":
            assert block["appended"] is not None, f"no <!-- test: --> comment above: {block['body']}"
            found += [f"{line} {block['appended'].strip()}" for line in block["body"].strip().splitlines()]
    return found


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What a clone of this state would hold, with this environment in place of the one that make would install."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").mkdir()
    for part in ("bin", "lib", "pyvenv.cfg"):
        (tmp_path / ".venv" / part).symlink_to(Path(sys.prefix) / part)
    for device in ("cpu", "cuda"):
        (tmp_path / f".venv/installed-{device}").touch()
    return tmp_path


@pytest.mark.timeout(900)
def test_every_command_runs(clone: Path) -> None:
    for block in BLOCKS:
        if block["language"] == "yaml":
            path = clone / block["body"].splitlines()[0].removeprefix("# ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block["body"])
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = environment() | {"PATH": programs, "PYTHONPATH": str(clone)}  # the clone's `gemsmith`, not this one's
    for command in commands():
        done = subprocess.run(
            ["bash", "-c", command], cwd=clone, env=variables, capture_output=True, text=True, check=False
        )
        # A comparison's exit code is its verdict, and two steps may miss the budget: there the report is what counts.
        judged = "train.commands.compare" in command and list(clone.glob("runs/compare-*/report.md"))
        assert done.returncode == 0 or judged, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"


def test_only_kinds_of_blocks_that_are_tested_appear() -> None:
    assert {block["language"] for block in BLOCKS} == {"bash", "yaml", "python"}
    assert README.count("```") == 2 * len(BLOCKS)


def test_every_path_that_is_named_exists() -> None:
    prose = BLOCK.sub("", README)
    named = {name for name in re.findall(r"`([\w./-]+)`", prose) if "/" in name or name.endswith(".md")}
    made_by_running = {".venv", "runs/", "plots/", "predictions/", "checkpoints/"}
    assert {name for name in named - made_by_running if not (ROOT / name).exists()} == set()
