"""An HTTP server of an export, as a plain ASGI application: any ASGI server runs it, and it needs no framework.

    GEMSMITH_EXPORT=RUN_DIR/export uvicorn --factory train.serving.asgi:create_app

- `POST /score`: requests as JSON (one, or a list), as JSON lines (`application/x-ndjson`) or as an Arrow stream
  (`application/vnd.apache.arrow.stream`), and predictions in the same form.
- `GET /health`: 200 as soon as the model is loaded.
- `GET /ready`: 200 while calls are taken, 503 once the server is told to stop.
- `GET /metrics`: counts and latencies in the text format of Prometheus.

Scoring takes place in a few threads beside the event loop. A call too many is answered with 503 before its body is
read, so that neither a queue nor memory grows with the clients. What a body may be is limited, too: see `App`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

from train.data.values import cut
from train.record.prometheus import TEXT
from train.serving.batching import Batches, Results
from train.serving.following import Follower
from train.serving.formats import from_arrow_stream, from_json, from_json_lines, to_arrow_stream
from train.serving.metrics import Metrics
from train.serving.service import Service

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

log = logging.getLogger(__name__)
JSON, FORM, LINES, ARROW = (
    "application/json",
    "application/x-www-form-urlencoded",  # that curl -d sends, whatever the text
    "application/x-ndjson",
    "application/vnd.apache.arrow.stream",
)
METHODS = {"/score": "POST", "/health": "GET", "/metrics": "GET", "/ready": "GET"}
CALL_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)


class HTTPError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class App:
    """`await app(scope, receive, send)`."""

    def __init__(
        self,
        service: Service,
        follower: Follower | None = None,
        *,
        threads: int = 2,
        most_waiting: int = 64,
        most_bytes: int = 16 << 20,
        most_requests: int = 10_000,
        body_seconds: float = 10,
        drain_seconds: float = 30,
        batch_milliseconds: float = 0,
        batch_candidates: int = 4096,
    ) -> None:
        """`threads` score at once; `most_waiting` calls send their body, wait or are scored. A body has up to
        `most_bytes`, decompressed too, and `most_requests`, and arrives within `body_seconds`. Calls that are open when
        the server stops have `drain_seconds` to end. A `follower` of the service's scorer is started, and stopped.
        With `batch_milliseconds` calls that come so soon after another are scored with it, up to `batch_candidates`;
        ValueError for a service that keeps user sides, which it does for one request at a time.
        """
        self.batches: Batches | None = None
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="score")
        if batch_milliseconds:
            if service.scorer.user_sides is not None:
                raise ValueError("user sides are kept of calls that are scored one by one; use batch_milliseconds=0")
            seconds = batch_milliseconds / 1e3
            self.batches = Batches(service, service.check, self._threads, seconds, batch_candidates)
        self.follower = follower
        if follower is not None:
            follower.start()
        parts = (follower, service.scorer.user_sides, self.batches)
        self._measured = [part for part in parts if part is not None]
        self.service, self.metrics, self.draining = service, Metrics(), False
        self.most_waiting, self.most_bytes, self.most_requests = most_waiting, most_bytes, most_requests
        self.body_seconds, self.drain_seconds = body_seconds, drain_seconds

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            raise ValueError(f"{scope['type']} is not served, only http")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            kind = (await receive())["type"]
            if kind == "lifespan.shutdown":
                await self._drain()
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return

    async def _drain(self) -> None:
        """Take no more calls, and let open ones end."""
        self.draining = True
        if self.follower is not None:
            self.follower.stop(0)  # a version may take minutes to read, and open calls are answered by this thread
        end = time.monotonic() + self.drain_seconds
        while self.metrics.in_flight and time.monotonic() < end:
            await asyncio.sleep(0.02)
        if self.metrics.in_flight:
            log.warning("%d calls are left unanswered after %s s", self.metrics.in_flight, self.drain_seconds)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _http(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        path, kind, call = scope["path"], JSON, _call_id(scope)
        try:
            status, kind, body = 200, *await self._answer(scope, receive)
        except HTTPError as error:
            status, body = error.status, _json({"error": str(error)})
        except ValueError as error:
            status, body = 400, _json({"error": str(error)})
        except Exception:
            log.exception("call %s to %s failed", call, path)
            status, body = 500, _json({"error": "internal error, see the server's log"})
        if 400 <= status < 500:
            log.info("call %s is answered %d: %s", call, status, body.decode())
        self.metrics.responded(path if path in METHODS else "other", status)
        length = str(len(body)).encode()
        headers = [(b"content-type", kind.encode()), (b"content-length", length), (b"x-request-id", call.encode())]
        if status == 405:
            headers.append((b"allow", METHODS[path].encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Mapping[str, Any], receive: Receive) -> tuple[str, bytes]:
        path = scope["path"]
        if path not in METHODS:
            raise HTTPError(404, f"{cut(path)} is not served; there are {', '.join(METHODS)}")
        if scope["method"] != METHODS[path]:
            raise HTTPError(405, f"{path} is for {METHODS[path]}")
        if path == "/health":
            return JSON, _json({"status": "ok", "tasks": self.service.tasks})
        if path == "/metrics":
            gauges = {name: each for part in self._measured for name, each in part.metrics().items()}
            return TEXT, self.metrics.text(gauges).encode()
        if path == "/ready":
            if self.draining:
                raise HTTPError(503, "the server stops")
            return JSON, _json({"status": "ready"})
        return await self._score(scope, receive)

    async def _score(self, scope: Mapping[str, Any], receive: Receive) -> tuple[str, bytes]:
        headers = dict(scope["headers"])
        # JSON where the client does not say.
        kind = headers.get(b"content-type", JSON.encode()).decode("latin-1").partition(";")[0].strip().lower()
        if kind not in CODECS:
            raise HTTPError(415, f"content-type {cut(kind)} is not read; {SEND}")
        if (coding := headers.get(b"content-encoding", b"identity").decode("latin-1")) != "identity":
            raise HTTPError(415, f"content-encoding {cut(coding)} is not read; send the body as it is")
        if self.draining:
            raise HTTPError(503, "the server stops; ask another one")
        if self.metrics.in_flight >= self.most_waiting:
            raise HTTPError(503, f"{self.metrics.in_flight} calls are scored or wait; try again later")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and (len(length) > 18 or int(length) > self.most_bytes):
            raise self._too_large()
        self.metrics.in_flight += 1
        try:
            try:
                async with asyncio.timeout(self.body_seconds):
                    body = await self._body(receive)
            except TimeoutError:
                raise HTTPError(408, f"the body did not arrive within {self.body_seconds:g} s") from None
            start = time.perf_counter()
            answer, requests, candidates = await self._scored(kind, body)
        finally:
            self.metrics.in_flight -= 1
        self.metrics.scored(requests, candidates, time.perf_counter() - start)
        return JSON if kind == FORM else kind, answer

    async def _scored(self, kind: str, body: bytes) -> tuple[bytes, int, int]:
        """The answer to a body, how many requests it had and how many candidates."""

        def alone() -> tuple[bytes, int, int]:
            return self._written(kind, self.service(self._requests(kind, body)))

        def in_thread(function: Callable[..., Any], *arguments: Any) -> Awaitable[Any]:
            return asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

        if self.batches is None:
            return await in_thread(alone)
        results = await self.batches(await in_thread(self._requests, kind, body))
        return await in_thread(self._written, kind, results)

    def _requests(self, kind: str, body: bytes) -> list[Any]:
        if kind == FORM and body.lstrip()[:1] not in (b"{", b"["):
            raise HTTPError(415, f"a form is not read; {SEND}")
        if kind == ARROW:
            return from_arrow_stream(body, self.most_requests, self.most_bytes)
        return (from_json_lines if kind == LINES else from_json)(body, self.most_requests)

    def _written(self, kind: str, results: Results) -> tuple[bytes, int, int]:
        candidates = sum(len(result[self.service.tasks[0]]) for result in results)
        return CODECS[kind](results), len(results), candidates

    def _too_large(self) -> HTTPError:
        return HTTPError(413, f"a body has up to {self.most_bytes} bytes; send fewer requests at once")

    async def _body(self, receive: Receive) -> bytes:
        body, more = bytearray(), True  # of however many parts
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise HTTPError(400, "the client left before its request was whole")
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.most_bytes:
                raise self._too_large()
        return bytes(body)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _lines(results: Results) -> bytes:
    return b"".join(_json(result) + b"\n" for result in results)


def _predictions(results: Results) -> bytes:
    return _json({"predictions": results})


CODECS: dict[str, Callable[[Any], bytes]] = {
    JSON: _predictions,
    LINES: _lines,
    ARROW: to_arrow_stream,
    FORM: _predictions,
}
SEND = f"send {JSON}, {LINES}, {ARROW}"


def _call_id(scope: Mapping[str, Any]) -> str:
    """The client's own, or a new one."""
    given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
    return given if CALL_ID.fullmatch(given) else uuid.uuid4().hex


def create_app() -> App:
    """The application of the export that GEMSMITH_EXPORT names.

    GEMSMITH_FOLLOW: the folder or URL of what its run publishes, which is looked at every GEMSMITH_FOLLOW_SECONDS (5);
    GEMSMITH_USER_SIDE_BYTES: how much is kept of requests between calls (0), see `Scorer`;
    GEMSMITH_IMPORT: modules to import before, by commas, for a model of your own that could not be traced;
    GEMSMITH_THREADS, GEMSMITH_MOST_WAITING and so on: the settings of `App`.
    """
    folder = os.environ.get("GEMSMITH_EXPORT")
    if not folder:
        raise ValueError("GEMSMITH_EXPORT must name the folder of an export, e.g. GEMSMITH_EXPORT=runs/first/export")
    for module in filter(None, os.environ.get("GEMSMITH_IMPORT", "").split(",")):
        import_module(module)
    settings = {}
    for name, setting in inspect.signature(App).parameters.items():
        if setting.kind is not setting.KEYWORD_ONLY:
            continue
        settings[name] = _number(name.upper(), setting.default, least=min(1, setting.default))
    service = Service.from_pretrained(folder, _number("USER_SIDE_BYTES", 0, least=0))
    place, seconds = os.environ.get("GEMSMITH_FOLLOW"), _number("FOLLOW_SECONDS", 5)
    return App(service, Follower(service.scorer, place, seconds) if place else None, **settings)


def _number(name: str, default: float, least: int = 1) -> int:
    key = f"GEMSMITH_{name}"
    given = os.environ.get(key, str(default))
    if not given.isdecimal() or int(given) < least:
        raise ValueError(f"{key}={given} must be a number of at least {least}, e.g. {key}={default}")
    return int(given)
