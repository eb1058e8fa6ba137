"""Several values in one argument, as the arms of a comparison and the axes of a sweep have them."""

from __future__ import annotations


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
