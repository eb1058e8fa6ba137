"""The build backend (PEP 517). A wheel holds one package, `gemsmith`, and in it `gemsmith.modules`, `gemsmith.train`...

In the checkout the packages stand at the top, where `torchrun train/main.py` and editable installations find them. An
installation for everybody must not take names such as `train` and `modules`. A wheel is therefore built from a copy in
which they lie in one folder, with configurations and bundled data, and in which all their names begin with `gemsmith.`:
in imports, and wherever else a module is named, such as in strings that are imported later.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

ROOT = Path(__file__).resolve().parent.parent
NAMESPACE = "gemsmith"
PACKAGES = ("kernels", "launch", "modules", "train")
CONTENTS = (
    *(f"{package}/**/*.py" for package in PACKAGES),
    "launch/*.sh",
    "configs/**/*.yaml",
    "data/**/*",
    "requirements/*.txt",
)
"""What goes into the package, by globs."""
TEXTS = (".py", ".sh", ".yaml")
_either = "|".join(PACKAGES)
IMPORT = re.compile(rf"^(\s*)from ({_either}) import", re.MULTILINE)
WHOLE = re.compile(rf"^(\s*)import ({_either})$", re.MULTILINE)
DOTTED = re.compile(rf"(?<![\w./])({_either})\.(\w+)")


def renamed(text: str) -> str:
    """A file's text with the names that its modules have in the wheel.

    `train.main` is such a name because there is a module train/main.py; `train.csv` is none.
    """

    def prefixed(found: re.Match[str]) -> str:
        path = ROOT / found[1] / found[2]
        return f"{NAMESPACE}.{found[0]}" if path.is_dir() or path.with_suffix(".py").exists() else found[0]

    text = IMPORT.sub(rf"\1from {NAMESPACE}.\2 import", text)
    text = WHOLE.sub(rf"\1import {NAMESPACE}.\2; from {NAMESPACE} import \2", text)
    return DOTTED.sub(prefixed, text)


def copy_renamed(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
    if source.suffix in TEXTS:
        target.write_text(renamed(source.read_text(encoding="utf-8")), encoding="utf-8")


def stage(folder: Path) -> None:
    """Put what wheels are built from into an empty folder."""
    for glob in CONTENTS:
        for source in ROOT.glob(glob):
            if source.is_file() and "__pycache__" not in source.parts:
                copy_renamed(source, folder / NAMESPACE / source.relative_to(ROOT))
    (folder / NAMESPACE / "__init__.py").write_text('"""Training of recommendation models, and its parts."""\n')
    for name in ("README.md", "LICENSE"):
        shutil.copy2(ROOT / name, folder / name)
    project = renamed((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    backend = 'build-backend = "tools.wheel"\nbackend-path = ["."]\n'
    if backend not in project:
        raise ValueError(f"pyproject.toml must hold the lines {backend!r}, in whose place a staged copy has setuptools")
    project = project.replace(backend, 'build-backend = "setuptools.build_meta"\n')
    (folder / "pyproject.toml").write_text(project, encoding="utf-8")


@contextlib.contextmanager
def _staged() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        stage(Path(folder))
        with contextlib.chdir(folder):
            yield


def build_wheel(
    wheel_directory: str, config_settings: dict | None = None, metadata_directory: str | None = None
) -> str:
    target = os.path.abspath(wheel_directory)
    metadata = metadata_directory and os.path.abspath(metadata_directory)
    with _staged():
        return build_meta.build_wheel(target, config_settings, metadata)


def build_sdist(sdist_directory: str, config_settings: dict | None = None) -> str:
    """A source distribution of the staged copy: wheels that are built from it are those that are built from here."""
    target = os.path.abspath(sdist_directory)
    with _staged():
        return build_meta.build_sdist(target, config_settings)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: dict | None = None) -> str:
    target = os.path.abspath(metadata_directory)
    with _staged():
        return build_meta.prepare_metadata_for_build_wheel(target, config_settings)
