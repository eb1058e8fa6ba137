"""Whether the device waits for the host, which launches the kernels of a step one by one."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from train.compose import graphs_refusal
from train.config import Config
from train.distributed import World

log = logging.getLogger(__name__)
IDLE = 0.8
"""Of the steps of a window: a device that is done with as many before their books are kept has little to do."""
WAITED = 0.1
"""Of a window's time: a device that waits longer for data than this would wait for them without launches, too."""
LEAST_STEPS = 10
PADDING = 0.08
"""Of a batch's events, at most: what `data.pad_events` is proposed to round up to."""


class LaunchWatch:
    """Looks, without waiting, whether the device has finished a step when the host has only just launched it.

    A device that is the limit is far behind then: kernels queue up before it. What is found is said once, in the log.
    """

    def __init__(self, config: Config, world: World) -> None:
        """Looks on the first rank's GPU, where graphs are a way out that is not taken."""
        looks = world.device.type == "cuda" and world.is_first
        looks = looks and not config.runtime.cuda_graphs and graphs_refusal(config) is None
        self._event = torch.cuda.Event() if looks else None
        self._batch_size = config.data.batch_size
        self._steps = self._idle = 0

    def launched(self) -> None:
        """Forward, backward and optimisers of a step."""
        if self._event is not None:
            self._event.record()

    def accounted(self) -> None:
        """The rest of the step, which takes the host about a millisecond."""
        if self._event is not None:
            self._steps += 1
            self._idle += self._event.query()

    def report(self, rates: Mapping[str, float]) -> None:
        """At the end of a window with these rates of `Throughput`."""
        steps, idle = self._steps, self._idle
        self._steps = self._idle = 0
        if self._event is None or steps < LEAST_STEPS or not rates:
            return
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
