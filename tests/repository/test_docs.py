"""Every `python` block of the documentation runs on the CPU, those of a page in order and with the same names.

A comment `[5, 4, 64]` behind a statement is the shape of what it assigns or is (`[7, 64] and [5, 2]` of two results);
comments that end a block are what it prints. `<!-- not run: REASON -->` above a block, which readers do not see, leaves
it out.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import jagged
from kernels.core import dispatch
from tests.launching import ROOT

BLOCK = re.compile(r"(<!-- not run: .*?-->\n)?```python\n(.*?)```", re.DOTALL)
OWN_TESTS = ("docs/tutorial.md",)  # test_readme.py
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("kernels/*/README.md"))
    if "```python" in path.read_text(encoding="utf-8") and str(path.relative_to(ROOT)) not in OWN_TESTS
)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page registers goes when its test ends."""
    monkeypatch.setattr(dispatch, "_registry", dict(dispatch._registry))
    monkeypatch.setattr(dispatch, "_chosen", {})


def run(block: str, names: dict[str, Any], page: str) -> None:
    lines, printed = block.splitlines(), io.StringIO()
    for statement in ast.parse(block).body:
        assert statement.end_lineno is not None
        source = ast.Module([statement], [])
        with contextlib.redirect_stdout(printed):
            if isinstance(statement, ast.Expr):
                value = eval(compile(ast.Expression(statement.value), page, "eval"), names)
            else:
                exec(compile(source, page, "exec"), names)
                targets = statement.targets[0] if isinstance(statement, ast.Assign) else None
                value = eval(ast.unparse(targets), names) if targets is not None else None
        if shapes := re.search(r"# (\[[\d, ]+\](?: and \[[\d, ]+\])*)", lines[statement.end_lineno - 1]):
            results = value if isinstance(value, tuple) else (value,)
            assert " and ".join(str(list(x.shape)) for x in results) == shapes[1], lines[statement.end_lineno - 1]
    if printed.getvalue():
        end = re.search(r"(?:^#.*\n?)+\Z", block, re.MULTILINE)
        assert end is not None, f"a block of {page} prints, and does not say what"
        assert symbols(end[0].replace("\n# ", "\n").removeprefix("# ")) == symbols(printed.getvalue())


def symbols(text: str) -> str:
    """Without the numbers of a graph's symbolic sizes, which change with PyTorch."""
    return re.sub(r"\bs\d+\b", "s", text)


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page: str) -> None:
    if page == "docs/kernels.md":
        pytest.importorskip("triton", reason="what the page prints is of an installation that has it")
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "page"}
    for left_out, block in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        if not left_out:
            run(block, names, page)


def test_a_backend_that_is_added_as_the_page_says_is_asked() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for _, block in BLOCK.findall((ROOT / "docs/kernels.md").read_text(encoding="utf-8")):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(block, names)
    x, offsets = torch.randn(3, 16), torch.tensor([0, 3])
    assert jagged.jagged_linear(x, offsets, torch.randn(16, 16)).shape == (3, 16)
    facts = {"device": "cuda", "capability": (9, 0), "dtype": torch.float16, "inner": 16, "tf32": False}
    said = dispatch.explain("jagged_linear", **facts, width=24)
    assert "needs a width in multiples of 16, got 24" in said


def headings(page: Path) -> set[str]:
    """The anchors that a page's headings have on the web."""
    found = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_links_lead_to_files_and_headings() -> None:
    astray = []
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("kernels/*/README.md")):
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, heading = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (heading and heading not in headings(target)):
                astray.append(f"{page.relative_to(ROOT)}: {link}")
    assert astray == []


def test_the_readme_lists_every_page() -> None:
    """Under "Pages", of which `make site` makes its navigation."""
    listed = re.findall(
        r"\]\((docs/\w+\.md)\)", (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Pages\n")[2]
    )
    assert sorted(listed) == sorted(f"docs/{page.name}" for page in ROOT.glob("docs/*.md"))


def test_pages_with_blocks_are_found() -> None:
    assert {"README.md", "docs/jagged.md", "docs/moe.md", "docs/kernels.md"} <= set(PAGES)
    assert all((ROOT / page).exists() for page in OWN_TESTS)


def test_a_wrong_shape_and_a_wrong_print_are_seen() -> None:
    run("x = [\n    1,\n]\nimport torch\ny = torch.zeros(2, 3)  # [2, 3]\nprint(1)\n# 1\n", {}, "page")
    for wrong in ("import torch\ntorch.zeros(2, 3)  # [3, 2]\n", "print(1)\n# 2\n", "print(1)\n"):
        with pytest.raises(AssertionError):
            run(wrong, {}, "page")
