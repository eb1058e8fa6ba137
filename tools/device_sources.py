"""What the device code of a kernel family is made of: every definition that its files of kernels reach, and its hash.

Files are read, not imported. A family's files of kernels are those in `triton` and `hopper`; from there it
goes on by name, through imports, into shared files, of which only what is used counts. Comments, docstrings and the
place of a line do not.
"""

from __future__ import annotations

import ast
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kernels", "modules", "train")
WINGS = ("triton", "hopper")
# What differs between versions of Python, and says nothing.
UNREAD = {"ctx", "kind", "type_comment", "type_params", "returns", "annotation"}
Definition = tuple[str, str]  # module and name


class Module:
    """The definitions of a file, and where the names come from that it imports."""

    def __init__(self, name: str, path: Path) -> None:
        self.definitions: dict[str, list[ast.stmt]] = defaultdict(list)
        self.imports: dict[str, Definition] = {}
        self.statements: list[ast.stmt] = []
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self.imports |= imported(statement, package)
            elif not _is_text(statement):
                self.statements.append(statement)
                for each in set(_bound(statement)):
                    self.definitions[each].append(statement)
        self.package = package


def imported(statement: ast.Import | ast.ImportFrom, package: str) -> dict[str, Definition]:
    """Each name that the statement binds, and what it stands for; the second part is empty for a module."""
    if isinstance(statement, ast.Import):
        return {each.asname or each.name.split(".")[0]: (each.name, "") for each in statement.names}
    parts = package.split(".")
    base = parts[: len(parts) - statement.level + 1] if statement.level else []
    module = ".".join([*base, *filter(None, [statement.module])])
    return {each.asname or each.name: (module, each.name) for each in statement.names}


def _bound(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


class Sources:
    """The code below `root`."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.module = cache(self.module)  # type: ignore[method-assign]

    def module(self, name: str) -> Module | None:
        """The module of this name, None for one of another package and for what is none."""
        if name.split(".")[0] not in PACKAGES:
            return None
        path = self.root / name.replace(".", "/")
        files = (path.with_suffix(".py"), path / "__init__.py")
        return next((Module(name, file) for file in files if file.is_file()), None)

    def family(self, family: str) -> dict[Definition, list[ast.stmt]]:
        """All definitions that the family's kernels and the code that launches them reach, themselves included."""
        return self.reached(self.files(family))

    def files(self, family: str) -> list[Path]:
        """Its files of kernels."""
        return [path for wing in WINGS for path in sorted((self.root / "kernels" / family / wing).rglob("*.py"))]

    def name_of(self, path: Path) -> str:
        return ".".join(path.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__")

    def reached(self, files: Iterable[Path]) -> dict[Definition, list[ast.stmt]]:
        """What files define and all that this reaches, with their statements that define nothing."""
        found: dict[Definition, list[ast.stmt]] = {}
        waiting: list[Definition] = []
        for path in sorted(files):
            name = self.name_of(path)
            module = self.module(name)
            assert module is not None
            unnamed = [each for each in module.statements if not any(True for _ in _bound(each))]
            found[name, ""] = unnamed
            waiting += [(name, each) for each in module.definitions]
            waiting += [use for each in unnamed for use in self.uses(name, each)]
        return found | self.closure(waiting)

    def closure(self, definitions: Iterable[Definition]) -> dict[Definition, list[ast.stmt]]:
        """The definitions, with all that they reach."""
        found: dict[Definition, list[ast.stmt]] = {}
        waiting = [*definitions]
        while waiting:
            use = self.resolve(*waiting.pop())
            if use is None or use in found:
                continue
            name, own = use
            module = self.module(name)
            assert module is not None
            found[use] = module.definitions[own]
            waiting += [other for each in found[use] for other in self.uses(name, each)]
        return found

    def resolve(self, name: str, own: str) -> Definition | None:
        """Where a name of a module is defined, through as many imports as it takes; None for code of others."""
        module = self.module(name)
        if module is None or not own:
            return None
        if own in module.definitions:
            return name, own
        if own in module.imports and module.imports[own] != (name, own):
            return self.resolve(*module.imports[own])
        return None

    def uses(self, name: str, statement: ast.stmt) -> Iterator[Definition]:
        """What a statement of a module names, of the module and of those that it imports."""
        module = self.module(name)
        assert module is not None
        known = dict(module.imports)
        for node in ast.walk(statement):
            if isinstance(node, ast.Import | ast.ImportFrom):
                known |= imported(node, module.package)
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                yield known.get(node.id, (name, node.id))
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in known:
                yield self._attribute(*known[node.value.id], node.attr)

    def _attribute(self, name: str, own: str, attribute: str) -> Definition:
        """`own.attribute` where `own` is a module that `name` holds, or `name` is one itself."""
        inner = f"{name}.{own}" if own else name
        return (inner, attribute) if self.module(inner) else (name, own)


def plain(node: Any) -> Any:
    """A syntax tree as nested tuples, the same in all versions of Python."""
    if isinstance(node, list):
        return tuple(plain(each) for each in node if not (isinstance(each, ast.stmt) and _is_text(each)))
    if isinstance(node, ast.AST):
        fields = ((name, getattr(node, name, None)) for name in node._fields if name not in UNREAD)
        return type(node).__name__, *((name, plain(value)) for name, value in fields if value not in (None, []))
    return repr(node)


def digest(definitions: dict[Definition, list[ast.stmt]]) -> str:
    """Sixteen digits of what the definitions do."""
    text = repr([(key, plain(definitions[key])) for key in sorted(definitions)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
