"""The Dockerfile, read as its builder reads it: what it copies is there, what it runs are commands of the Makefile."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib

from train.config.places import ROOT


def instructions() -> list[tuple[str, str]]:
    """Instruction and arguments, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [
        (name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())
    ]


def test_what_it_copies_is_in_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    files = {path for name in listed.stdout.split("\n") for path in (name, name.split("/")[0])} | {"."}
    copies = [shlex.split(rest) for name, rest in instructions() if name == "COPY"]
    sources = {source for copy in copies for source in copy[1:-1]}
    assert sources <= files
    # Of every package there is what an editable installation looks for.
    assert {f"{package}/__init__.py" for package in ("kernels", "launch", "modules", "train")} <= sources


def test_what_it_runs_are_targets_of_the_makefile_and_commands() -> None:
    text = " ".join(rest for name, rest in instructions() if name == "RUN")
    targets = re.findall(r"\bmake (\w+) DEVICE=\$\{DEVICE\}", text)
    assert targets == ["env"]
    subprocess.run(["make", "-n", *targets, "DEVICE=cpu"], cwd=ROOT, capture_output=True, check=True)
    command = json.loads(dict(instructions())["CMD"])
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert command[0] in scripts
