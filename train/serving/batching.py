"""Calls that arrive close together, scored as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

Requests = list[Any]
Results = Sequence[Mapping[str, Any]]
Score = Callable[[Requests], Results]


class Batches:
    """`await batches(requests)`: their results, scored in `threads` with those of other calls.

    A batch is scored `seconds` after its first call came, or as soon as it has `most_candidates`; a call with more is
    one of its own. Where a batch fails, calls that `check` refuses get its error, and the others are scored.
    """

    def __init__(
        self, score: Score, check: Callable[[Requests], None], threads: Executor, seconds: float, most_candidates: int
    ) -> None:
        self._score, self._check, self._threads = score, check, threads
        self._seconds, self._most = seconds, most_candidates
        self._calls: list[tuple[Requests, asyncio.Future[Results]]] = []
        self._candidates = self._batches = 0
        self._timer: asyncio.TimerHandle | None = None
        self._scored: set[asyncio.Task[None]] = set()  # which would be collected without a reference

    async def __call__(self, requests: Requests) -> Results:
        candidates = sum(map(_candidates, requests))
        if self._candidates + candidates > self._most:
            self._go()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Results] = loop.create_future()
        if not self._calls:
            self._timer = loop.call_later(self._seconds, self._go)
        self._calls.append((requests, future))
        self._candidates += candidates
        if self._candidates >= self._most:
            self._go()
        return await future

    def _go(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if calls := self._calls:
            self._calls, self._candidates = [], 0
            self._batches += 1
            task = asyncio.create_task(self._answer(calls))
            self._scored.add(task)
            task.add_done_callback(self._scored.discard)

    async def _answer(self, calls: list[tuple[Requests, asyncio.Future[Results]]]) -> None:
        loop = asyncio.get_running_loop()
        answers: Sequence[Results | Exception]
        try:
            answers = await loop.run_in_executor(self._threads, self._of_all, [requests for requests, _ in calls])
        except Exception as error:  # the threads were shut down
            answers = [error] * len(calls)
        except asyncio.CancelledError:  # and so before they came to this batch
            answers = [RuntimeError("the server stopped before this call was scored")] * len(calls)
        for (_, future), answer in zip(calls, answers, strict=True):
            if future.done():  # its client left
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _of_all(self, calls: list[Requests]) -> list[Results | Exception]:
        try:
            results = iter(self._score([request for requests in calls for request in requests]))
            return [[next(results) for _ in requests] for requests in calls]
        except Exception as error:
            if len(calls) == 1:
                return [error]
        faults = [self._fault(requests) for requests in calls]
        if not any(faults):
            return [self._of_all([requests])[0] for requests in calls]
        rest = iter(self._of_all([requests for requests, fault in zip(calls, faults, strict=True) if fault is None]))
        return [fault or next(rest) for fault in faults]

    def _fault(self, requests: Requests) -> Exception | None:
        try:
            self._check(requests)
        except Exception as error:
            return error
        return None

    def metrics(self) -> dict[str, tuple[str, float]]:
        """What each is, and its value, by name."""
        return {"gemsmith_batches": ("Batches in which calls were scored.", self._batches)}


def _candidates(request: Any) -> int:
    """Of a request that nothing has checked yet."""
    given = request.get("candidates") if isinstance(request, Mapping) else None
    return max(1, len(given)) if isinstance(given, Sequence) else 1
