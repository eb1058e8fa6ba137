"""Hooks of mkdocs.yml, for `make site`.

Pages stand under the paths that they have in the repository, so that their links hold. Added are a page of all keys,
pages of the API, and the navigation, which is the section "Pages" of README.md.
"""

from __future__ import annotations

import importlib
import logging
import re
import subprocess
from itertools import groupby
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

from train.commands import keys

ROOT = Path(__file__).resolve().parents[1]
PAGES = (":(glob)*.md", "docs/*.md", "kernels/*.md")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
ADDED = {"Keys": "keys.md", "Modules": "api/modules.md", "Operators": "api/kernels.md"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs["toc"] = {"slugify": slugify(case="lower"), "permalink": True}  # GitHub's anchors
    logging.getLogger("mkdocs.plugins.mkdocs_autorefs").setLevel(logging.ERROR)  # `x[i] [N]` in docstrings is no link
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Pages\n")[2]
    config.nav = [{"gemsmith": "README.md"}]
    for item in re.split(r"^- \*\*", section, flags=re.MULTILINE)[1:]:
        links = re.findall(r"\[([^]]+)\]\((\S+\.md)\)", " ".join(item.split()))
        config.nav.append({item.partition("**")[0]: [{title[0].upper() + title[1:]: path} for title, path in links]})
    inside = [{path.parent.name: f"kernels/{path.parent.name}/README.md"} for path in readmes()]
    config.nav += [{"Reference": [{title: path} for title, path in ADDED.items()]}, {"Inside of kernels": inside}]
    config.nav += [{"Project": ["CONTRIBUTING.md", "CHANGELOG.md"]}]
    return config


def readmes() -> list[Path]:
    return sorted(ROOT.glob("kernels/*/README.md"))


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """The theme's files; pages of the repository with what they link to; pages that are made here."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PAGES]
    found = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    linked = {
        (ROOT / page).parent.joinpath(link).resolve()
        for page in found
        for link in LINK.findall((ROOT / page).read_text(encoding="utf-8"))
    }
    paths = {ROOT / page for page in found} | {path for path in linked if path.is_file()}
    made = dict(zip(ADDED.values(), (key_page(), modules_page(), kernels_page()), strict=True))
    return Files(
        [file for file in files if not (file.abs_src_path or "").startswith(f"{config.docs_dir}/")]
        + [File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)) for path in sorted(paths)]
        + [File.generated(config, path, content=text) for path, text in made.items()]
    )


def key_page() -> str:
    lines = [
        "# Keys",
        "",
        "From `gemsmith keys`. `model=NAME` and `data=NAME` mark keys of one model or source.",
    ]
    for section, found in groupby(keys.keys(), lambda key: re.split(r"\W", key.name)[0]):
        lines += ["", f"## {section}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for key in found:
            meaning = " ".join(line.strip() for line in str(key).splitlines()[1:])
            cells = (f"`{key.name}`", f"`{key.kind}`", f"`{key.default}`", meaning)
            lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines)


def modules_page() -> str:
    """The modules in the first column of the table of docs/modules.md."""
    lines, page = ["# Modules"], (ROOT / "docs/modules.md").read_text(encoding="utf-8")
    for cell in re.findall(r"^\| (`modules[^|]*) \|", page, re.MULTILINE):
        module = ""
        for name in re.findall(r"`([\w.]+)`", cell):
            module = name.rpartition(".")[0] or module
            lines.append(documented(module, name.rpartition(".")[2]))
    return "\n\n".join(lines)


def kernels_page() -> str:
    """The public functions and classes of each family."""
    lines = ["# Operators"]
    for path in readmes():
        family = importlib.import_module(f"kernels.{path.parent.name}")
        public = [name for name in family.__all__ if callable(getattr(family, name))]
        lines += [f"## {family.__name__}", *(documented(family.__name__, name) for name in public)]
    return "\n\n".join(lines)


def documented(module: str, name: str) -> str:
    """What mkdocstrings replaces by the docstring of a public name, wherever it is defined."""
    found = getattr(importlib.import_module(module), name)
    return f"::: {found.__module__}.{found.__qualname__}\n    options: {{heading: {module}.{name}}}"
