"""What must not be in the repository: paths of one machine, unfinished work, files that do not parse."""

from __future__ import annotations

import io
import json
import re
import subprocess
import tokenize

import pytest
import yaml

from train.commands.doctor import ROOT

# Written so that this file does not hold what it looks for.
MACHINE = re.compile(r"(?<![\w.])/(work|root|home|opt/(pypi|wheels))/|\.\./share[d]\b|\.gpu_ki[t]")
UNFINISHED = re.compile(r"\b(TOD[O]|FIXM[E]|XX[X]|NotImplementedErro[r])\b")


def repository_files(*suffixes: str) -> list[str]:
    """Files that are, or would be, committed."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if name.endswith(suffixes) and (ROOT / name).exists()]


TEXT = ("Makefile", "run", ".md", ".py", ".sh", ".sbatch", ".yaml", ".yml", ".toml", ".txt", ".json")


def lines_matching(pattern: re.Pattern[str], *suffixes: str) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()}"
        for name in repository_files(*suffixes)
        for number, line in enumerate((ROOT / name).read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]


def test_the_scan_finds_the_repository() -> None:
    assert {"Makefile", "pyproject.toml", "train/commands/doctor.py", ".ci/run"} <= set(repository_files(*TEXT))


@pytest.mark.parametrize("text", ["cd /" + "work/main", "'/" + "home/me/data'", "see ../" + "shared/design.md"])
def test_the_pattern_knows_machine_paths(text: str) -> None:
    assert MACHINE.search(text)


def test_no_file_names_a_machine() -> None:
    assert lines_matching(MACHINE, *TEXT) == []


def test_no_unfinished_work() -> None:
    assert lines_matching(UNFINISHED, ".py", ".sh", ".yaml", "Makefile") == []


def test_comments_are_ascii() -> None:
    wrong = [
        f"{name}:{token.start[0]}: {token.string}"
        for name in repository_files(".py")
        for token in tokenize.generate_tokens(io.StringIO((ROOT / name).read_text(encoding="utf-8")).readline)
        if token.type == tokenize.COMMENT and not token.string.isascii()
    ]
    assert wrong == []


def test_data_files_parse() -> None:
    for name in repository_files(".yaml", ".yml"):
        list(yaml.safe_load_all((ROOT / name).read_text()))
    for name in repository_files(".json"):
        json.loads((ROOT / name).read_text())
