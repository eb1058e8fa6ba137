"""The finite guard: a batch with a non-finite loss or gradient changes no weight, and no step waits for the host.

The tables' optimiser runs inside the backward, so a check before `optimizer.step()` comes too late for them. The guard
works on the looked-up rows: it gets all their gradients at once, before the fused update does, and passes on zeros if
any of them, on any rank, is not finite. Row-wise Adagrad and SGD then leave the tables as they were; Adam's moments
decay by one step. The dense optimiser skips the batch by the same verdict.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from kernels.tokens import concat_finite, has_rows, zero_unless_
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
        self.found_inf = torch.zeros((), device=world.device)  # verdict of the last batch, 1 = skipped
        self.skipped: deque[bool] = deque(maxlen=remembered)
        self._verdicts: deque[tuple[int, Tensor, Tensor, Tensor]] = deque(maxlen=window)
        assembly.register_forward_pre_hook(self._gate)

    def _gate(self, module: nn.Module, args: tuple[dict[str, JaggedTensor], RequestBatch]) -> tuple[object, ...]:
        embedded, batch = args
        if not torch.is_grad_enabled():
            return args
        names = [name for name, _ in embedded.items()]
        rows = [embedded[name].values() for name in names]
        wholes = _wholes(rows)
        sliced = [index for _, members in wholes for index in members]
        single = [index for index in range(len(rows)) if index not in set(sliced)]
        sizes = [[len(rows[index]) for index in members] for _, members in wholes]
        values = _Gate.apply(self, sizes, *[whole for whole, _ in wholes], *[rows[index] for index in single])
        gated = dict(zip([*sliced, *single], values, strict=True))
        return {
            name: JaggedTensor(values=gated[index], lengths=embedded[name].lengths())
            for index, name in enumerate(names)
        }, batch

    def judge(self, gradients: list[Tensor], finite: list[Tensor]) -> None:
        """Called by the gate in the backward: is every gradient of the looked-up rows finite, on every rank?

        Of those that have been looked at, `finite` says so (1, or 0).
        """
        verdicts = list(finite)
        if gradients:
            verdicts.append(torch.isfinite(torch.nn.utils.get_total_norm(gradients)).float())
        self.culprit = 1 - (verdicts[0] if len(verdicts) == 1 else torch.stack(verdicts).amin())
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
    """`found_inf` (float, 1 = skip) from a guard's `finite`. `dense_norm` is that of means, the same on all ranks."""
    return 1 - finite * torch.isfinite(dense_norm).to(finite.dtype)


class _Gate(torch.autograd.Function):
    """Passes on rows: some whole tensors cut to slices, then single ones. Their gradients it looks at together."""

    @staticmethod
    def forward(ctx: Any, guard: FiniteGuard, sizes: list[list[int]], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.guard, ctx.sizes = guard, sizes
        cut = zip(values, sizes, strict=False)
        slices = [part for whole, lengths in cut for part in whole.split(lengths)]
        return *slices, *(value.view_as(value) for value in values[len(sizes) :])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | list[list[int]] | None, ...]:
        guard, left = ctx.guard, list(gradients)
        # What would be a concatenation, a norm and a choice is one pass.
        wholes = [concat_finite([left.pop(0) for _ in lengths]) for lengths in ctx.sizes]
        # All small ones are copied into one tensor: two launches in place of two for each.
        small = [each.numel() < SMALL and each.dtype is torch.float32 for each in left]
        packed = [each.flatten() for each, is_small in zip(left, small, strict=True) if is_small]
        large = [each for each, is_small in zip(left, small, strict=True) if not is_small]
        together = [torch.cat(packed)] if packed else []
        guard.judge([*together, *large], [finite for _, finite in wholes])
        passed = [_zeros_unless(guard.finite, each) for each in [*together, *large]]
        parts = iter(passed.pop(0).split([len(each) for each in packed]) if packed else ())
        rest = iter(passed)
        chosen = (next(parts if is_small else rest) for is_small in small)
        single = [part.view(each.shape) for part, each in zip(chosen, left, strict=True)]
        return None, None, *(zero_unless_(whole, guard.finite) for whole, _ in wholes), *single


def _zeros_unless(finite: Tensor, gradient: Tensor) -> Tensor:
    """The gradient, or zeros in its place: a step that is not finite uses nothing of what the backward has made."""
    if gradient.is_contiguous() or has_rows(gradient):
        return zero_unless_(gradient, finite)
    return torch.where(finite.bool(), gradient, finite.new_zeros((), dtype=gradient.dtype))


def _wholes(rows: Sequence[Tensor]) -> list[tuple[Tensor, list[int]]]:
    """Tensors [N, D] that some of the rows cover, slice after slice, and which ones, in the order of the slices.

    A lookup is cut to features by `split`, whose backward would concatenate all gradients in a pass of its own.
    """
    found: dict[int, tuple[Tensor, list[int]]] = {}
    for index, each in enumerate(rows):
        base = each._base
        if base is not None and base.dim() == 2 and base.is_contiguous() and base.requires_grad:
            found.setdefault(id(base), (base, []))[1].append(index)
    wholes = []
    for base, members in found.values():
        members.sort(key=lambda index: (rows[index].storage_offset(), rows[index].numel()))
        slices = [rows[index] for index in members]
        lengths = [len(part) for part in slices]
        begins = itertools.accumulate(lengths, initial=0)
        whole = sum(lengths) == len(base) and all(
            part.shape[1:] == base.shape[1:]
            and part.is_contiguous()
            and part.storage_offset() == base.storage_offset() + begin * base.shape[1]
            for part, begin in zip(slices, begins, strict=False)
        )
        if whole:
            wholes.append((base, members))
    return wholes
