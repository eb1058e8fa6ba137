"""The lock files: exact, complete, alike on both devices, and inside what pyproject.toml and the doctor allow."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from train.commands.doctor import RELEASES, ROOT, minor

LOCKS = ["cpu", "cuda"]


def pins(path: Path) -> dict[str, str]:
    """Distribution -> version, following `-r`; fails on a line that is not an exact pin."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if line.startswith("-r "):
            found |= pins(path.with_name(line.removeprefix("-r ")))
        elif line and not line.startswith(("#", "--extra-index-url ")):
            (specifier,) = Requirement(line).specifier
            assert specifier.operator == "==", line
            assert "*" not in specifier.version, line
            found[canonicalize_name(Requirement(line).name)] = specifier.version
    return found


def lock(device: str) -> dict[str, str]:
    return pins(ROOT / "requirements" / f"{device}.txt")


@pytest.mark.parametrize("device", LOCKS)
def test_the_versions_are_a_row_of_the_doctors_table(device: str) -> None:
    found = lock(device)
    fbgemm = found["fbgemm-gpu-cpu" if device == "cpu" else "fbgemm-gpu"]
    (row,) = [row for row in RELEASES if minor(row.torch) == minor(found["torch"])]
    assert (fbgemm, found["torchrec"], found["triton"]) == (row.fbgemm, row.torchrec, row.triton)


def test_the_site_adds_packages_and_replaces_none() -> None:
    assert not pins(ROOT / "requirements/docs.txt").keys() & (lock("cpu") | lock("cuda")).keys()


def test_the_cpu_lock_holds_no_cuda() -> None:
    found = lock("cpu")
    assert found["torch"].endswith("+cpu")
    assert not [name for name in found if name.startswith(("nvidia-", "cuda-")) or name == "fbgemm-gpu"]


@pytest.mark.parametrize("device", LOCKS)
def test_the_lock_satisfies_pyproject(device: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found = lock(device)
    for text in [*project["dependencies"], *extras["train"], *extras[device], *extras["dev"]]:
        requirement = Requirement(text)
        if requirement.name == project["name"]:
            assert requirement.extras <= {"train"}, text
        else:
            assert requirement.specifier.contains(found[canonicalize_name(requirement.name)]), text


def test_every_dependency_of_a_locked_package_is_locked() -> None:
    """Read from the packages that are installed here at the version of the CPU lock."""
    found = lock("cpu")
    checked = 0
    for name, version in found.items():
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if distribution.version != version:
            continue
        checked += 1
        for text in distribution.requires or []:
            requirement = Requirement(text)
            wanted = canonicalize_name(requirement.name)
            if wanted == "fbgemm-gpu" or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
                continue  # fbgemm-gpu-cpu stands in for the CUDA build that TorchRec's metadata names
            assert requirement.specifier.contains(found[wanted], prereleases=True), f"{name} needs {text}"
    assert checked > 10
