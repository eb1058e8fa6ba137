"""Counts of a server in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate

from train.record.prometheus import labels, metric

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

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """With `gauges` beside its own: what each is, and its value, by name."""
        responses = {labels(path=path, status=status): n for (path, status), n in sorted(self._responses.items())}
        bounds = [*(f"{bound:g}" for bound in BUCKETS), "+Inf"]
        counts = zip(bounds, accumulate(self._counts), strict=True)
        seconds: dict[str, float] = {f"_bucket{labels(le=bound)}": count for bound, count in counts}
        seconds |= {"_sum": self._seconds, "_count": sum(self._counts)}
        return "\n".join(
            [
                *metric("gemsmith_http_responses_total", "Responses by path and status.", responses, "counter"),
                *metric("gemsmith_scored_requests_total", "Requests scored.", {"": self._requests}, "counter"),
                *metric("gemsmith_scored_candidates_total", "Candidates scored.", {"": self._candidates}, "counter"),
                *metric("gemsmith_in_flight", "Calls that send a body, wait or are scored.", {"": self.in_flight}),
                *metric("gemsmith_score_seconds", "Of a call, from its body to its scores.", seconds, "histogram"),
                *(line for name, (what, value) in gauges.items() for line in metric(name, what, {"": value})),
                "",
            ]
        )
