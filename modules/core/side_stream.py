"""Work that others need not wait for, as a branch of a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache

import torch
from torch import Tensor


class SideStream:
    """Lets what is done inside run at the same time as what is done afterwards, until its result is joined:

        with SideStream(x) as work:
            y = f(x)
        z = g(x)
        y = work.join(y)

    This happens only while a CUDA graph is captured: the two become branches of the graph, forward and backward, so
    that kernels which leave most of the chip idle run beside large ones. Without a graph they run one after the other,
    as they would anyway where the host launches kernels too slowly.

    The arguments must be all tensors that the work reads besides parameters. Works with different `lane`s may also run
    at the same time as each other.
    """

    def __init__(self, *inputs: Tensor | None, lane: int = 0) -> None:
        self._inputs = [x for x in inputs if x is not None]
        self._lane = lane
        self._stream: torch.cuda.Stream | None = None
        self._inside = ExitStack()

    def __enter__(self) -> SideStream:
        device = self._inputs[0].device
        if device.type == "cuda" and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
            self._stream = _stream(device, self._lane)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            # The allocator must not reuse their memory before this stream is done with them, too, forward and backward
            for x in self._inputs:
                x.record_stream(self._stream)
            self._inside.enter_context(torch.cuda.stream(self._stream))
        return self

    def __exit__(self, *error: object) -> None:
        self._inside.close()

    def join(self, result: Tensor) -> Tensor:
        """The result, which may be read from here on."""
        return self.join_all([result])[0]

    def join_all(self, results: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results, which may be read from here on."""
        if self._stream is not None:
            current = torch.cuda.current_stream(results[0].device)
            current.wait_stream(self._stream)
            for result in results:
                result.record_stream(current)
        return results


@cache
def _stream(device: torch.device, lane: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
