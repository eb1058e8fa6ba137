"""A run over HTTP, for monitoring: `/metrics` in Prometheus' text format, `/healthz` for whoever restarts what hangs.

Rank 0 serves what the tracker is told anyway, from a thread: no request waits for the device or holds up a step.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from train.checkpoint.find import checkpoints
from train.record.prometheus import TEXT, labels, metric

HEALTHY = 600.0  # seconds without a step for which a run is taken for alive
OF_THE_RUN = {
    "loss": ("gemsmith_loss", "Training loss, mean since the last log line."),
    "lr": ("gemsmith_learning_rate", "Learning rate of the dense part."),
    "examples_per_s": ("gemsmith_examples_per_second", "Candidates trained on a second, all ranks."),
    "mfu": ("gemsmith_mfu_ratio", "Model FLOPs utilisation."),
    "data_wait_share": ("gemsmith_data_wait_ratio", "Share of the time for which rank 0 waits for batches."),
    "skipped_steps": ("gemsmith_skipped_batches", "Batches skipped for a loss or gradient that was not finite."),
    "peak_memory_bytes": ("gemsmith_peak_memory_bytes", "Memory of the rank that used most."),
}
"""Values of `train` records with a metric of their own; all others are gemsmith_metric, with labels."""


class Endpoint:
    """Serves from when it is made until `close`. OSError if it cannot listen there, such as on a port in use."""

    def __init__(self, run_dir: Path, host: str, port: int, *, step: int, total_steps: int) -> None:
        """Steps are counted from `step`."""
        self.run_dir, self.step, self.total_steps = run_dir, step, total_steps
        self._values: dict[str, Mapping[str, float]] = {}  # by split
        self._ended = time.monotonic()  # of the last step
        self._between = 0  # more than 0 while something else than steps is done
        self._server = _server(host, port, {"/metrics": self._metrics, "/healthz": self._health})
        self.address = (host, self._server.server_port)
        threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True).start()

    def advance(self) -> None:
        """A step has ended."""
        self.step += 1
        self._ended = time.monotonic()

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        """A context for validations and the like, which may take longer than steps."""
        self._between += 1
        try:
            yield
        finally:
            self._between -= 1
            self._ended = time.monotonic()

    def log(self, step: int, split: str, values: Mapping[str, float]) -> None:
        self._values[split] = dict(values)

    def close(self, status: int = 0) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _age(self) -> float:
        return 0.0 if self._between else time.monotonic() - self._ended

    def _health(self) -> tuple[int, str]:
        age = self._age()
        if age > HEALTHY:
            return 503, f"no step has ended for {age:.0f} s, more than {HEALTHY:g}; the last was step {self.step}\n"
        return 200, f"step {self.step} of {self.total_steps}\n"

    def _metrics(self) -> tuple[int, str]:
        lines = metric("gemsmith_step", "Steps that have ended.", {"": self.step})
        lines += metric("gemsmith_total_steps", "Steps of the whole run.", {"": self.total_steps})
        lines += metric("gemsmith_step_age_seconds", "Since the last step ended; 0 between steps.", {"": self._age()})
        if saved := checkpoints(self.run_dir / "checkpoints"):
            with contextlib.suppress(OSError):  # removed in this moment
                age = max(0.0, time.time() - saved[-1].stat().st_mtime)
                lines += metric("gemsmith_checkpoint_age_seconds", "Since the newest checkpoint.", {"": age})
                step = int(saved[-1].name.removeprefix("step_"))
                lines += metric("gemsmith_checkpoint_step", "Step of the newest checkpoint.", {"": step})
        values, others = self._values.copy(), {}
        for key, (name, what) in OF_THE_RUN.items():
            if key in values.get("train", {}):
                lines += metric(name, what, {"": values["train"][key]})
        for split, found in values.items():
            for key, value in found.items():
                if split != "train" or key not in OF_THE_RUN:
                    task, _, last = key.rpartition("/")
                    others[labels(split=split, task=task, metric=last)] = value
        lines += metric("gemsmith_metric", "The newest value of each other metric.", others)
        return 200, "\n".join(lines) + "\n"


def _server(host: str, port: int, pages: Mapping[str, Callable[[], tuple[int, str]]]) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds for which a client may say nothing

        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            status, text = page() if page else (404, f"there are {' and '.join(pages)}\n")
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", TEXT)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are no news of the run."""

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads = True

        def server_bind(self) -> None:
            # Without HTTPServer's look-up of the host's full name, which may take seconds.
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind(self.server_address)
            self.server_address = self.socket.getsockname()
            self.server_name, self.server_port = host, self.server_address[1]

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that went away."""

    return Server((host, port), Handler)
