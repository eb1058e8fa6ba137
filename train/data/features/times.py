"""Times that are written as text, by a strptime pattern."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

SHORT = {"D": "%m/%d/%y", "F": "%Y-%m-%d", "T": "%H:%M:%S", "R": "%H:%M", "r": "%I:%M:%S %p"}
"""Directives that stand for several."""
DIRECTIVES = {
    "Y": r"\d{4}", "y": r"\d\d",
    **dict.fromkeys("mdeHkIlMS", r"\s*\d{1,2}"),
    **dict.fromkeys("bBhaA", r"\pL+\.?"),
    "p": r"(?i:[ap]\.?m\.?)", "z": r"(?:Z|[+-]\d\d(?::?\d\d)?)", "n": r"\s*", "t": r"\s*", "%": "%",
}  # fmt: skip
"""Those that are read as what they say, with patterns of their texts. `%f` is read and dropped, behind a dot."""


def unknown_directive(time_format: str) -> str | None:
    """The first directive of a pattern that is not read, such as %Z: names of time zones do not say which is meant."""
    plain = time_format.replace(".%f", "")
    return next((d for d in re.findall(r"%.?", plain, re.DOTALL) if d[1:] not in DIRECTIVES | SHORT), None)


def read(texts: pa.StringArray, time_format: str) -> tuple[np.ndarray, np.ndarray]:
    """(seconds since 1970 in UTC [N] int64, bad [N] bool: unreadable, or a day that its month does not have)."""
    if ".%f" in time_format:  # which Arrow does not support
        texts = pc.replace_substring_regex(texts, r"(:\d\d)\.\d+", r"\1")
        time_format = time_format.replace(".%f", "")
    time_format = re.sub("%[DFTRr]", lambda found: SHORT[found[0][1]], time_format)
    stamps = pc.strptime(texts, format=time_format, unit="s", error_is_null=True)
    seconds = stamps.cast(pa.int64()).fill_null(0).to_numpy()
    return seconds, stamps.is_null().to_numpy(zero_copy_only=False) | ~_as_written(texts, stamps, time_format)


def _as_written(texts: pa.StringArray, stamps: pa.Array, time_format: str) -> np.ndarray:
    """Whether the day of a time is the one that its text has: strptime takes February 30 for March 1."""
    pattern, named = "", False
    for found in re.finditer(r"%(.)|(\s+)|([^%\s]+)", time_format, re.DOTALL):
        directive, blank, text = found.groups()
        if directive in ("d", "e") and not named:
            pattern, named = rf"{pattern}\s*(?P<day>\d{{1,2}})", True
        else:
            pattern += DIRECTIVES[directive] if directive else r"\s*" if blank else re.escape(text)
    if not named:
        return pc.match_substring_regex(texts, rf"^\s*{pattern}\s*$").fill_null(False).to_numpy(zero_copy_only=False)
    written = pc.struct_field(pc.extract_regex(texts, rf"^\s*{pattern}\s*$"), "day")
    day = pc.utf8_trim_whitespace(written).cast(pa.int64()).fill_null(0).to_numpy()
    # With %z, the day in UTC is a neighbour of the one that is written, which for a day of no month it never is.
    moments = stamps.cast(pa.timestamp("s")).fill_null(0).to_numpy()
    shifts = (-86_400, 0, 86_400) if "%z" in time_format else (0,)
    return np.any([pc.day(pa.array(moments + np.timedelta64(s, "s"))).to_numpy() == day for s in shifts], axis=0)
