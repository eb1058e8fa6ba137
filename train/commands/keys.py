"""What each key of the configuration means: `python -m train.commands.keys [WORDS...]`.

Prints name, type, default, choices and comment of each key that has every word in its name, its choices or its comment:
`data.` for a section, `dropout`, `model=kunlun` for a model's own. A key of several models stands once, behind their
names.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, get_origin, get_type_hints

from omegaconf import MISSING

from modules.config import ModelConfig, StackConfig
from modules.models import CONFIGS
from train.config.schema import SOURCES, Config, DataConfig
from train.process import errors


@dataclasses.dataclass(frozen=True)
class Key:
    name: str
    kind: str
    default: str
    choices: tuple[str, ...]
    comment: str

    def __str__(self) -> str:
        told = all(re.search(rf"\b{re.escape(choice)}\b", self.comment) for choice in self.choices)
        about = [self.comment.rstrip("."), "" if told else " | ".join(self.choices)]
        head = f"{self.name}: {self.kind} = {self.default}"
        return "\n".join([head, *textwrap.wrap("; ".join(filter(None, about)), 110)]).replace("\n", "\n      ")


def keys() -> list[Key]:
    """All of them, those of a model or a source of data below `model=NAME` or `data=NAME` unless several share them."""
    return list(dict.fromkeys(key for section in dataclasses.fields(Config) for key in _section(section.name)))


def _section(name: str) -> Iterator[Key]:
    groups: dict[str, Mapping[str, type]] = {"model": CONFIGS, "data": {source.name: source for source in SOURCES}}
    kinds = groups.get(name)
    if kinds is None:
        kind = get_type_hints(Config)[name]
        if dataclasses.is_dataclass(kind):
            yield from _of(kind, name)
        else:
            yield from (key for key in _of(Config, "") if key.name == name)
        return
    bases = {"model": (ModelConfig, StackConfig), "data": (DataConfig,)}[name]
    shared = list(dict.fromkeys(key for base in bases for key in _of(base, name)))
    yield from shared
    of_kinds: dict[Key, list[str]] = {}
    for choice, kind in kinds.items():
        for key in _of(kind, name):
            of_kinds.setdefault(key, []).append(f"{name}={choice}")
    for key, choices in of_kinds.items():
        if key not in shared and key.name != f"{name}.name":
            yield dataclasses.replace(key, name=f"{', '.join(choices)} {key.name}")


def _of(kind: Any, path: str) -> Iterator[Key]:
    """The keys of a dataclass, with those of dataclasses in its fields."""
    comments = {name: text for base in reversed(kind.__mro__) for name, text in _comments(base).items()}
    types = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name = f"{path}.{field.name}".lstrip(".")
        inner = next((each for each in _types(types[field.name]) if dataclasses.is_dataclass(each)), None)
        made = field.default_factory
        default = made() if made is not dataclasses.MISSING else field.default
        if inner and path:
            place = {"list": ".N", "dict": ".NAME"}.get(getattr(get_origin(types[field.name]), "__name__", ""), "")
            yield from _of(inner, name + place)
            if not place:
                continue
        shown = "required" if default in (MISSING, dataclasses.MISSING) else _written(default)
        choices = tuple(field.metadata.get("choices", ()))
        yield Key(name, _named(types[field.name]), shown, choices, comments.get(field.name, ""))


def _types(kind: Any) -> Iterator[Any]:
    yield kind
    for each in getattr(kind, "__args__", ()):
        yield from _types(each)


def _named(kind: Any) -> str:
    text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    text = re.sub(r"Optional\[(\w+)\]", r"\1 | None", text.replace("typing.", ""))
    return re.sub(r"\b(\w+\.)+", "", text)


def _written(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "{}" if dataclasses.is_dataclass(value) else str(value)


def _comments(kind: type) -> dict[str, str]:
    """Comments of the fields that a class itself declares: behind them or in the lines above."""
    if not dataclasses.is_dataclass(kind):
        return {}
    lines = textwrap.dedent(inspect.getsource(kind)).splitlines()
    found = {}
    for node in ast.parse("\n".join(lines)).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno:
            behind = lines[node.end_lineno - 1][node.end_col_offset or 0 :].strip()
            text, above = [behind], node.lineno - 2
            while lines[above].lstrip().startswith("#"):
                text.insert(0, lines[above].strip())
                above -= 1
            parts = [each.lstrip("# ") for each in text if each.startswith("#") and not each.startswith("# noqa")]
            found[node.target.id] = " ".join(parts)
    return found


def main(words: list[str]) -> list[Key]:
    """Keys that have all `words`; ValueError where there is none."""
    found = [key for key in keys() if all(word.lower() in str(key).lower() for word in words)]
    if not found:
        raise ValueError(f"no key, choice or comment has {' and '.join(words)}; name fewer words, e.g. dropout")
    return found


def _print(arguments: list[str]) -> None:
    print("\n".join(map(str, main(arguments))))


if __name__ == "__main__":
    errors.run(_print)
