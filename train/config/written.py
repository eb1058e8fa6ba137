"""Ids in YAML files that YAML takes for other values than are written: 01234 is 668, 12:30 is 750, NO is false."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml

IDS = re.compile(r"(.*\.)?(histories\.[^.]+\.where|transforms\.[^.]+\.(table|default)|column_names)(\..*)?", re.DOTALL)
"""Keys below which values are ids or names."""
PLAIN = re.compile(r"-?(0|[1-9]\d*)(\.(0+|\d*[1-9]))?|(?i:true|false)")
"""Numbers and truth values that are the same id as text."""
EXPONENT = re.compile(r"[-+]?\d[\d_]*\.?\d*[eE][-+]?\d+")
"""A number for OmegaConf, though not for YAML."""
TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:bool")


def check(folders: Sequence[Path], choices: Mapping[str, str | None]) -> None:
    """ValueError for an id of a chosen file, or of one in its defaults, that is not taken as it is written.

    `folders` hold a folder for each group of configurations, `choices` are the files of each group.
    """
    pending = [(group, str(name)) for group, name in choices.items()]
    for group, name in pending:
        file = next((file for folder in folders if (file := folder / group / f"{name}.yaml").is_file()), None)
        if file is None:
            continue
        root = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        for path, node in _scalars(root, ""):
            value = node.value
            other = node.tag in TAGS or EXPONENT.fullmatch(value)
            if node.style is None and other and IDS.fullmatch(path) and not PLAIN.fullmatch(value):
                raise ValueError(
                    f"{file}, line {node.start_mark.line + 1}: {path} has {value}, which YAML takes for another value; "
                    f'an id stands in quotes, "{value}"'
                )
        if isinstance(root, yaml.MappingNode):
            known = (
                value for key, value in root.value if key.value == "defaults" and isinstance(value, yaml.SequenceNode)
            )
            new = [
                (group, each.value) for entries in known for each in entries.value if isinstance(each, yaml.ScalarNode)
            ]
            pending += [each for each in new if each not in pending]


def _scalars(node: yaml.Node | None, path: str) -> Iterator[tuple[str, yaml.ScalarNode]]:
    """Scalars, also as keys, with the keys that lead to them."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            own = f"{path}.{key.value}" if path else str(key.value)
            yield from _scalars(key, path)
            yield from _scalars(value, own)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _scalars(value, path)
    elif isinstance(node, yaml.ScalarNode):
        yield path, node
