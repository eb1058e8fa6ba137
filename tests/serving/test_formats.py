"""Requests from outside: plain Python, JSON lines and Arrow, with times where they are needed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from modules.config import ModelConfig
from modules.models.baselines import DIN
from modules.pretrained import PretrainedModel
from tests.serving.conftest import Rows
from train.data.reader import RequestReader
from train.serving.formats import from_arrow, from_arrow_stream, from_json, from_json_lines, to_arrow_stream
from train.serving.service import Service

CONFIG = DIN.Config(dim=8, hidden=[16])


@pytest.fixture
def service(ranking: Rows, exported: Callable[[ModelConfig, Rows], tuple[Path, PretrainedModel]]) -> Service:
    return Service.from_pretrained(exported(CONFIG, ranking)[0])


@pytest.fixture
def requests(ranking: Rows) -> list[dict[str, Any]]:
    return [ranking.request(90), ranking.request(3)]


def test_all_forms_are_one(service: Service, requests: list[dict[str, Any]]) -> None:
    expected = service(requests)
    assert service(from_json(json.dumps(requests))) == expected
    assert service(from_json(json.dumps(requests[0]))) == service(requests[:1])
    lines = "\n\n".join(json.dumps(request) for request in requests)
    assert service(from_json_lines(lines)) == service(from_json_lines(lines.encode())) == expected
    table = pa.Table.from_pylist(requests)
    assert service(from_arrow(table)) == expected
    assert service(from_arrow(table.to_batches()[0])) == expected
    assert service(from_arrow(table.to_reader())) == expected
    for zone in (None, "UTC"):  # times without a zone are of UTC
        moments = [datetime.fromtimestamp(request["time"], UTC).replace(tzinfo=zone and UTC) for request in requests]
        times = pa.array(moments, pa.timestamp("s", zone))
        assert service(from_arrow(table.set_column(table.schema.get_field_index("time"), "time", times))) == expected
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    assert service(from_arrow_stream(sink.getvalue().to_pybytes())) == expected
    assert pa.ipc.open_stream(to_arrow_stream(list(expected))).read_all().to_pylist() == expected
    assert service([]) == []


def test_what_is_no_request_is_told_in_words(service: Service, requests: list[dict[str, Any]]) -> None:
    first, second = requests
    candidates = second["candidates"]
    for change, message in (
        ("text", "request 1: a request is a mapping with request, candidates, histories, time, got str"),
        ({**second, "user": 3}, "request 1: 'user' is no part of a request, which has request, candidates"),
        ({"request": second["request"]}, "request 1: candidates=None must be a list"),
        ({**second, "candidates": candidates[0]}, "request 1: candidates=.* must be a list with a mapping"),
        ({**second, "candidates": [3]}, "request 1: a candidate is 3; it must be a mapping of columns"),
        ({**second, "candidates": [{}]}, r"request 1: a candidate has no 'item', it has \[\]"),
        ({**second, "histories": {"seen": []}}, "request 1: histories has no 'recent'"),
        (
            {**second, "histories": {"seen": 3, "recent": []}},
            "request 1: histories has seen=3; it must be a list of events",
        ),
        ({**second, "time": "today"}, "request 1: the request has time='today'; it must be in seconds"),
        ({**second, "time": None}, "request 1: the request has time=None; it must be in seconds"),
        ({**second, "histories": {"seen": [{"item": "3"}], "recent": []}}, "type 'seen' has no 'time'"),
    ):
        with pytest.raises(ValueError, match=message):
            service([first, change])  # type: ignore[list-item]
    for read, body, message in (
        (from_json, "{", "the request is no JSON"),
        (from_json_lines, "{}\n{", "line 2 is no JSON"),
        (from_arrow_stream, b"nothing", "the body is no Arrow stream"),
        (from_arrow, pa.table({"user": [3]}), "column 'user' is no part of a request"),
    ):
        with pytest.raises(ValueError, match=message):
            read(body)  # type: ignore[operator]


def test_list_histories_need_no_time(ranking: Rows, service: Service, requests: list[dict[str, Any]]) -> None:
    """Those of `data.histories.NAME.lists`, dated one second before the request, as in training."""
    (request,) = requests[:1]
    assert all("time" not in event for event in request["histories"]["recent"])
    batch = service.read.batch([request])
    expected = ranking.batch([90])
    assert torch.equal(batch.histories["recent.recent"].values(), expected.histories["recent.recent"].values())
    assert torch.equal(batch.history_times["recent"].values(), expected.history_times["recent"].values())
    assert set(batch.history_times["recent"].values().tolist()) == {request["time"] - 1}
    events = [{"recent": str(item)} for item in range(9)]  # the newest six
    longer = service.read.batch([{**request, "histories": {**request["histories"], "recent": events}}])
    asked = service.read.batch([{**request, "histories": {**request["histories"], "recent": events[3:]}}])
    assert torch.equal(longer.histories["recent.recent"].values(), asked.histories["recent.recent"].values())


def test_a_request_of_lists_alone_needs_no_time_either(ranking: Rows, service: Service) -> None:
    spec = dataclasses.replace(service.scorer.spec, histories=service.scorer.spec.histories[1:])
    read = RequestReader(service.read.folder, spec)
    request = ranking.request(90)
    request["histories"] = {"recent": request["histories"]["recent"]}
    timed, timeless = read.batch([request]), read.batch([{**request, "time": None}])
    ages = [batch.history_times.values() - batch.request_time for batch in (timed, timeless)]
    assert torch.equal(ages[0], ages[1])
    assert ages[0].tolist() == [-1] * len(request["histories"]["recent"])
