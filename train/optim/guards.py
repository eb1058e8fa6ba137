"""The finite guard: a batch with a non-finite loss or gradient changes no weight, and no step waits for the host.

The tables' optimiser runs inside the backward, so a check before `optimizer.step()` comes too late for them. The guard
works on the looked-up rows: it gets all their gradients at once, before the fused update does, and passes on zeros if
any of them, on any rank, is not finite. Row-wise Adagrad and SGD then leave the tables as they were; Adam's moments
decay by one step. The dense optimiser skips the batch by the same verdict.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from kernels.tokens import has_rows, zero_unless_
from modules.batch import RequestBatch
from train.process.distributed import World

SMALL = 2**20
"""Values of a gradient below which the guard copies it beside others, in place of reading it where it is."""


class FiniteGuard:
    """Watches the input of a `TokenAssembly`; keeps one verdict a step on the device until `report` reads them."""

    def __init__(
        self, assembly: nn.Module, world: World, window: int, locate: Callable[[int], str], remembered: int = 0
    ) -> None:
        """`window`: steps between reports at the most; `locate` names the file and row of a `RequestBatch.row`.

        `remembered`: how many of the newest reported batches `skipped` tells of.
        """
        self.world, self.locate = world, locate
        self.finite = torch.ones((), device=world.device)  # of this step: 1 where all gradients of all ranks are finite
        self.culprit = torch.zeros((), device=world.device)  # 1 where this rank's were not
        self.zero = torch.zeros((), device=world.device)  # made once: a new scalar would be a launch
        self.found_inf = torch.zeros((), device=world.device)  # verdict of the last batch, 1 = skipped
        self.skipped: deque[bool] = deque(maxlen=remembered)
        self._verdicts: deque[tuple[int, Tensor, Tensor, Tensor]] = deque(maxlen=window)
        assembly.register_forward_pre_hook(self._gate)

    def _gate(self, module: nn.Module, args: tuple[dict[str, JaggedTensor], RequestBatch]) -> tuple[object, ...]:
        embedded, batch = args
        if not torch.is_grad_enabled():
            return args
        names = [name for name, _ in embedded.items()]
        values = _Gate.apply(self, *[embedded[name].values() for name in names])
        gated = {
            name: JaggedTensor(values=value, lengths=embedded[name].lengths())
            for name, value in zip(names, values, strict=True)
        }
        return gated, batch

    def judge(self, gradients: list[Tensor]) -> None:
        """Called by the gate in the backward: is every gradient of the looked-up rows finite, on every rank?"""
        norm = torch.nn.utils.get_total_norm(gradients)
        self.culprit = 1 - torch.isfinite(norm).float()
        self.finite = 1 - self.culprit
        if self.world.size > 1:
            dist.all_reduce(self.finite, op=dist.ReduceOp.MIN, group=self.world.guard_group)

    def conclude(self, step: int, rows: Tensor, found_inf: Tensor) -> None:
        """Keep the verdict of a batch (float, 1 = skip)."""
        self.found_inf = found_inf.clone()  # it may belong to a graph, which overwrites it
        # A view would keep the whole batch, see `RequestBatch.packed`.
        self._verdicts.append((step, self.found_inf, self.culprit, rows.clone()))

    def report(self) -> list[str]:
        """One line for each bad step since the last report, the same on all ranks. Syncs with the host."""
        verdicts = list(self._verdicts)
        lines: list[str] = []
        self._verdicts.clear()
        if not verdicts:
            return lines
        bad = torch.stack([found for _, found, _, _ in verdicts]).tolist()
        self.skipped.extend(found > 0 for found in bad)
        for (step, _, guilty, rows), found in zip(verdicts, bad, strict=True):
            if not found:
                continue
            mine = None
            if guilty.item():
                span = f"{self.locate(int(rows[0]))} to {self.locate(int(rows[-1]))}" if rows.numel() else "no rows"
                mine = f"rank {self.world.rank}, {span}"
            culprits: list[str | None] = [None] * self.world.size
            dist.all_gather_object(culprits, mine, group=self.world.host_group)
            where = "; ".join(culprit for culprit in culprits if culprit) or "in the dense gradients only"
            lines.append(f"step {step}: non-finite loss or gradient ({where})")
        return lines


def verdict(finite: Tensor, dense_norm: Tensor) -> Tensor:
    """`found_inf` (float, 1 = skip) from a guard's `finite`. DDP has made `dense_norm` the same on all ranks."""
    return 1 - finite * torch.isfinite(dense_norm).to(finite.dtype)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, guard: FiniteGuard, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.guard = guard
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # All small ones are copied into one tensor: two launches in place of two for each.
        small = [each.numel() < SMALL and each.dtype is torch.float32 for each in gradients]
        packed = [each.flatten() for each, is_small in zip(gradients, small, strict=True) if is_small]
        large = [each for each, is_small in zip(gradients, small, strict=True) if not is_small]
        together = [torch.cat(packed)] if packed else []
        ctx.guard.judge([*together, *large])
        finite = ctx.guard.finite
        together = [torch.where(finite.bool(), each, ctx.guard.zero) for each in together]
        passed = [_zeros_unless(finite, each) for each in large]
        parts = iter(together[0].split([len(each) for each in packed]) if packed else ())
        rest = iter(passed)
        chosen = (next(parts if is_small else rest) for is_small in small)
        return None, *(part.view(each.shape) for part, each in zip(chosen, gradients, strict=True))


def _zeros_unless(finite: Tensor, gradient: Tensor) -> Tensor:
    """The gradient, or zeros in its place: a step that is not finite uses nothing of what the backward has made."""
    if gradient.is_contiguous() or has_rows(gradient):
        return zero_unless_(gradient, finite)
    return torch.where(finite.bool(), gradient, finite.new_zeros((), dtype=gradient.dtype))
