"""torch.optim.Muon in a training loop that may leave a step out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class GuardedMuon(torch.optim.Muon):
    """Muon (Jordan et al., 2024) with updates scaled to AdamW's size, so that AdamW's learning rates fit it."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, adjust_lr_fn="match_rms_adamw")
        for param in (param for group in groups for param in group["params"]):
            self.state[param]["momentum_buffer"] = torch.zeros_like(param)

    @torch.no_grad()
    def guarded_step(self, skipped: Tensor) -> None:
        """A step that changes neither parameters nor momenta if `skipped` is 1. Does not wait for the device."""
        values = [each for group in self.param_groups for each in group["params"]]
        values += [self.state[each]["momentum_buffer"] for each in values]
        before = [value.clone() for value in values]
        self.step()
        for value, old in zip(values, before, strict=True):
            torch.where(skipped.bool(), old, value, out=value)
