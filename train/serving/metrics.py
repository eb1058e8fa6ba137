"""Counts of a server in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds in seconds."""


class Metrics:
    """Written by one thread: that of the server's event loop."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._responses: Counter[tuple[str, int]] = Counter()
        self._requests = self._candidates = 0
        self._counts = [0] * (len(BUCKETS) + 1)
        self._seconds = 0.0

    def responded(self, path: str, status: int) -> None:
        self._responses[path, status] += 1

    def scored(self, requests: int, candidates: int, seconds: float) -> None:
        """A call was answered after `seconds`, the wait for a thread included."""
        self._requests += requests
        self._candidates += candidates
        self._seconds += seconds
        self._counts[bisect_left(BUCKETS, seconds)] += 1

    def text(self) -> str:
        responses = [
            f'gemsmith_http_responses_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self._responses.items())
        ]
        bounds = [*(f"{bound:g}" for bound in BUCKETS), "+Inf"]
        buckets = [
            f'gemsmith_score_seconds_bucket{{le="{bound}"}} {count}'
            for bound, count in zip(bounds, accumulate(self._counts), strict=True)
        ]
        lines = [
            *_about("gemsmith_http_responses_total", "counter", "Responses by path and status."),
            *responses,
            *_about("gemsmith_scored_requests_total", "counter", "Ranking requests that were scored."),
            f"gemsmith_scored_requests_total {self._requests}",
            *_about("gemsmith_scored_candidates_total", "counter", "Candidates that were scored."),
            f"gemsmith_scored_candidates_total {self._candidates}",
            *_about("gemsmith_in_flight", "gauge", "Calls that are being scored or wait for it."),
            f"gemsmith_in_flight {self.in_flight}",
            *_about("gemsmith_score_seconds", "histogram", "Seconds of a call to /score, from its body to its scores."),
            *buckets,
            f"gemsmith_score_seconds_sum {self._seconds:.9g}",
            f"gemsmith_score_seconds_count {sum(self._counts)}",
        ]
        return "\n".join(lines) + "\n"


def _about(name: str, kind: str, what: str) -> list[str]:
    return [f"# HELP {name} {what}", f"# TYPE {name} {kind}"]
