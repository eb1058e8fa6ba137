"""Where the parts of a dense parameter lie, and what that means for norms and checkpoints.

Optimiser, clipping and averages work on the parts that a rank holds, as plain tensors: their arithmetic is elementwise,
except for the norm. Checkpoints get the parts described as DTensors of the whole parameter, which any other layout can
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from modules.layers.moe import Experts


@dataclass(frozen=True)
class Layout:
    """A parameter of `shape` whose parts lie on `mesh` by `placements`, one for each of its axes."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size

    @property
    def copies(self) -> int:
        """Ranks that hold the same part."""
        axes = enumerate(self.placements)
        return torch.Size([self.mesh.size(axis) for axis, placement in axes if placement.is_replicate()]).numel()

    def describe(self, part: Tensor) -> Tensor:
        """This rank's part as a DTensor of the whole parameter, in the same memory."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=stride)


def part_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, in the same memory: of one that is not sharded, itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def layouts(model: nn.Module) -> dict[str, Layout]:
    """Layouts of the parameters below `model` that are sharded, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            found[name] = Layout(parameter.device_mesh, tuple(parameter.placements), parameter.shape)
    for prefix, module in model.named_modules():
        if isinstance(module, Experts) and module.mesh is not None:
            for name, parameter in module.named_parameters():
                found[f"{prefix}.{name}"] = _of_experts(parameter, module.mesh)
    return found


def _of_experts(parameter: Tensor, mesh: DeviceMesh) -> Layout:
    """Experts are dim 0 along the last axis of [replicate, shard, expert]; FSDP knows only the axes before it."""
    inner: list[Placement] = [Replicate(), Replicate()]
    if isinstance(parameter, DTensor):
        inner[2 - len(parameter.placements) :] = parameter.placements
    shape = torch.Size([parameter.shape[0] * mesh.size(2), *parameter.shape[1:]])
    return Layout(mesh, (*inner, Shard(0)), shape)


def described(state: Mapping[str, Any], where: Mapping[str, Layout]) -> dict[str, Any]:
    """The same tensors by name, parts of sharded parameters as DTensors of the whole."""
    return {name: where[name].describe(part_of(value)) if name in where else value for name, value in state.items()}


class TotalNorm:
    """The norm of all gradients together, the same on every rank."""

    def __init__(self, where: Mapping[str, Layout], device: torch.device) -> None:
        self._where = where
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._device = device
        self._copies: dict[tuple[str, ...], Tensor] = {}

    def __call__(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Of this rank's parts of the gradients, by parameter name. Waits for all ranks if any is sharded."""
        if not self._where:
            return nn.utils.get_total_norm(gradients.values())
        squares = torch.zeros((), device=self._device)
        if gradients:
            norms = torch.stack(torch._foreach_norm(list(gradients.values()), 2, torch.float32))
            squares = (norms.square() / self._copies_of(tuple(gradients))).sum()
        dist.all_reduce(squares)
        return squares.sqrt()

    def _copies_of(self, names: tuple[str, ...]) -> Tensor:
        """On how many ranks each part is counted."""
        if names not in self._copies:
            copies = [self._where[name].copies if name in self._where else self._ranks for name in names]
            self._copies[names] = torch.tensor(copies, dtype=torch.float32, device=self._device)
        return self._copies[names]
