"""The HTTP server, called by the ASGI protocol itself."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from modules.config import ModelConfig
from modules.models.baselines import DIN
from modules.pretrained import PretrainedModel
from tests.launching import ROOT
from tests.serving.conftest import Rows
from tests.serving.http import memory, served
from train.config.schema import EventsConfig, HistoryConfig
from train.data import build_source
from train.serving.asgi import App, create_app
from train.serving.formats import to_arrow_stream
from train.serving.service import Service

Export = Callable[[ModelConfig, Rows], tuple[Path, PretrainedModel]]
CONFIG = DIN.Config(dim=8, hidden=[16])
ARROW = "application/vnd.apache.arrow.stream"


@pytest.fixture
def service(ranking: Rows, exported: Export) -> Service:
    return Service.from_pretrained(exported(CONFIG, ranking)[0])


def complete(work: Coroutine[Any, Any, Any]) -> Any:
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


async def call(
    app: App, path: str, body: bytes = b"", kind: str | None = None, method: str = "", pieces: int = 1, coding: str = ""
) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of a request whose body arrives in pieces."""
    parts = [body[len(body) * i // pieces : len(body) * (i + 1) // pieces] for i in range(pieces)]
    messages = [
        {"type": "http.request", "body": part, "more_body": i + 1 < pieces} for i, part in enumerate(parts)
    ]  # fmt: skip
    given, sent = iter(messages), []
    given_headers = ((b"content-type", kind), (b"content-encoding", coding))
    headers = [(name, value.encode()) for name, value in given_headers if value]

    async def receive() -> dict[str, Any]:
        return next(given)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    method = method or ("POST" if path == "/score" else "GET")
    await app({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)
    start, end = sent
    assert (start["type"], end["type"]) == ("http.response.start", "http.response.body")
    answered = {name.decode(): value.decode() for name, value in start["headers"]}
    assert int(answered["content-length"]) == len(end["body"])
    return start["status"], answered, end["body"]


def test_requests_are_scored_in_the_form_that_they_have(ranking: Rows, service: Service) -> None:
    requests = [ranking.request(90), ranking.request(3)]
    expected, app = service(requests), App(service)

    async def all_forms() -> None:
        status, headers, body = await call(app, "/score", json.dumps(requests).encode(), pieces=3)
        assert (status, headers["content-type"]) == (200, "application/json")
        assert json.loads(body) == {"predictions": expected}
        one = json.dumps(requests[0]).encode()
        _, _, body = await call(app, "/score", one, "application/json; charset=utf-8")
        assert json.loads(body) == {"predictions": service(requests[:1])}
        lines = "\n".join(json.dumps(request) for request in requests).encode()
        status, headers, body = await call(app, "/score", lines, "application/x-ndjson")
        assert [json.loads(line) for line in body.splitlines()] == expected
        status, headers, body = await call(app, "/score", to_arrow_stream(requests), ARROW)
        assert (status, headers["content-type"]) == (200, ARROW)
        assert pa.ipc.open_stream(body).read_all().to_pylist() == expected
        status, _, body = await call(app, "/health")
        assert (status, json.loads(body)) == (200, {"status": "ok", "tasks": ["click", "like"]})
        status, headers, body = await call(app, "/metrics")
        assert headers["content-type"].startswith("text/plain; version=0.0.4")
        values = dict(line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#"))
        assert values['gemsmith_http_responses_total{path="/score",status="200"}'] == "4"
        assert values["gemsmith_scored_requests_total"] == "7"
        candidates = [len(request["candidates"]) for request in requests]
        assert values["gemsmith_scored_candidates_total"] == str(4 * candidates[0] + 3 * candidates[1])
        assert values["gemsmith_in_flight"] == "0"
        assert values['gemsmith_score_seconds_bucket{le="+Inf"}'] == values["gemsmith_score_seconds_count"] == "4"
        assert float(values["gemsmith_score_seconds_sum"]) > 0

    complete(all_forms())


def test_what_is_wrong_is_answered_in_words(ranking: Rows, service: Service) -> None:
    app = App(service, most_bytes=50_000)
    request = ranking.request(3)

    async def all_errors() -> None:
        for path, body, kind, method, status, message in (
            ("/score", b"{", None, "", 400, "the request is no JSON"),
            ("/score", b"3", None, "", 400, "a request is a mapping"),
            ("/score", json.dumps({**request, "time": None}).encode(), None, "", 400, "time=None"),
            ("/score", b"\xff\xfe", None, "", 400, "no JSON"),
            ("/score", b"x", ARROW, "", 400, "the body is no Arrow stream"),
            ("/score", b"a=b", "application/x-www-form-urlencoded", "", 415, "send application/json"),
            ("/score", b" {", "application/x-www-form-urlencoded", "", 400, "the request is no JSON"),
            ("/score", b"{}", "x" * 10**5, "", 415, "xxx... is not read; send application/json"),
            ("/score", b" " * 50_001, None, "", 413, "up to 50000 bytes"),
            ("/score", b"", None, "GET", 405, "/score is for POST"),
            ("/elsewhere", b"", None, "", 404, "there are /score, /health, /metrics"),
        ):
            answered, headers, said = await call(app, path, body, kind, method)
            assert (answered, headers["content-type"]) == (status, "application/json")
            assert message in json.loads(said)["error"]
            assert headers.get("allow") == ("POST" if status == 405 else None)
        answered, _, said = await call(app, "/score", b"", coding="gzip")
        assert (answered, "content-encoding gzip is not read" in json.loads(said)["error"]) == (415, True)
        app.service = None  # type: ignore[assignment]
        answered, _, said = await call(app, "/score", b"[]")
        assert (answered, json.loads(said)) == (500, {"error": "internal error, see the server's log"})
        _, _, body = await call(app, "/metrics")
        assert b'{path="other",status="404"} 1' in body

    complete(all_errors())


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_the_tutorial_asks_the_server(tmp_path: Path, exported: Export) -> None:
    """The page's command, which sends JSON as a form does, to a server of what the page's request is made of."""
    (command,) = re.findall(r"^curl .*?'\n", (ROOT / "docs/tutorial.md").read_text(), re.MULTILINE | re.DOTALL)
    (asked,) = re.findall(r"'(.*)'", command, re.DOTALL)
    (candidate,) = json.loads(asked)["candidates"]
    generator = np.random.default_rng(0)
    rows = [
        candidate | {"user_id": f"u{user}", "price": price, "click": click, "time": 1_700_000_000 + 9 * place}
        for place, (user, price, click) in enumerate(
            zip(generator.integers(9, size=90), generator.random(90), generator.integers(2, size=90), strict=True)
        )
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    config = EventsConfig(
        root=str(tmp_path), cache_dir=str(tmp_path / "cache"), files=["rows.parquet"], user="user_id", time="time",
        labels={"click": "click"}, request_categorical=["user_id"], candidate_categorical=["item_id", "brand"],
        candidate_numeric=["price"],
        histories={name: HistoryConfig(["item_id", "brand"]) for name in json.loads(asked)["histories"]},
    )  # fmt: skip
    app = App(Service.from_pretrained(exported(CONFIG, Rows(rows, config, build_source(config)))[0]))

    async def run() -> bytes:
        async with served(app) as port:
            words = command.replace("localhost:8000", f"127.0.0.1:{port}")
            curl = await asyncio.create_subprocess_shell(f"curl -s {words[5:]}", stdout=asyncio.subprocess.PIPE)
            return (await curl.communicate())[0]

    (scores,) = json.loads(complete(run()))["predictions"]
    assert 0 < scores["click"][0] < 1


def test_a_call_too_many_is_refused_and_others_are_served_side_by_side(service: Service) -> None:
    both, refused = threading.Barrier(2, timeout=60), threading.Event()
    app = App(service, threads=2, most_waiting=2)

    def scored(requests: list[Any]) -> list[Any]:
        both.wait()  # ends when two threads are here
        refused.wait(timeout=60)
        return []

    app.service = type("Slow", (), {"__call__": lambda self, r: scored(r), "tasks": ("click",)})()

    async def three() -> list[int]:
        *served, last = [asyncio.create_task(call(app, "/score", b"[]")) for _ in range(3)]
        answers = [await last]
        refused.set()
        return [status for status, *_ in [*await asyncio.gather(*served), *answers]]

    assert complete(three()) == [200, 200, 503]


@pytest.mark.reliability(
    "the server is told to stop with calls open",
    "new calls and `/ready` get 503; open ones are answered within `drain_seconds`",
)
def test_a_server_that_stops_answers_open_calls_and_takes_no_more(service: Service) -> None:
    app, scoring, finish = App(service, threads=1), threading.Event(), threading.Event()

    def scored(requests: list[Any]) -> list[Any]:
        scoring.set()
        finish.wait(timeout=60)
        return []

    app.service = type("Slow", (), {"__call__": lambda self, r: scored(r), "tasks": ("click",)})()

    async def stops() -> None:
        assert (await call(app, "/ready"))[0] == 200
        opened = asyncio.create_task(call(app, "/score", b"[]"))
        await asyncio.to_thread(scoring.wait, 60)
        sent: list[Any] = []

        async def shutdown() -> dict[str, Any]:
            return {"type": "lifespan.shutdown"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message["type"])

        lifespan = asyncio.create_task(app({"type": "lifespan"}, shutdown, send))
        while not app.draining:
            await asyncio.sleep(0)
        assert [(await call(app, path, b"[]"))[0] for path in ("/ready", "/score", "/health")] == [503, 503, 200]
        assert sent == []
        finish.set()
        assert (await opened)[0] == 200
        await lifespan
        assert sent == ["lifespan.shutdown.complete"]

    complete(stops())


def test_an_answer_has_the_name_of_its_call(service: Service, ranking: Rows, caplog: pytest.LogCaptureFixture) -> None:
    app = App(service)

    async def named(given: str) -> str:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        headers = [(b"x-request-id", given.encode())]
        await app({"type": "http", "method": "POST", "path": "/score", "headers": headers}, receive, send)
        return dict(sent[0]["headers"])[b"x-request-id"].decode()

    with caplog.at_level("INFO"):
        assert complete(named("web-17.3")) == "web-17.3"
    assert "call web-17.3 is answered 400" in caplog.text
    made = {complete(named(given)) for given in ("", "a\nb", "x" * 65)}
    assert len(made) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in made)


@pytest.mark.reliability(
    "200 clients at once for a minute (2 s in `make test`), a tenth of the calls wrong",
    "each gets scores, a 400 that names the fault, or a 503 at once; memory stays flat",
)
@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.nightly)])
def test_two_hundred_clients_lose_nothing(seconds: float, ranking: Rows, service: Service) -> None:
    """Each asks again as soon as it is answered; one in ten asks wrongly, and what is too much for the server, 503,
    is asked for again."""
    requests = [ranking.request(number) for number in (90, 3, 11, 30)]
    expected = [service([request])[0] for request in requests]
    app, answered = App(service), Counter[int]()
    peaks: list[int] = []

    async def client(number: int, port: int, end: float) -> None:
        place, wrong = number % len(requests), number % 10 == 0
        body = json.dumps(requests[place] | ({"time": "now"} if wrong else {})).encode()
        while time.monotonic() < end:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /score HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            head, _, said = (await reader.read()).partition(b"\r\n\r\n")
            writer.close()
            status = int(head.split(b" ")[1])
            answered[status] += 1
            if status == 503:
                await asyncio.sleep(0.05)
            elif wrong:
                assert (status, "time='now'" in json.loads(said)["error"]) == (400, True)
            else:
                (scores,) = json.loads(said)["predictions"]
                assert status == 200
                assert scores == {task: pytest.approx(values, rel=1e-5) for task, values in expected[place].items()}

    async def all_clients() -> None:
        async with served(app) as port:
            for share in (0.25, 0.75):
                end = time.monotonic() + share * seconds
                await asyncio.gather(*(client(number, port, end) for number in range(200)))
                peaks.append(memory())

    complete(all_clients())
    assert answered.keys() <= {200, 400, 503}
    assert min(answered[200], answered[400]) > 0
    assert app.metrics.in_flight == 0
    assert peaks[1] - peaks[0] < 64 << 20


def test_a_client_that_leaves_and_the_lifespan(service: Service) -> None:
    app = App(service)

    async def leaves() -> None:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await app({"type": "http", "method": "POST", "path": "/score", "headers": []}, receive, send)
        assert sent[0]["status"] == 400
        kinds = iter(["lifespan.startup", "lifespan.shutdown"])

        async def next_kind() -> dict[str, Any]:
            return {"type": next(kinds)}

        sent.clear()
        await app({"type": "lifespan"}, next_kind, send)
        assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        with pytest.raises(ValueError, match="websocket is not served"):
            await app({"type": "websocket"}, receive, send)

    complete(leaves())


def test_the_application_is_made_from_the_environment(
    ranking: Rows, exported: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GEMSMITH_EXPORT", raising=False)
    with pytest.raises(ValueError, match="GEMSMITH_EXPORT must name the folder of an export"):
        create_app()
    monkeypatch.setenv("GEMSMITH_EXPORT", str(exported(CONFIG, ranking)[0]))
    monkeypatch.setenv("GEMSMITH_IMPORT", "json")
    monkeypatch.setenv("GEMSMITH_THREADS", "0")
    with pytest.raises(ValueError, match="GEMSMITH_THREADS=0 must be a number of at least 1"):
        create_app()
    monkeypatch.setenv("GEMSMITH_THREADS", "1")
    monkeypatch.setenv("GEMSMITH_MOST_REQUESTS", "7")
    assert create_app().batches is None
    monkeypatch.setenv("GEMSMITH_BATCH_MILLISECONDS", "5")
    app = create_app()
    assert app.batches
    assert (app.service.tasks, app.most_requests, app.most_waiting) == (("click", "like"), 7, 64)
