"""The training command, in steps that take a while and no processor: what `test_preemption.py` stops amid them."""

from __future__ import annotations

import runpy
import time
from collections.abc import Iterator

from modules.batch import RequestBatch
from train import trainer


class Slow(trainer.Trainer):
    def _step(self, batches: Iterator[RequestBatch]) -> None:
        time.sleep(0.1)
        super()._step(batches)


if __name__ == "__main__":
    trainer.Trainer = Slow  # type: ignore[misc]
    runpy.run_module("train.main", run_name="__main__")
