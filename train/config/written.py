"""What YAML makes of files: ids that it takes for other values than are written (01234 is 668, 12:30 is 750, NO is
false), and aliases and nesting that make a small file a large value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import yaml
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf.errors import OmegaConfBaseException

from train.config.places import CONFIGS

IDS = re.compile(
    r"(.*\.)?(histories\.[^.]+\.(where|fields)|column_names|user|time|request|weight"
    r"|vendor|(request|candidate|vendor)_(categorical|list|numeric)|labels|real_labels|log_numeric)(\..*)?",
    re.DOTALL,
)
"""Keys below which values are ids or names."""
OTHER_BASE = re.compile(r"[-+]?(0[\d_]+|[\d_]+(:[\d_.]+)+)")
"""An octal or sexagesimal number, which nobody means."""
PLAIN = re.compile(r"-?(0|[1-9]\d*)(\.(0+|\d*[1-9]))?|(?i:true|false)")
"""Numbers and truth values that are the same id as text."""
EXPONENT = re.compile(r"[-+]?\d[\d_]*\.?\d*[eE][-+]?\d+")
"""A number for OmegaConf, though not for YAML."""
TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:bool")


MOST_VALUES, MOST_LEVELS = 100_000, 50
"""Of a file, with its aliases written out."""


@contextmanager
def bounded() -> Iterator[None]:
    """Hydra loads no file but the shipped ones before `refuse_unreadable` has seen it."""
    Plugins.instance()  # which registers the sources
    source = SourcesRegistry.instance().resolve("file")
    load = source.load_config

    def checked(self: ConfigSource, config_path: str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(config_path))
        if file.is_file() and not file.is_relative_to(CONFIGS):
            refuse_unreadable(file)
        try:
            return load(self, config_path)
        except (yaml.YAMLError, OmegaConfBaseException) as error:  # a key twice, a tag, a bad interpolation
            raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}") from None

    with mock.patch.object(source, "load_config", checked):
        yield


def refuse_unreadable(file: Path) -> None:
    """ValueError for a file that is no YAML, or that has more values or levels than a configuration needs."""
    try:
        values, levels = _extent(yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader), {})
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        values, levels = 0, math.inf
    if values > MOST_VALUES or levels > MOST_LEVELS:
        raise ValueError(
            f"{file} has more than {MOST_VALUES:,} values, with its aliases written out, or {MOST_LEVELS} levels; "
            "a configuration needs a few hundred, on five levels"
        )


def _extent(node: yaml.Node | None, known: dict[int, tuple[float, float]]) -> tuple[float, float]:
    """(values, levels) of a node; infinite of one that holds itself."""
    if not isinstance(node, yaml.CollectionNode):
        return 1, 1
    if id(node) not in known:
        known[id(node)] = math.inf, math.inf
        parts = [_extent(each, known) for pair in node.value for each in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(values for values, _ in parts), 1 + max((levels for _, levels in parts), default=0)
    return known[id(node)]


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
            is_id = IDS.fullmatch(path) and not PLAIN.fullmatch(value)
            if node.style is None and other and (is_id or OTHER_BASE.fullmatch(value)):
                remedy = f'an id or a name stands in quotes, "{value}"' if is_id else "write a plain number, e.g. 10"
                raise ValueError(
                    f"{file}, line {node.start_mark.line + 1}: {path} has {value}, which YAML takes for another value; "
                    + remedy
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
