"""Write the table of docs/reliability.md: `python tools/reliability.py`.

Its rows are the tests that carry `@pytest.mark.reliability(what is injected, what holds)`. Their files are read, not
imported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
TABLE = re.compile(r"(?<=<!-- written by tools/reliability.py -->\n).*?(?=<!-- end -->)", re.DOTALL)


def rows(path: Path) -> Iterator[tuple[str, str, str]]:
    """What is injected, what holds and the test's name, for each mark of a test file in its order.

    Raises ValueError for a mark that does not have two texts.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            if not isinstance(mark, ast.Call) or ast.unparse(mark.func) != "pytest.mark.reliability":
                continue
            texts = [argument.value for argument in mark.args if isinstance(argument, ast.Constant)]
            if len(texts) != 2 or len(mark.args) != 2 or mark.keywords or not all(isinstance(t, str) for t in texts):
                raise ValueError(
                    f"{path.name}::{node.name}: pytest.mark.reliability takes two texts, what is injected and what "
                    'holds, e.g. ("a rank is killed in a step", "the run restarts from its newest checkpoint")'
                )
            yield texts[0], texts[1], f"{path.name}::{node.name}"


def table(tests: Path = ROOT / "tests") -> str:
    """The Markdown table of all marks below a folder of tests."""
    found = [row for path in sorted(tests.rglob("test_*.py"), key=lambda path: path.name) for row in rows(path)]
    lines = ["| what is injected | what happens | test |", "|---|---|---|"]
    lines += [f"| {injected} | {holds} | `{test}` |" for injected, holds, test in found]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with the table of now."""
    return TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
