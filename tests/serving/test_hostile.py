"""Bodies from somebody who wants the server to die, to stand still or to tell what is in its memory."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from modules.config import ModelConfig
from modules.models.baselines import DCNv2
from modules.pretrained import PretrainedModel
from tests.launching import ROOT, environment
from tests.serving import fuzzing
from tests.serving.conftest import Rows
from tests.serving.http import memory
from tests.serving.test_asgi import ARROW, CONFIG, call, complete
from train.serving.asgi import App
from train.serving.service import MOST_PADDED, Service, alike

Export = Callable[[ModelConfig, Rows], tuple[Path, PretrainedModel]]


@pytest.fixture
def app(ranking: Rows, exported: Export) -> App:
    return App(Service.from_pretrained(exported(CONFIG, ranking)[0]))


@pytest.mark.reliability(
    "20,000 damaged bodies of each format, JSON to compressed Arrow (200 in `make test`)",
    "scored, or 400 in at most 2,000 bytes; memory stays within a GiB",
)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [200, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_damaged_bodies_are_refused(count: int, ranking: Rows, exported: Export, tmp_path: Path) -> None:
    requests = tmp_path / "requests.json"
    requests.write_text(json.dumps([ranking.request(number) for number in (90, 3, 11)]))
    command = [sys.executable, "-m", "tests.serving.fuzzing", exported(CONFIG, ranking)[0], requests, str(count), "0"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    assert done.stdout.count("400: ") == len(fuzzing.FORMATS), done.stdout


def answer(app: App, body: bytes, kind: str | None = None) -> tuple[int, str]:
    status, _, said = complete(call(app, "/score", body, kind))
    return status, json.loads(said)["error"] if status != 200 else ""


@pytest.mark.reliability(
    "Arrow bodies with offsets or lengths beyond their end",
    "400; nothing beyond the body is read",
)
def test_offsets_that_lead_out_of_the_body(app: App, ranking: Rows) -> None:
    body = fuzzing.arrow([ranking.request(3)])
    rows = len(ranking.request(3)["candidates"])
    places = [at for at in range(0, len(body) - 4 * (rows + 1), 4) if body[at : at + 8] == bytes(4) + b"\1\0\0\0"]
    assert places
    for at in places:
        for number in (-4096, 1_000_000):
            damaged = body[: at + 4] + number.to_bytes(4, "little", signed=True) + body[at + 8 :]
            status, said = answer(app, damaged, ARROW)
            assert status in (200, 400)
            assert len(said) < 500
    stolen = bytearray(fuzzing.arrow([{"candidates": [{"price": b"abc"}]}]))
    at = stolen.rindex((3).to_bytes(4, "little"))
    stolen[at : at + 4] = (1_000_000).to_bytes(4, "little")
    status, said = answer(app, bytes(stolen), ARROW)
    assert (status, "no Arrow stream" in said, len(said) < 200) == (400, True, True), said


def stream(table: pa.Table, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def nested(levels: int) -> pa.Array:
    made: pa.Array = pa.array([1])
    for _ in range(levels):
        made = pa.ListArray.from_arrays([0, 1], made)
    return made


BOMBS: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "rows of null": (lambda: stream(pa.table({"request": pa.nulls(2 * 10**8)})), ARROW, "up to 10000 requests"),
    "a list of nulls": (
        lambda: stream(pa.table({"candidates": pa.ListArray.from_arrays([0, 2 * 10**8], pa.nulls(2 * 10**8))})),
        ARROW,
        "up to 1000000 bytes, decompressed too",
    ),
    "compressed": (lambda: stream(pa.table({"time": [bytes(1 << 26)]}), "zstd"), ARROW, "decompressed too"),
    "a dictionary": (
        lambda: stream(pa.table({"time": pa.array(["x" * 10**5] * 90).dictionary_encode()})),
        ARROW,
        "each text of a dictionary",
    ),
    "views": (lambda: stream(pa.table({"time": pa.array(["x"], pa.string_view())})), ARROW, "'time' is string_view"),
    "Arrow, nested": (lambda: stream(pa.table({"time": nested(20)})), ARROW, "more than 8 levels of types"),
    "a column twice": (
        lambda: stream(pa.Table.from_arrays([pa.array([1])] * 2, names=["time", "time"])), ARROW, "stands twice",
    ),
    "another zone": (
        lambda: stream(pa.table({"time": pa.array([1]).cast(pa.timestamp("s", "No/Where"))})), ARROW, "no Arrow stream",
    ),
    "JSON, nested": (lambda: b"[" * 200_000, "application/json", "nested too deeply"),
    "objects, nested": (lambda: b'{"a":' * 200_000, "application/json", "nested too deeply"),
    "lines, nested": (lambda: b"3\n" + b"[" * 200_000, "application/x-ndjson", "line 2 is no JSON.*nested too deeply"),
    "lines": (lambda: b"3\n" * 20_000, "application/x-ndjson", "up to 10000 requests, got 20000"),
    "many": (lambda: b"[" + b"3," * 20_000 + b"3]", "application/json", "up to 10000 requests, got 20001"),
    "letters": (lambda: b'{"candidates": {"a": "' + b"x" * 900_000 + b'"}}', "application/json", "must be a list"),
    "digits": (lambda: b'{"time": ' + b"1" * 5000 + b"}", "application/json", "no JSON"),
}  # fmt: skip


@pytest.mark.reliability("small bodies that expand to gigabytes", "400 before conversion")
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_few_bytes_do_not_stand_for_many(bomb: str, app: App) -> None:
    make, kind, expected = BOMBS[bomb]
    app.most_bytes = 1_000_000
    before = memory()
    status, said = answer(app, make(), kind)
    assert status == 400
    assert re.search(expected, said), said
    assert len(said) < 400
    assert memory() - before < 300 << 20


WRONG: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = [  # of request, candidate and event
    ({}, {"price": 10**400}, {}, "a candidate has price=1000.*finite number"),
    ({}, {"price": True}, {}, "a candidate has price=True"),
    ({}, {"price": "1_0"}, {}, "a candidate has price='1_0'"),
    ({}, {"price": [1]}, {}, r"a candidate has price=\[1\]"),
    ({}, {"price": "9" * 10**6}, {}, "a candidate has price='999"),
    ({}, {"item": ["2"]}, {}, r"a candidate has item=\['2'\]; it must be one id"),
    ({}, {"item": {"a": 1}}, {}, "a candidate has item={'a': 1}; it must be one id"),
    ({}, {"item": "\ud800"}, {}, r"a candidate has item='\\ud800'; it must be one id: a number, or text in Unicode"),
    ({}, {"tags": {"a": 1}}, {}, "a candidate has tags={'a': 1}; it must be a list of ids"),
    ({}, {"tags": [[1]]}, {}, r"a candidate has tags=\[1\]; it must be one id"),
    ({}, {"tags": [{}]}, {}, "a candidate has tags={}; it must be one id"),
    ({}, {"itme": 3}, {}, "a candidate has 'itme', which is no column of the data; there are click, country, item"),
    ({"contry": "de"}, {}, {}, "the request has 'contry', which is no column"),
    ({}, {}, {"item": ["2"]}, "an event of type 'seen' has item="),
    ({}, {}, {"itme": 3}, "an event of type 'seen' has 'itme'"),
    ({}, {}, {"time": -1e300}, "an event of type 'seen' has time=-1e.300; it must be in seconds"),
    ({}, {}, {"time": 1_700_000_000_000}, "an event of type 'seen' has time=1700000000000"),
]


@pytest.mark.parametrize(("own", "candidate", "event", "message"), WRONG)
def test_wrong_values_and_names_are_refused_by_their_key(
    own: dict[str, Any], candidate: dict[str, Any], event: dict[str, Any], message: str, app: App, ranking: Rows
) -> None:
    request = ranking.request(3)
    first, *others = request["candidates"]
    seen = {"item": "3", "time": 5}
    good = request | {"histories": {"seen": [seen], "recent": []}}
    wrong = good | {
        "request": request["request"] | own,
        "candidates": [first | candidate, *others],
        "histories": {"seen": [seen | event], "recent": []},
    }
    assert answer(app, json.dumps(good).encode()) == (200, "")
    status, said = answer(app, json.dumps([good, wrong, good]).encode())
    assert status == 400
    assert re.search(f"request 1: {message}", said), said
    assert len(said) < 400


def test_nothing_behind_the_end_of_a_body_is_left_out(app: App, ranking: Rows) -> None:
    request = ranking.request(3)
    for kind, body in (
        (ARROW, fuzzing.arrow([request])),
        ("application/json", json.dumps(request).encode()),
        ("application/x-ndjson", json.dumps(request).encode()),
    ):
        assert complete(call(app, "/score", body + b"\n\n" * ("json" in kind), kind))[0] == 200
        for behind in (body, b"garbage"):
            status, _, said = complete(call(app, "/score", body + behind, kind))
            assert status == 400, (kind, behind, said)


def test_answers_have_numbers_that_json_has(ranking: Rows, exported: Export) -> None:
    """Of features that float32 holds and the model's products do not."""
    service = Service.from_pretrained(exported(DCNv2.Config(dim=8), ranking)[0])
    request = ranking.request(3)
    first, *others = request["candidates"]
    body = json.dumps([request, request | {"candidates": [first | {"price": 1e25}, *others]}]).encode()
    for settings in ({}, {"batch_milliseconds": 1}):
        status, _, said = complete(call(App(service, **settings), "/score", body))
        plain, large = json.loads(said, parse_constant=pytest.fail)["predictions"]
        assert status == 200
        assert large["click"][0] is None
        assert large["click"][1:] == pytest.approx(plain["click"][1:])
        assert None not in plain["click"]


@pytest.mark.parametrize("time", [1e300, -1e300, 2**63, -(2**63), 10**400, 1_772_409_600_000, True, "5", [5]])
def test_times_that_training_refuses(time: Any, app: App, ranking: Rows) -> None:
    status, said = answer(app, json.dumps(ranking.request(3) | {"time": time}).encode())
    assert status == 400
    assert "time=" in said
    assert "it must be in seconds since 1970, up to the year 9999" in said


def test_other_names_and_keys_that_stand_twice(app: App, ranking: Rows) -> None:
    request = ranking.request(3)
    histories = request["histories"] | {"clik": []}
    assert answer(app, json.dumps(request | {"histories": histories}).encode()) == (
        400,
        "request 0: histories has 'clik', which is no event type; there are recent, seen",
    )
    body = json.dumps(request).encode()
    assert "the key 'time' stands twice" in answer(app, body[:-1] + b', "time": 5}')[1]
    assert "the key 'item' stands twice" in answer(app, body.replace(b'"item": ', b'"item": 3, "item": '))[1]


@pytest.mark.reliability("one wrong request among a thousand", "400 with its number")
def test_one_wrong_request_among_many_is_found_by_halves(app: App, ranking: Rows) -> None:
    read, request, batches = app.service.read, ranking.request(3), []
    make = read._batch
    read._batch = lambda some: batches.append(len(some)) or make(some)  # type: ignore[method-assign, func-returns-value]
    with pytest.raises(ValueError, match=r"request 701: the request has time='x'"):
        read.batch([request] * 701 + [request | {"time": "x"}] + [request] * 323)
    assert sum(batches) <= 3 * 1025
    assert len(batches) <= 12


def test_requests_of_unlike_lengths_are_scored_as_alone(
    app: App, ranking: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [ranking.request(number, most) for number, most in ((90, 1), (3, 2), (11, 1), (30, 2))]
    expected = app.service(requests)
    monkeypatch.setattr("train.serving.service.MOST_PADDED", 6)
    sizes, score = [], app.service.scorer

    def counted(batch: Any) -> Any:
        sizes.append(batch.num_requests)
        return score(batch)

    counted.device, counted.spec, counted.gate = score.device, score.spec, score.gate  # type: ignore[attr-defined]
    app.service.scorer = counted  # type: ignore[assignment]
    for got, wanted in zip(app.service(requests), expected, strict=True):
        assert got == {task: pytest.approx(values, rel=1e-5) for task, values in wanted.items()}
    assert len(sizes) > 1
    with pytest.raises(ValueError, match="request 2: the request has time='x'"):
        app.service([*requests[:2], requests[2] | {"time": "x"}])


def test_padding_is_bounded() -> None:
    assert alike([1] * 5000) == [list(range(5000))]
    lengths = [1] * 5000 + [10_000] * 10 + [3] * 70_000
    groups = alike(lengths)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    assert max(len(group) * max(lengths[place] for place in group) for group in groups) <= MOST_PADDED
    assert len(groups) <= 2 * sum(lengths) / MOST_PADDED + 2


@pytest.mark.reliability(
    "too many calls, a body of 10^11 bytes, one that never arrives",
    "503 and 413 before reading, 408 after `body_seconds`",
)
def test_a_body_is_not_waited_for(app: App) -> None:
    """A call too many is refused before its body is read, one that is too large by what it says, and a slow one."""
    asked: list[str] = []

    async def never() -> dict[str, Any]:
        asked.append("body")
        await asyncio.sleep(60)
        raise AssertionError

    async def refused(length: bytes = b"") -> int:
        sent: list[Any] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [(b"content-length", length)] if length else []
        await app({"type": "http", "method": "POST", "path": "/score", "headers": headers}, never, send)
        return sent[0]["status"]

    app.body_seconds = 0.05
    assert complete(refused(b"99999999999")) == 413
    assert complete(refused(b"9" * 99)) == 413
    app.metrics.in_flight = app.most_waiting
    assert complete(refused()) == 503
    assert asked == []
    app.metrics.in_flight = 0
    assert complete(refused()) == 408
    assert (asked, app.metrics.in_flight) == (["body"], 0)
