"""An HTTP server of an export, as a plain ASGI application: any ASGI server runs it, and it needs no framework.

    GEMSMITH_EXPORT=RUN_DIR/export uvicorn --factory train.serving.asgi:create_app

- `POST /score`: requests as JSON (one, or a list), as JSON lines (`application/x-ndjson`) or as an Arrow stream
  (`application/vnd.apache.arrow.stream`), and predictions in the same form.
- `GET /health`: 200 as soon as the model is loaded.
- `GET /metrics`: counts and latencies in the text format of Prometheus.

Scoring takes place in a few threads beside the event loop. A call too many is answered with 503 at once, so that a
queue does not grow longer than clients wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

from train.serving.formats import from_arrow_stream, from_json, from_json_lines, to_arrow_stream
from train.serving.metrics import Metrics
from train.serving.service import Service

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Results = list[Mapping[str, Any]]

log = logging.getLogger(__name__)
JSON, LINES, ARROW, TEXT = (
    "application/json",
    "application/x-ndjson",
    "application/vnd.apache.arrow.stream",
    "text/plain; version=0.0.4; charset=utf-8",
)
METHODS = {"/score": "POST", "/health": "GET", "/metrics": "GET"}


class HTTPError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class App:
    """`await app(scope, receive, send)`."""

    def __init__(
        self, service: Service, *, threads: int = 2, most_waiting: int = 64, most_bytes: int = 16 << 20
    ) -> None:
        """`threads` score at once; `most_waiting` calls are scored or wait, and bodies have up to `most_bytes`."""
        self.service, self.metrics = service, Metrics()
        self.most_waiting, self.most_bytes = most_waiting, most_bytes
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="score")

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
                self._threads.shutdown()
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return

    async def _http(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        path, kind = scope["path"], JSON
        try:
            status, kind, body = 200, *await self._answer(scope, receive)
        except HTTPError as error:
            status, body = error.status, _json({"error": str(error)})
        except ValueError as error:
            status, body = 400, _json({"error": str(error)})
        except Exception:
            log.exception("a call to %s failed", path)
            status, body = 500, _json({"error": "internal error, see the server's log"})
        self.metrics.responded(path if path in METHODS else "other", status)
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        if status == 405:
            headers.append((b"allow", METHODS[path].encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Mapping[str, Any], receive: Receive) -> tuple[str, bytes]:
        path = scope["path"]
        if path not in METHODS:
            raise HTTPError(404, f"{path} is not served; there are {', '.join(METHODS)}")
        if scope["method"] != METHODS[path]:
            raise HTTPError(405, f"{path} is for {METHODS[path]}")
        if path == "/health":
            return JSON, _json({"status": "ok", "tasks": self.service.tasks})
        if path == "/metrics":
            return TEXT, self.metrics.text().encode()
        return await self._score(_content_type(scope), await self._body(receive))

    async def _score(self, kind: str, body: bytes) -> tuple[str, bytes]:
        if kind not in CODECS:
            raise HTTPError(415, f"content-type {kind} is not read; send {', '.join(CODECS)}")
        if self.metrics.in_flight >= self.most_waiting:
            raise HTTPError(503, f"{self.metrics.in_flight} calls are scored or wait; try again later")
        start = time.perf_counter()
        self.metrics.in_flight += 1
        try:
            loop = asyncio.get_running_loop()
            answer, requests, candidates = await loop.run_in_executor(self._threads, self._scored, kind, body)
        finally:
            self.metrics.in_flight -= 1
        self.metrics.scored(requests, candidates, time.perf_counter() - start)
        return kind, answer

    def _scored(self, kind: str, body: bytes) -> tuple[bytes, int, int]:
        """In a thread: the answer to a body, how many requests it had and how many candidates."""
        read, write = CODECS[kind]
        results = self.service(read(body))
        return write(results), len(results), sum(len(result[self.service.tasks[0]]) for result in results)

    async def _body(self, receive: Receive) -> bytes:
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise HTTPError(400, "the client left before its request was whole")
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
            if size > self.most_bytes:
                raise HTTPError(413, f"a body has up to {self.most_bytes} bytes; send fewer requests at once")
        return b"".join(parts)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _lines(results: Results) -> bytes:
    return b"".join(_json(result) + b"\n" for result in results)


def _predictions(results: Results) -> bytes:
    return _json({"predictions": results})


CODECS: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    JSON: (from_json, _predictions),
    LINES: (from_json_lines, _lines),
    ARROW: (from_arrow_stream, to_arrow_stream),
}


def _content_type(scope: Mapping[str, Any]) -> str:
    """JSON where the client does not say."""
    given = dict(scope["headers"]).get(b"content-type", JSON.encode()).decode("latin-1")
    return given.partition(";")[0].strip().lower()


def create_app() -> App:
    """The application of the export that GEMSMITH_EXPORT names.

    GEMSMITH_IMPORT: modules to import before, by commas, for a model of your own that could not be traced;
    GEMSMITH_THREADS: threads that score (2).
    """
    folder = os.environ.get("GEMSMITH_EXPORT")
    if not folder:
        raise ValueError("GEMSMITH_EXPORT must name the folder of an export, e.g. GEMSMITH_EXPORT=runs/first/export")
    for module in filter(None, os.environ.get("GEMSMITH_IMPORT", "").split(",")):
        import_module(module)
    threads = os.environ.get("GEMSMITH_THREADS", "2")
    if not threads.isdecimal() or not int(threads):
        raise ValueError(f"GEMSMITH_THREADS={threads} must be a number of at least 1, e.g. GEMSMITH_THREADS=2")
    return App(Service.from_pretrained(folder), threads=int(threads))
