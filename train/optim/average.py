"""A moving average of the dense weights, which evaluations and exports take in their place: `optimizer.ema_decay`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

SHARE = 10
"""Until the decay is reached, the average is over about the last tenth of the steps."""


class Average:
    """`values` follow `parameters` after each step. The parameters must not move in memory."""

    def __init__(self, parameters: Mapping[str, Tensor], decay: float, device: torch.device) -> None:
        self.decay = decay
        self.values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self.steps = torch.zeros((), device=device)  # steps that were not skipped
        self._parameters: list[Tensor] = list(parameters.values())
        self._averages = list(self.values.values())

    @torch.no_grad()
    def restart(self) -> None:
        """Start the average anew from the present parameters."""
        torch._foreach_copy_(self._averages, self._parameters)

    @torch.no_grad()
    def update(self, skipped: Tensor) -> None:
        """Update after a step, which was not taken if `skipped` is 1. Does not wait for the device.

        After t steps the decay is at most t / (t + 10), so that the initial weights are soon forgotten.
        """
        taken = 1 - skipped
        weight = taken * (1 - torch.clamp(self.steps / (self.steps + SHARE), max=self.decay))
        moves = torch._foreach_sub(self._parameters, self._averages)
        torch._foreach_mul_(moves, weight)
        torch._foreach_add_(self._averages, moves)
        self.steps += taken

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the parameters are the averages."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        trained = [parameter.clone() for parameter in self._parameters]
        torch._foreach_copy_(self._parameters, self._averages)
        torch._foreach_copy_(self._averages, trained)
