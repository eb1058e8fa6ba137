"""Batches of a run that had a non-finite loss or gradient: what is logged of them, and when they are too many."""

from __future__ import annotations

import logging

from train.optim.guards import FiniteGuard

log = logging.getLogger(__name__)


class BadBatches:
    """Those that a guard has found. All ranks find the same."""

    def __init__(self, guard: FiniteGuard, *, skipped: bool) -> None:
        """`skipped`: the run goes on after such a batch (`runtime.bad_batch=skip`)."""
        self.guard, self._what = guard, "skipped" if skipped else "stopping"
        self._reported: list[str] = []

    def report(self) -> None:
        """Log each since the last report. Waits for the device."""
        for line in self.guard.report():
            log.warning("%s; %s", line, self._what)
            self._reported.append(line)

    def pop(self) -> list[str]:
        """What has been reported since this was last called."""
        reported, self._reported = self._reported, []
        return reported

    def divergence(self, step: int, saved_step: int, *, finished: bool) -> str | None:
        """An error's text when most of a whole window of batches, or of those of a shorter run, were skipped."""
        window, skipped = self.guard.skipped.maxlen, sum(self.guard.skipped)
        judged = len(self.guard.skipped)
        if not (judged == window or finished) or 2 * skipped <= judged:
            return None
        saved = f"step {saved_step} is saved" if saved_step else "nothing is saved"
        return (
            f"the run has diverged: {skipped} of the {judged} batches up to step {step} had a non-finite "
            f"loss or gradient and were skipped; {saved}. Try a lower optimizer.lr or optimizer.sparse_lr, or "
            "optimizer.clip_norm=1, in another runtime.run_dir, where checkpoint.load may begin with saved weights; "
            "runtime.skip_window=0 lets such runs go on"
        )

    def are_few(self, step: int, saved_step: int) -> bool:
        """Whether most batches since the last checkpoint were taken: another would only push out one from before."""
        recent = list(self.guard.skipped)[-(step - saved_step) :]
        if 2 * sum(recent) <= len(recent):
            return True
        log.warning(
            "step %s is not saved: %s of the last %s batches were skipped, and its weights may have diverged",
            step,
            sum(recent),
            len(recent),
        )
        return False
