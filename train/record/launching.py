"""Whether the device waits for the host, which launches the kernels of a step one by one."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from train.config.compose import graphs_refusal
from train.config.schema import Config
from train.process.distributed import World

log = logging.getLogger(__name__)
IDLE = 0.8
"""Share of a window's steps. A device that has finished that many before the host accounts for them is mostly idle."""
WAITED = 0.1
"""Share of a window's time. If the loop waits longer than this for data, graphs would not help."""
LEAST_STEPS = 10
PADDING = 0.08
"""Largest share of a batch's events that is proposed for `data.pad_events`."""


class LaunchWatch:
    """Looks, without waiting, whether the device has finished a step when the host has only just launched it.

    If the device is the limit, it is far behind at that time and kernels queue up. The finding is logged once.
    """

    def __init__(self, config: Config, world: World) -> None:
        """Watches the first rank's GPU, if the run could use graphs and does not."""
        looks = world.device.type == "cuda" and world.is_first
        looks = looks and not config.runtime.cuda_graphs and graphs_refusal(config) is None
        self._event = torch.cuda.Event() if looks else None
        self._batch_size = config.data.batch_size
        self._steps = self._idle = 0

    def launched(self) -> None:
        """To be called when forward, backward and optimisers of a step have been launched."""
        if self._event is not None:
            self._event.record()

    def accounted(self) -> None:
        """To be called after the rest of the step, which takes the host about a millisecond."""
        if self._event is not None:
            self._steps += 1
            self._idle += self._event.query()

    def report(self, rates: Mapping[str, float]) -> None:
        """To be called at the end of a window, with its rates of `Throughput`; short windows are taken together."""
        steps, idle = self._steps, self._idle
        if self._event is None or steps < LEAST_STEPS or not rates:
            return
        self._steps = self._idle = 0
        if idle < IDLE * steps or rates["data_wait_share"] > WAITED:
            return
        self._event = None
        padding = 1 << max(0, int(rates["mean_history"] * self._batch_size * PADDING).bit_length() - 1)
        log.warning(
            "the device waits for the host: it was done with %d of the last %d steps as soon as they were launched; "
            "runtime.cuda_graphs=true data.pad_events=%d launches a step at once (docs/training.md, When the host is "
            "too slow)",
            idle,
            steps,
            padding,
        )
