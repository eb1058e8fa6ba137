"""URLs that hold a secret, which are refused: configurations and command lines are written, logged and printed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

SECRETS = {
    "a password": re.compile(r"\w://[^/\s@:]*:[^\s@]+@"),
    "a token": re.compile(r"\bhttps?://[^/\s@]+@"),
    "a signature or token": re.compile(
        r"[?&;#](sig|[\w.%-]*(signature|credential|token|secret|passw|(api|access|account)(_|-|%2d)?key)[\w.%-]*)=\S",
        re.IGNORECASE,
    ),
}
"""A path that holds `@`, behind a host with a port, has to write it as `%40`: a password may hold a slash."""


def refuse_secrets(config: Any) -> None:
    """ValueError, which does not hold the value, for a URL with a secret among dictionaries and lists."""
    for path, text in strings(config):
        for kind, pattern in SECRETS.items():
            if "://" in text and pattern.search(text):
                raise ValueError(
                    f"{dotted(path)} is a URL with {kind}, which would be written to config.json, logs and "
                    "checkpoints; leave it out, and give it by the environment, e.g. AWS_SECRET_ACCESS_KEY for s3://"
                )


def dotted(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def strings(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], str]]:
    """The texts below a value, each with the keys and indices that lead to it."""
    if isinstance(value, str):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from strings(item, (*path, key))
