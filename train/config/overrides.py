"""`key=value` arguments: a command's own among overrides, several values in one of them, and keys that are misspelt."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def split_options(arguments: Sequence[str], defaults: dict[str, str], example: str) -> tuple[dict[str, str], list[str]]:
    """A command's options, which are `defaults` changed by the arguments, and the other arguments.

    ValueError that names `example` for an argument that is not key=value, or gives an option no value.
    """
    options, others = dict(defaults), []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or (key in options and not value):
            raise ValueError(f"{argument!r} is not key=value; e.g. {example}")
        if key in options:
            options[key] = value
        else:
            others.append(argument)
    return options, others


def split_values(text: str) -> list[str]:
    """The comma-separated values of `text`; commas inside brackets, braces and quotes belong to a value."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0 and not quote:
            values.append("")
        else:
            values[-1] += character
    return values


def closest(name: str, known: Iterable[str]) -> str:
    """The known name that is nearest to this one, "" if none is near."""
    return next(iter(difflib.get_close_matches(name, [*known], 1)), "")


def unknown(path: str, name: str, known: Iterable[str], value: str = "") -> str:
    """What to say of a key that `path` does not have: the one that was meant, with its `=value`, or all there are."""
    known = sorted(known)
    prefix = f"{path}." if path else ""
    close = closest(name, known)
    hint = f"did you mean {prefix}{close}{value}?" if close else f"there are {', '.join(known)}"
    return f"{prefix}{name} is no key of the configuration; {hint}"
