"""Every `bash` block of README.md and of the tutorial runs, in order, in a scratch copy of the repository.

A comment `<!-- test: ... -->` above a block, which readers do not see, holds what is appended to each of its commands
so that they end in seconds, SHORT for the overrides below; nothing else is changed. A `yaml` or `python` block is saved
under the path that its first line names; other `python` blocks run in test_docs.py.
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

PAGES = ("README.md", "docs/tutorial.md")
SHORT = (
    "runtime.steps=2 runtime.eval_steps=1 data.max_history=8 data.batch_size=8 data.eval_batch_size=512 "
    "data.split=[0.9,0.09,0.01] data.num_workers=0 tracking.wandb=disabled tracking.tensorboard=false"
)
BLOCK = re.compile(r"(?:<!-- test:(?P<appended>.*?)-->\n)?```(?P<language>\w+)\n(?P<body>.*?)```", re.DOTALL)
PATH = re.compile(r"# ([\w./-]+\.(?:yaml|py))\n")


def blocks_of(page: str) -> list[dict[str, str | None]]:
    return [match.groupdict() for match in BLOCK.finditer((ROOT / page).read_text())]


def files(page: str) -> dict[str, str]:
    """What the page has its readers save, by path."""
    bodies = [block["body"] or "" for block in blocks_of(page)]
    return {found[1]: body for body in bodies if (found := PATH.match(body))}


def commands(page: str) -> list[str]:
    """The page's commands with what the test appends."""
    found = []
    for block in blocks_of(page):
        if block["language"] == "bash":
            body, appended = block["body"] or "", block["appended"]
            assert appended is not None, f"no <!-- test: --> comment above: {body}"
            found += [f"{line} {appended.strip().replace('SHORT', SHORT)}" for line in body.strip().splitlines()]
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
@pytest.mark.parametrize(
    "page", [page if page == "README.md" else pytest.param(page, marks=pytest.mark.nightly) for page in PAGES]
)
def test_every_command_runs(page: str, clone: Path) -> None:
    for name, body in files(page).items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(body)
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = environment() | {"PATH": programs, "PYTHONPATH": str(clone)}  # the clone's `gemsmith`, not this one's
    variables["NPROC"] = "1"  # where a command does not say: `make quickstart` starts two by the same script
    for command in commands(page):
        done = subprocess.run(
            ["bash", "-c", command], cwd=clone, env=variables, capture_output=True, text=True, check=False
        )
        # A comparison's exit code is its verdict, and two steps may miss the budget: there the report is what counts.
        judged = "train.commands.compare" in command and list(clone.glob("runs/compare-*/report.md"))
        assert done.returncode == 0 or judged, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"


def test_only_kinds_of_blocks_that_are_tested_appear() -> None:
    blocks = blocks_of("README.md")
    assert {block["language"] for block in blocks} == {"bash", "yaml", "python"}
    assert (ROOT / "README.md").read_text().count("```") == 2 * len(blocks)
    assert all(
        PATH.match(block["body"] or "") for block in blocks_of("docs/tutorial.md") if block["language"] != "bash"
    )


def test_every_path_that_is_named_exists() -> None:
    prose = BLOCK.sub("", (ROOT / "README.md").read_text())
    named = {name for name in re.findall(r"`([\w./-]+)`", prose) if "/" in name or name.endswith(".md")}
    made_by_running = {".venv", "runs/", "plots/", "predictions/", "checkpoints/"}
    assert {name for name in named - made_by_running if not (ROOT / name).exists()} == set()
