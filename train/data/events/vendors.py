"""Vendors of labelled rows: the candidates of a request that have the same `data.vendor`, and what they must share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import numpy as np

from train.config.schema import EventsConfig
from train.data.batch import ranges
from train.data.events.read import Columns
from train.data.features.columns import CodedLists
from train.data.requests import sorted_by_vendor, vendor_runs

logger = logging.getLogger(__name__)


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
    for name, differs in _differences(config, columns, order, first):
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
    config: EventsConfig, columns: Columns, rows: np.ndarray, first: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """For each feature of vendors whether it differs between the given rows [C] and the first ones of their vendors."""
    for name in config.vendor_categorical:
        codes = columns.ids[name].codes
        yield name, codes[rows] != codes[first]
    for name in config.vendor_numeric:
        values, expected = columns.numeric[name][rows], columns.numeric[name][first]
        yield name, (values != expected) & ~(np.isnan(values) & np.isnan(expected))
    for name in config.vendor_vectors:
        vectors, firsts = columns.vectors[name][rows], columns.vectors[name][first]
        yield name, ((vectors != firsts) & ~(np.isnan(vectors) & np.isnan(firsts))).any(1)
    for name in config.vendor_list:
        yield name, _lists_differ(columns.lists[name], rows, first)


def _lists_differ(lists: CodedLists, rows: np.ndarray, first: np.ndarray) -> np.ndarray:
    lengths = np.diff(lists.offsets)
    differs = lengths[rows] != lengths[first]
    same = np.flatnonzero(~differs)
    counts = lengths[rows[same]]
    mine, expected = (lists.codes[ranges(lists.offsets[each[same]], counts)] for each in (rows, first))
    differs[np.repeat(same, counts)[mine != expected]] = True
    return differs
