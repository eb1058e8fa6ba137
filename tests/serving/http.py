"""An ASGI application behind a socket, for tests: HTTP/1.1 with bodies of a known length, a call a connection."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from train.serving.asgi import App


@asynccontextmanager
async def served(app: App) -> AsyncIterator[int]:
    """The port of localhost on which the application answers."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        pairs = [line.partition(":") for line in head[1:] if line]
        headers = [(name.strip().lower().encode(), value.strip().encode()) for name, _, value in pairs]
        left = int(dict(headers).get(b"content-length", b"0"))

        async def receive() -> dict[str, Any]:
            nonlocal left
            part = await reader.read(left) if left else b""
            if left and not part:
                return {"type": "http.disconnect"}
            left -= len(part)
            return {"type": "http.request", "body": part, "more_body": left > 0}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode(), b"connection: close"]
                lines += [name + b": " + value for name, value in message["headers"]]
                writer.write(b"\r\n".join([*lines, b"", b""]))
            else:
                writer.write(message["body"])

        await app({"type": "http", "method": method, "path": path, "headers": headers}, receive, send)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=512)
    async with server:
        yield server.sockets[0].getsockname()[1]


def memory() -> int:
    """Bytes that this process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
