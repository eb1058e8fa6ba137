"""Behaviour histories in their prepared form: consecutive events, and which range of them a request may see."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from train.data.batch import ranges
from train.data.features.columns import Coded, CodedLists
from train.data.requests import Requests, earlier_events


@dataclass
class History:
    """Events of one type, E in all; request r may see events starts[r]:ends[r], oldest first.

    If events are rows of the table, `rows` are their numbers and their fields come from the row columns; otherwise
    `fields` has E codes for each field.
    """

    times: np.ndarray  # [E] int64 seconds
    starts: np.ndarray  # [R] int64
    ends: np.ndarray  # [R] int64
    rows: np.ndarray | None = None  # [E] int64
    fields: dict[str, Coded] = field(default_factory=dict)

    def seen(self, first: int, end: int) -> np.ndarray:
        """[E] bool: events that some request of first:end may see."""
        size = len(self.times) + 1
        entered = np.bincount(self.starts[first:end], minlength=size)
        left = np.bincount(self.ends[first:end], minlength=size)
        return np.cumsum(entered - left)[:-1] > 0


def from_rows(
    events: np.ndarray, user: np.ndarray, time: np.ndarray, requests: Requests, known: np.ndarray | None = None
) -> History:
    """The user's rows among `events` that are known strictly before the request's second, dated by when they were.

    events [E]: row numbers; user, time, known [N]: codes and milliseconds of all rows (None: known when they are).
    """
    known = time if known is None else np.maximum(known, time)
    events = events[np.lexsort((time[events], known[events], user[events]))]
    seconds, first = known[events] // 1000, requests.first
    starts, ends = earlier_events(user[events], seconds, user[first], time[first] // 1000)
    return History(seconds, starts, ends, rows=events)


def from_log(
    events: np.ndarray,
    owner: np.ndarray,
    log_time: np.ndarray,
    fields: dict[str, Coded],
    user: np.ndarray,
    time: np.ndarray,
    requests: Requests,
) -> History:
    """The user's earlier entries among `events` of another table.

    owner (code of the user, -1: of a user without requests), log_time and fields belong to all entries of that table;
    user and time [N] to the labelled rows.
    """
    events = events[owner[events] >= 0]
    events = events[np.lexsort((log_time[events], owner[events]))]
    seconds, first = log_time[events] // 1000, requests.first
    starts, ends = earlier_events(owner[events], seconds, user[first], time[first] // 1000)
    return History(seconds, starts, ends, fields={name: column.take(events) for name, column in fields.items()})


def from_lists(
    lists: dict[str, CodedLists],
    times: tuple[np.ndarray, np.ndarray] | None,
    time: np.ndarray,
    requests: Requests,
) -> History:
    """The position-aligned lists of each request's first row.

    With `times` (milliseconds of all items, offsets [N + 1]) events are sorted by time and those at or after the
    request's second are left out. Without, lists are taken as oldest first and strictly earlier, and every event is
    dated one second before the request.
    """
    first = requests.first
    taken = {name: column.take(first) for name, column in lists.items()}
    lengths = np.diff(next(iter(taken.values())).offsets)
    owner, seconds = np.repeat(np.arange(len(first)), lengths), np.repeat(time[first] // 1000, lengths)
    if times is None:
        kept, event_seconds = np.arange(len(owner)), seconds - 1
    else:
        values, offsets = times
        event_seconds = values[ranges(offsets[first], lengths)] // 1000
        kept = np.lexsort((event_seconds, owner))
        kept = kept[event_seconds[kept] < seconds[kept]]
    ends = np.cumsum(np.bincount(owner[kept], minlength=len(first)))
    fields = {name: Coded(column.codes[kept], column.values) for name, column in taken.items()}
    return History(event_seconds[kept], np.append(0, ends[:-1]), ends, fields=fields)
