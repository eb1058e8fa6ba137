"""Parameters chosen by globs over their names, and those with settings of their own: `optimizer.groups`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from train.config.schema import GroupConfig


def chosen(parameters: Sequence[str], glob: str, key: str) -> list[str]:
    """Names of parameters that a glob matches, by their own name or that of a module which holds them.

    Raises ValueError, which names the configuration's `key`, when it matches none.
    """
    matched = [name for name in parameters if any(fnmatchcase(each, glob) for each in _path(name))]
    if not matched:
        names = dict.fromkeys(name for parameter in parameters for name in _path(parameter))
        closest = ", ".join(difflib.get_close_matches(glob, names, n=3, cutoff=0.0))
        raise ValueError(f"{key}: {glob!r} matches no module and no parameter; closest are {closest}")
    return matched


def grouped(parameters: Sequence[str], groups: Sequence[GroupConfig]) -> dict[str, GroupConfig]:
    """The group of each parameter: the first one of which a glob matches, or one without settings.

    Raises ValueError for a glob that matches none.
    """
    result = {name: GroupConfig(match=[]) for name in parameters}
    for group in reversed(groups):
        for glob in group.match:
            result |= dict.fromkeys(chosen(parameters, glob, "optimizer.groups"), group)
    return result


def _path(parameter: str) -> Iterator[str]:
    """The names of a parameter and of the modules that hold it."""
    parts = parameter.split(".")
    return (".".join(parts[:end]) for end in range(len(parts), 0, -1))
