"""Where a run stands, as its checkpoints tell it."""

from __future__ import annotations

import pytest

from train.checkpoint import Progress


@pytest.mark.parametrize(("ranks", "batch_size"), [(2, 16), (1, 16), (4, 16), (2, 5)])
def test_a_run_that_goes_on_with_other_batches_sees_every_request_once_an_epoch(ranks: int, batch_size: int) -> None:
    progress = Progress(step=3, consumed=96)  # of 500, by batches of 32
    total = progress.step + progress.steps_left(500, ranks * batch_size, epochs=2)
    while progress.step < total:
        progress.step, progress.consumed = progress.step + 1, min(progress.consumed + ranks * batch_size, 500)
        if progress.consumed == 500:
            progress.epoch, progress.consumed = progress.epoch + 1, 0
    assert (progress.epoch, progress.consumed) == (2, 0)
    assert progress.steps_left(500, 32, epochs=2) == 0
    assert Progress().steps_left(500, 32, epochs=2) == 32
