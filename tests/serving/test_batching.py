"""Calls that arrive close together are scored as one, and answered as if they were alone."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serving.conftest import Rows
from tests.serving.test_asgi import CONFIG, Export, call, complete
from train.serving.asgi import App
from train.serving.batching import Batches
from train.serving.service import Service

LONG = 600_000
"""Milliseconds: a batch that does not fill waits for ever."""


class Counted:
    """A service that notes how many requests each call of it has."""

    def __init__(self, service: Service) -> None:
        self.tasks, self.scorer, self.check, self.sizes = service.tasks, service.scorer, service.check, list[int]()
        self._service = service

    def __call__(self, requests: list[Any]) -> list[dict[str, list[Any]]]:
        self.sizes.append(len(requests))
        return self._service(requests)


@pytest.fixture
def service(ranking: Rows, exported: Export) -> Counted:
    return Counted(Service.from_pretrained(exported(CONFIG, ranking)[0]))


async def answers(app: App, bodies: list[Any]) -> list[tuple[int, Any]]:
    calls = (call(app, "/score", json.dumps(body).encode()) for body in bodies)
    found = await asyncio.wait_for(asyncio.gather(*calls), 60)
    return [(status, json.loads(said)) for status, _, said in found]


def test_calls_are_scored_together_and_answered_by_themselves(ranking: Rows, service: Counted) -> None:
    one, two, three = (ranking.request(number) for number in (90, 3, 11))
    bodies: list[Any] = [one, [two, three], three, []]
    count = sum(len(request["candidates"]) for request in (one, two, three, three))
    expected = [service(body if isinstance(body, list) else [body]) for body in bodies]
    service.sizes.clear()
    app = App(service, batch_milliseconds=LONG, batch_candidates=count)  # type: ignore[arg-type]
    *full, empty = bodies
    for (status, said), scores in zip(complete(answers(app, full)), expected, strict=False):
        assert status == 200
        for given, wanted in zip(said["predictions"], scores, strict=True):
            assert given == {task: pytest.approx(values, rel=1e-5) for task, values in wanted.items()}
    assert service.sizes == [4]
    _, _, said = complete(call(app, "/metrics"))
    assert b"\ngemsmith_batches 1\n" in said
    app = App(service, batch_milliseconds=1)  # type: ignore[arg-type]
    assert complete(answers(app, [empty])) == [(200, {"predictions": []})]
    assert complete(answers(app, [one]))[0][0] == 200
    assert service.sizes == [4, 0, 1]


def test_a_batch_has_so_many_candidates_at_most(ranking: Rows, service: Counted) -> None:
    request = ranking.request(90)
    request["candidates"] = request["candidates"][:1] * 2
    app = App(service, threads=1, batch_milliseconds=LONG, batch_candidates=4)  # type: ignore[arg-type]
    bodies = [request, [request] * 3, [request] * 5, request, request]
    assert {status for status, _ in complete(answers(app, bodies))} == {200}
    assert service.sizes == [1, 3, 5, 2]


@pytest.mark.reliability(
    "calls that are wrong, or whose clients leave, in a batch with others",
    "each gets its own error; the others are scored",
)
def test_a_wrong_call_is_not_the_others_error(ranking: Rows, service: Counted) -> None:
    request = ranking.request(90)
    wrong: list[Any] = [{**request, "time": "now"}, 3, {"candidates": "abcd"}]
    count = 4 * len(request["candidates"]) + 1 + len("abcd")
    app = App(service, batch_milliseconds=LONG, batch_candidates=count)  # type: ignore[arg-type]

    async def all_calls() -> list[tuple[int, Any]]:
        leaving = asyncio.create_task(call(app, "/score", json.dumps(request).encode()))
        while app.batches is None or not app.batches._calls:
            await asyncio.sleep(0)
        leaving.cancel()
        return await answers(app, [request, *wrong, request])

    first, *refused, last = complete(all_calls())
    assert (first[0], last[0]) == (200, 200)
    (one,), (other,) = first[1]["predictions"], last[1]["predictions"]
    assert one == {task: pytest.approx(values, rel=1e-5) for task, values in other.items()}
    for (status, said), expected in zip(
        refused, ("time='now'", "a request is a mapping", "must be a list"), strict=True
    ):
        assert (status, expected in said["error"]) == (400, True), said
        assert "request 0" in said["error"]
    assert service.sizes == [6, 3]  # all, and those that are right: the caller's that left, too
    assert app.metrics.in_flight == 0


def test_a_batch_that_waits_when_the_threads_stop_is_answered() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def score(requests: list[Any]) -> list[dict[str, Any]]:
        begun.set()
        go_on.wait(60)
        return requests

    async def two_batches() -> list[Any]:
        threads = ThreadPoolExecutor(1)
        batches = Batches(score, score, threads, LONG, 1)
        calls = [asyncio.create_task(batches([{"number": number}])) for number in range(2)]
        while not begun.is_set():
            await asyncio.sleep(0.001)
        threads.shutdown(wait=False, cancel_futures=True)
        go_on.set()
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)

    first, second = asyncio.run(two_batches())
    assert first == [{"number": 0}]
    assert "stopped before" in str(second)


def test_batches_and_user_sides_exclude_each_other(service: Counted) -> None:
    service.scorer.user_sides = object()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="use batch_milliseconds=0"):
        App(service, batch_milliseconds=5)  # type: ignore[arg-type]
