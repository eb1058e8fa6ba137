"""`key=value` arguments: a command's own among overrides of the configuration, and several values in one of them."""

from __future__ import annotations

from collections.abc import Sequence


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
