"""What rows of a request share: the request's features, and those of the same `data.vendor` the vendor's."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from train.config.schema import EventsConfig
from train.data.batch import ranges
from train.data.events.read import Columns
from train.data.features.columns import CodedLists
from train.data.requests import sorted_by_vendor, vendor_runs

logger = logging.getLogger(__name__)
AT_ONCE = 1 << 22
"""Items of lists that are compared at once."""


class FirstRows:
    """How many requests have rows that differ in what the first one decides: features, and histories of lists."""

    def __init__(self, config: EventsConfig) -> None:
        self._config, self._requests, self._differ = config, 0, Counter[str]()

    def add(self, columns: Columns, order: np.ndarray, offsets: np.ndarray) -> None:
        """The rows `order` [C] of requests, whose offsets are [R + 1]."""
        counts = np.diff(offsets)
        request, first = (np.repeat(each, counts) for each in (np.arange(len(counts)), order[offsets[:-1]]))
        others = order != first
        rows, first, request = order[others], first[others], request[others]
        self._requests += len(counts)
        for name, differs in self._differences(columns, rows, first):
            self._differ[name] += len(np.unique(request[differs]))

    def _differences(self, columns: Columns, rows: np.ndarray, first: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        config = self._config
        names = (config.request_categorical, config.request_numeric, config.request_vectors, config.request_list)
        yield from _differences(columns, *names, rows, first)
        for event, fields in columns.fields.items():
            for name, lists in fields.items():
                yield f"histories.{event}.{name}", _lists_differ(lists, rows, first)

    def report(self) -> None:
        if found := [f"{name} in {count:,}" for name, count in self._differ.items() if count]:
            logger.warning(
                "of %s requests some have rows that differ in what the first row decides: %s; name such features "
                "data.candidate_*, or let data.request tell requests apart",
                f"{self._requests:,}",
                ", ".join(found),
            )


def order_by_vendor(
    config: EventsConfig, columns: Columns, order: np.ndarray, offsets: np.ndarray, locate: Callable[[int], str]
) -> np.ndarray:
    """The rows `order` [C] of requests, whose offsets [R + 1] stay, with those of a vendor next to each other.

    Raises ValueError where a feature of vendors differs between candidates of one vendor in one request, or with
    data.bad_rows=skip logs that the first candidate's value counts. `locate` names the row of a `Columns.number`.
    """
    if columns.vendor is None:
        return order
    codes = columns.vendor.codes
    order = sorted_by_vendor(order, offsets, codes)
    _, candidates = vendor_runs(codes[order], np.diff(offsets))
    first = np.repeat(order[np.cumsum(candidates) - candidates], candidates)
    names = (config.vendor_categorical, config.vendor_numeric, config.vendor_vectors, config.vendor_list)
    for name, differs in _differences(columns, *names, order, first):
        if not differs.any():
            continue
        place = int(np.flatnonzero(differs)[0])
        vendor = columns.vendor.values[codes[order[place]]]
        flaw = (
            f"{locate(int(columns.number[order[place]]))}: column {name!r} is not as in "
            f"{locate(int(columns.number[first[place]]))}, a candidate of the same {config.vendor}={vendor} in the "
            "same request; features of a vendor must be"
        )
        if config.bad_rows == "raise":
            raise ValueError(f"{flaw}. With data.bad_rows=skip the first one's counts")
        logger.warning("bad input: %d rows count as the first of their vendor; the first is %s", differs.sum(), flaw)
    return order


def _differences(
    columns: Columns,
    categorical: Iterable[str],
    numeric: Iterable[str],
    vectors_of: Iterable[str],
    lists: Iterable[str],
    rows: np.ndarray,
    first: np.ndarray,
) -> Iterator[tuple[str, np.ndarray]]:
    """For each column whether it differs between the given rows [C] and the first ones of their request or vendor."""
    for name in categorical:
        codes = columns.ids[name].codes
        yield name, codes[rows] != codes[first]
    for name in numeric:
        values, expected = columns.numeric[name][rows], columns.numeric[name][first]
        yield name, (values != expected) & ~(np.isnan(values) & np.isnan(expected))
    for name in vectors_of:
        vectors, firsts = columns.vectors[name][rows], columns.vectors[name][first]
        yield name, ((vectors != firsts) & ~(np.isnan(vectors) & np.isnan(firsts))).any(1)
    for name in lists:
        yield name, _lists_differ(columns.lists[name], rows, first)


def _lists_differ(lists: CodedLists, rows: np.ndarray, first: np.ndarray) -> np.ndarray:
    lengths = np.diff(lists.offsets)
    differs = lengths[rows] != lengths[first]
    same = np.flatnonzero(~differs)
    pieces = np.cumsum(lengths[rows[same]]) // AT_ONCE
    for part in np.split(same, np.flatnonzero(np.diff(pieces)) + 1):
        counts = lengths[rows[part]]
        mine, expected = (lists.codes[ranges(lists.offsets[each[part]], counts)] for each in (rows, first))
        differs[np.repeat(part, counts)[mine != expected]] = True
    return differs
