"""Lists that are written as text: items joined by a separator, or as JSON, Python or numpy write a list.

`[1, 2]`, `["Clothing, Shoes", "caf\\u00e9"]`, `['a', None]`, `(1, 2)`, `{1, 2}`, `[1 2 3]`, `1|2|3`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

PLAIN = r"""^\s*\[[^\[\]"'\\]*\]\s*$"""
"""A list without quotes, whose items are what stands between commas."""
EMPTY = r"^\s*(\(\s*\)|set\(\))\s*$"
QUOTE = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
WORD = r"[+-]?(?:[\d.][^\s'\",]*|inf|nan)|NaN|None|NaT|<NA>|True|False"
OF_NUMPY = rf"(?s)^\s*(?:{QUOTE}|{WORD})(?:\s+(?:{QUOTE}|{WORD}))+\s*$"
"""The inside of a list as numpy writes it, without commas."""
QUOTED = r"""(?s)^\s*(\[.*["'\\].*\]|\(.*,.*\)|\{.*\})\s*$"""
"""What may be a list that Python or JSON wrote, and is if it is made of items."""
NESTED = r"""^\s*[\[({]\s*([\[{]|("[^"]*"|'[^']*')\s*:|[\w.-]+\s*:\s)"""
"""A list of lists, or a mapping."""
ITEM = re.compile(
    r"""\s*(?:
        "(?P<double>(?:[^"\\]|\\.|"(?!\s*(?:,|\Z)))*)"\s*
      | '(?P<single>(?:[^'\\]|\\.|'(?!\s*(?:,|\Z)))*)'\s*
      | (?P<bare>[^,\[\]]*)
    )(?:,|\Z)""",
    re.VERBOSE | re.DOTALL,
)
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
MISSING = ("null", "NULL", "None", "nan", "NaN", "NAN", "NaT", "<NA>", r"\N")
"""Items without quotes, in brackets, that are no item."""
SHORTENED = "..."
LEFT_OUT = (
    "a list has ... in place of items, as numpy shortens long ones; write it by tolist(), or after "
    "numpy.set_printoptions(threshold=sys.maxsize)"
)
ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""} | {each: each for each in "\\/\"'"}


@dataclass
class TextLists:
    """The items of N texts, one after another; a missing one is null."""

    items: pa.StringArray
    lengths: np.ndarray  # [N] int64
    spare: np.ndarray  # [N] int64: empty items that a text has behind these, maybe only for an ended separator


def split(texts: pa.StringArray, separator: str) -> TextLists:
    """The lists of texts [N]. Null and empty text are empty. ValueError for a list of lists and for a mapping."""
    texts = texts.fill_null("")
    texts = pc.if_else(pc.match_substring_regex(texts, EMPTY), "[]", texts)
    if pc.any(nested := pc.match_substring_regex(texts, NESTED)).as_py():
        example = texts.filter(nested)[0].as_py()
        raise ValueError(f"{example[:100]!r} is a list of lists or a mapping, expected a list of single values")
    plain = pc.match_substring_regex(texts, PLAIN)
    inside = pc.replace_substring_regex(pc.replace_substring_regex(texts, r"[\[\]]", ""), r",\s*$", "")
    numbers = pc.and_(plain, pc.match_substring_regex(inside, OF_NUMPY))
    joined, literal = pc.replace_substring(inside, ",", separator), separator.replace("\\", r"\\")
    words = pc.replace_substring_regex(pc.utf8_trim_whitespace(inside), r"(\d)\.(\s|$)", r"\1\2")
    inside = pc.if_else(numbers, pc.replace_substring_regex(words, r"\s+", literal), joined)
    empty = pc.equal(pc.utf8_trim_whitespace(inside), "")
    inside = pc.if_else(empty, pa.scalar(None, pa.string()), inside)
    shown = pc.if_else(plain, inside, pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts))
    lists = (
        pc.utf8_split_whitespace(pc.utf8_trim_whitespace(shown))
        if separator == " "
        else pc.split_pattern(shown, separator)
    )
    in_brackets = plain.to_numpy(zero_copy_only=False)
    quoted = np.flatnonzero(pc.match_substring_regex(texts, QUOTED).to_numpy(zero_copy_only=False))
    read = {int(at): items for at in quoted if (items := _items(texts[int(at)].as_py())) is not None}
    if read:
        places = np.arange(len(lists))
        places[list(read)] = len(lists) + np.arange(len(read))
        own = pa.array(list(read.values()), pa.list_(pa.string()))
        lists = pa.concat_arrays([lists, own]).take(pa.array(places))
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    items = pc.list_flatten(lists)
    of_read = np.zeros(len(lists), bool)
    of_read[list(read)] = True
    trimmed = pc.if_else(pa.array(np.repeat(of_read, lengths)), items, pc.utf8_trim_whitespace(items))
    bare = pa.array(np.repeat(in_brackets, lengths))
    if pc.any(pc.and_(bare, pc.equal(trimmed, SHORTENED))).as_py():
        raise ValueError(LEFT_OUT)
    missing = pc.and_(bare, pc.is_in(trimmed, value_set=pa.array(MISSING)))
    items = pc.if_else(missing, pa.scalar(None, pa.string()), trimmed)
    return _without_ends(items, lengths, ~(in_brackets | of_read))


def _without_ends(items: pa.StringArray, lengths: np.ndarray, separated: np.ndarray) -> TextLists:
    """Leaves out the empty items at the ends of texts that are `separated`."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    held = np.flatnonzero(pc.not_equal(items, "").fill_null(True).to_numpy(zero_copy_only=False))
    kept = np.zeros(len(lengths), np.int64)
    owner = np.searchsorted(ends, held, side="right")
    kept[owner] = held + 1 - starts[owner]  # of several, the last one counts
    kept = np.where(separated, kept, lengths)
    spare = np.where(separated, np.maximum(lengths, 1) - kept, 0)
    if (kept < lengths).any():
        own = np.arange(len(items)) - np.repeat(starts, lengths)
        items = items.filter(pa.array(own < np.repeat(kept, lengths)))
    return TextLists(items, kept, spare)


def _items(text: str) -> list[str | None] | None:
    """The items of a list that Python or JSON wrote; None if it is no such list."""
    text = text.strip()
    inside, begin, items, strict = text[1:-1].strip(), 0, list[str | None](), text[0] in "({"
    if not strict and re.match(OF_NUMPY, inside):
        inside = re.sub(rf"({QUOTE}|{WORD})(?=\s)", r"\1,", inside, flags=re.DOTALL)
    while begin < len(inside):
        found = ITEM.match(inside, begin)
        if found is None:
            return None
        begin = found.end()
        quoted = found["double"] if found["double"] is not None else found["single"]
        bare = (found["bare"] or "").strip()
        if quoted is not None:
            items.append(_unescaped(quoted))
        elif bare == SHORTENED:
            raise ValueError(LEFT_OUT)
        elif bare in MISSING:
            items.append(None)
        elif strict and not NUMBER.fullmatch(bare):  # parentheses and braces are also those of prose
            if bare or begin < len(inside):
                return None
        elif bare or begin < len(inside):
            items.append(bare)
    return items


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text

    def character(found: re.Match[str]) -> str:
        code = found[1]
        if len(code) > 1:
            value = int(code[1:], 16)
            return chr(value) if value < 0x110000 else found[0]
        return ESCAPED.get(code, found[0])

    made = ESCAPE.sub(character, text)  # in which JSON writes a character beyond 16 bits as two surrogates
    return made.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
