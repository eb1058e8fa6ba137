"""Grouping rows into requests, the split by time, and the stretch of earlier events: each against a plain loop."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from train.data.batch import ranges
from train.data.features.columns import Coded, CodedLists
from train.data.histories import from_lists, from_log, from_rows
from train.data.requests import earlier_events, group_requests

SECOND = 1000


def group(user, time, **changes):
    settings = {
        "request": None,
        "split_of": np.full(len(user), -1),
        "window": 60,
        "max_candidates": 4,
        "split": [0.8, 0.1, 0.1],
    }
    rows = changes.pop("rows", np.arange(len(user)))
    return group_requests(rows, np.asarray(user), np.asarray(time), **(settings | changes))


def members(requests):
    return [requests.order[a:b].tolist() for a, b in zip(requests.offsets[:-1], requests.offsets[1:], strict=True)]


def random_rows(seed, count=400, users=12):
    """Unsorted rows with many equal times."""
    generator = np.random.default_rng(seed)
    return generator.integers(users, size=count), generator.integers(400, size=count) * SECOND // 2


def grouped_by_hand(user, time, window, max_candidates):
    groups = []
    for u in np.unique(user):
        mine = sorted(np.flatnonzero(user == u).tolist(), key=lambda row: time[row])
        for row in mine:
            last = groups[-1] if groups and user[groups[-1][0]] == u else None
            if last and time[row] // SECOND - time[last[0]] // SECOND <= window and len(last) < max_candidates:
                last.append(row)
            else:
                groups.append([row])
    return groups


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("window", "most"), [(0, 3), (7, 4), (10**9, 5), (60, 1)])
def test_requests_are_what_a_loop_groups(seed, window, most):
    user, time = random_rows(seed)
    requests = group(user, time, window=window, max_candidates=most)
    found = members(requests)
    assert sorted(found) == sorted(grouped_by_hand(user, time, window, most))
    assert (np.diff(time[requests.first]) >= 0).all()


def test_window_counts_from_the_first_candidate_and_includes_its_end():
    assert members(group([0, 0, 0], [0, 60 * SECOND, 61 * SECOND])) == [[0, 1], [2]]


def test_one_row_is_one_request():
    assert members(group([3], [5])) == [[0]]


def test_request_column_groups_and_long_requests_are_cut(caplog):
    user = np.zeros(7, int)
    requests = group(user, np.arange(7) * 10**6, request=np.array([0, 1, 0, 1, 0, 0, 0]), max_candidates=3)
    assert members(requests) == [[0, 2, 4], [1, 3], [5, 6]]
    assert "1 of 2 requests have more than data.max_candidates=3 rows, up to 5" in caplog.text


def test_requests_of_a_column_have_no_limit_of_their_own():
    user, request = np.zeros(40, int), np.arange(40) % 2
    requests = group(user, np.arange(40) * 10**6, request=request, max_candidates=None)
    assert members(requests) == [list(range(0, 40, 2)), list(range(1, 40, 2))]


def test_equal_request_ids_of_two_users_are_two_requests():
    assert members(group([0, 1], [0, 0], request=np.array([7, 7]))) == [[0], [1]]


def test_split_by_time_divides_candidates_and_no_request():
    user, time = random_rows(0, count=1000)
    requests = group(user, time)
    begin, end = zip(*(requests.bounds[name] for name in ("train", "valid", "test")), strict=True)
    assert begin == (0, end[0], end[1])
    assert end[2] == len(requests.first)
    candidates = [len(requests.rows(name)) for name in ("train", "valid", "test")]
    assert sum(candidates) == 1000
    # A boundary moves by less than one request of at most four candidates.
    assert np.abs(np.array(candidates) - [800, 100, 100]).max() < 8
    assert time[requests.rows("train")].min() <= time[requests.first[begin[1] :]].min()
    assert time[requests.first[: end[0]]].max() <= time[requests.first[begin[1] :]].min()


def test_files_that_decide_their_split_keep_it():
    user, time = random_rows(1, count=300)
    split_of = np.repeat([-1, 2], [200, 100])
    requests = group(user, time, split_of=split_of)
    assert sorted(requests.rows("test")) == list(range(200, 300))
    assert len(requests.rows("valid")) == pytest.approx(200 / 9, abs=4)
    split_of = np.repeat([0, 1, 2], [100, 100, 100])
    requests = group(user, time, split_of=split_of)
    for index, name in enumerate(("train", "valid", "test")):
        assert sorted(requests.rows(name)) == list(range(100 * index, 100 * index + 100))


def test_rows_left_out_are_in_no_request():
    user, time = random_rows(2)
    rows = np.flatnonzero(user != 3)
    assert sorted(group(user, time, rows=rows).order) == rows.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_history_of_rows_is_all_the_user_did_in_earlier_seconds(seed):
    user, time = random_rows(seed)
    events = np.flatnonzero(np.random.default_rng(seed).random(len(user)) < 0.5)
    requests = group(user, time)
    history = from_rows(events, user, time, requests)
    for first, start, end in zip(requests.first, history.starts, history.ends, strict=True):
        expected = [e for e in events if user[e] == user[first] and time[e] // SECOND < time[first] // SECOND]
        expected.sort(key=lambda e: time[e])
        assert history.rows[start:end].tolist() == expected
        assert history.times[start:end].tolist() == [time[e] // SECOND for e in expected]


def test_times_in_the_wrong_unit_are_noticed():
    user = np.array([10**4])
    with pytest.raises(ValueError, match=r"data\.time_format"):
        earlier_events(user, np.array([0]), user, np.array([10**15]))


def test_no_events_at_all():
    user, time = random_rows(0)
    requests = group(user, time)
    history = from_rows(np.zeros(0, int), user, time, requests)
    assert not history.starts.any()
    assert not history.ends.any()


def test_log_of_other_users_is_left_out():
    user, time = np.array([0, 1]), np.array([50, 50]) * SECOND
    requests = group(user, time)
    owner, log_time = np.array([1, -1, 0, 1, 1]), np.array([30, 1, 2, 50, 10]) * SECOND
    item = Coded(np.arange(5, dtype=np.int32), pa.array(list("abcde")))
    history = from_log(np.array([0, 1, 2, 3, 4]), owner, log_time, {"item": item}, user, time, requests)
    seen = [history.fields["item"].codes[a:b].tolist() for a, b in zip(history.starts, history.ends, strict=True)]
    assert seen == [[2], [4, 0]]


def test_lists_are_sorted_and_trimmed_by_their_times():
    lists = {"item": CodedLists(np.arange(6, dtype=np.int32), np.array([0, 3, 3, 6]), pa.array(list("abcdef")))}
    user, time = np.array([0, 1, 2]), np.array([10, 10, 10]) * SECOND
    times = (np.array([5, 2, 9, 10, 11, 3]) * SECOND, np.array([0, 3, 3, 6]))
    history = from_lists(lists, times, time, group(user, time))
    seen = [history.fields["item"].codes[a:b].tolist() for a, b in zip(history.starts, history.ends, strict=True)]
    assert seen == [[1, 0, 2], [], [5]]
    history = from_lists(lists, None, time, group(user, time))
    assert history.times.tolist() == [9] * 6
    assert history.ends.tolist() == [3, 3, 6]


def test_seen_marks_events_of_the_given_requests_only():
    user, time = np.zeros(4, int), np.array([0, 100, 200, 300]) * SECOND
    requests = group(user, time)
    history = from_rows(np.arange(4), user, time, requests)
    assert history.seen(0, 2).tolist() == [True, False, False, False]
    assert history.seen(0, 4).tolist() == [True, True, True, False]


def test_ranges():
    assert ranges(np.array([5, 0, 7]), np.array([2, 0, 3])).tolist() == [5, 6, 7, 8, 9]
    assert ranges(np.zeros(0, int), np.zeros(0, int)).tolist() == []
