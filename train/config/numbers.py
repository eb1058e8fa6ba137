"""Every number of a configuration, wherever it stands: in a section, a list or a mapping."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

FREE = ("model.arguments", "data.histories", "tasks", "optimizer.arguments", "optimizer.schedule_arguments")
"""Keys whose values a class outside this repository or a loss takes, or which are compared with those of a column."""
SIGNED = ("data.missing_fill", "data.display")
"""Keys whose numbers may be negative."""
BELOW_ONE = ("optimizer.betas", "data.id_dropout")
"""Keys of decays: at 1 an average would never learn; and of shares that leave nothing out of which to learn."""
ABOVE_ZERO = {
    "model.table_std": 0.01,  # tables of zeros learn nothing where they are multiplied
    "data.mean_history": 20,
    "data.num_items": 1000,
    "data.num_requests": 1000,
    "data.num_users": 1000,
    "parallel.hbm_gib": 64,
}
"""Keys of sizes of which there must be something, each with one that works."""
MOST = {
    "data.batch_size": 2**24,  # requests a rank; offsets of more do not fit a machine
    "data.eval_batch_size": 2**24,
    "data.history_sigma": 10,  # of logarithms
    "data.matures_after": 10**11,  # seconds: with times up to the year 9999
    "data.max_candidates": 2**24,
    "data.num_workers": 1024,  # processes a rank
    "data.oov_rows": 2**31 - 3,  # row numbers have 32 bits
    "data.request_window": 10**11,  # seconds
    "data.seed": 2**63 - 1,  # as numpy and PyTorch take it
    "runtime.collective_timeout": 10**9,  # in seconds, which C++ counts in nanoseconds
    "runtime.seed": 2**63 - 1,
    "runtime.threads": 65_536,
}
"""Keys with a largest number: beyond it a library fails in words of its own, or the machine runs out of processes."""
MOST_WHOLE = 2**53
"""The largest whole number of other keys."""


class Number(NamedTuple):
    """A number, the key that it stands at, the whole value of this key, which may be a list, and its default."""

    key: str
    number: float
    value: object
    default: object = 1


def numbers(section: object, key: str = "", default: object = 1) -> Iterator[Number]:
    """The numbers below `section`, whose dotted key is `key`; those of a list stand at the key of the list."""
    if dataclasses.is_dataclass(section):
        for field in dataclasses.fields(section):
            made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            yield from numbers(getattr(section, field.name), f"{key}.{field.name}".lstrip("."), made)
    elif isinstance(section, dict):
        for name, value in section.items():
            yield from numbers(value, f"{key}.{name}")
    elif isinstance(section, list):
        for index, each in enumerate(section):
            if isinstance(each, dict):
                yield from numbers(each, f"{key}.{index}")
                continue
            yield from (number._replace(value=section, default=default) for number in numbers(each, key))
    elif isinstance(section, int | float) and not isinstance(section, bool):
        yield Number(key, section, section, default)


def check_numbers(config: object) -> None:
    """ValueError that names the key, for a number that is infinite, NaN, or outside of what its key can mean."""
    for key, number, value, default in numbers(config):
        if key.startswith(FREE):
            continue
        if not math.isfinite(number):
            raise ValueError(f"{key}={value} must be finite, e.g. {key}={default}")
        if number < 0 and not key.startswith(SIGNED):
            raise ValueError(f"{key}={value} must be at least 0, e.g. {key}={default}")
        if key in ABOVE_ZERO and number <= 0:
            raise ValueError(f"{key}={value} must be above 0, e.g. {key}={ABOVE_ZERO[key]}")
        if key.startswith(BELOW_ONE) and number >= 1:
            raise ValueError(f"{key}={value} must be below 1, e.g. {key}={default}")
        usual = MOST_WHOLE if isinstance(number, int) else math.inf
        most = next((limit for each, limit in MOST.items() if f"{key}.".startswith(f"{each}.")), usual)
        if number > most:
            raise ValueError(f"{key}={value} must be at most {most}, e.g. {key}={default}")
