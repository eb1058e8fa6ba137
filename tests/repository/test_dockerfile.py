"""The Dockerfile, read as its builder reads it: what it copies is there, what it runs are commands of the Makefile."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib

from train.process.places import ROOT

KNOWN = {"FROM", "RUN", "USER", "WORKDIR", "ARG", "COPY", "ENV", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """Instruction and arguments, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [
        (name, rest.strip()) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())
    ]


def test_it_has_known_instructions_only_and_begins_with_an_image() -> None:
    names = [name for name, _ in instructions()]
    assert set(names) <= KNOWN
    assert names[0] == "FROM"


def test_its_python_is_one_that_the_project_runs_on() -> None:
    image = dict(reversed(instructions()))["FROM"]
    version = re.fullmatch(r"python:(3\.\d+)-slim-\w+", image)
    assert version is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"Programming Language :: Python :: {version[1]}" in project["classifiers"]


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


def test_the_build_gets_nothing_that_git_ignores() -> None:
    ignored = {line.strip("*/") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    assert {line.strip("/") for line in (ROOT / ".gitignore").read_text().split()} | {".git"} <= ignored | {
        "*.egg-info"
    }
