"""The units of sm_100 for a GPU in Python: tensor memory, and block-scaled products in the order of their issue."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language.nvidia import blackwell

from tests.kernels.core.simulated_gpu import Machine
from tests.kernels.core.simulated_values import Barrier, Memory


class Blackwell(Machine):
    def units(self) -> dict[Any, Any]:
        layouts = ("get_tmem_reg_layout", "TensorMemoryLayout", "TensorMemoryScalesLayout")
        nothing = {getattr(blackwell, name): lambda *arguments, **options: None for name in layouts}
        return super().units() | nothing | {
            blackwell.allocate_tensor_memory: allocate,
            blackwell.tcgen05_copy: lambda source, target: self.issue(lambda: target.store(source.read())),
            blackwell.tcgen05_commit: self.commit,
            blackwell.tcgen05_mma_scaled: self.multiply_scaled,
        }  # fmt: skip

    def issue(self, product: Any) -> None:
        self.now().products.append(product)

    def commit(self, barrier: Barrier) -> None:
        self.issue(lambda: barrier.update(1, 0))

    def multiply_scaled(
        self, a: Memory, b: Memory, sums: Memory, a_scales: Memory, b_scales: Memory, *types: str, use_acc: Any
    ) -> None:
        def product() -> None:
            value = _values(a.read(), a_scales.read()) @ _values(b.read().t(), b_scales.read()).t()
            sums.store(sums.read() + value if use_acc else value)

        self.issue(product)


def allocate(dtype: torch.dtype, shape: list[int], layout: object) -> Memory:
    storage = torch.full(shape, 255 if dtype is torch.uint8 else math.nan, dtype=dtype)
    return Memory(lambda: storage)


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    """float64 [lines, 128] of codes and scales [lines, 4], byte by byte as block-scaled instructions read them."""
    exponents = scales.double() - 127
    factors = torch.where(scales == 255, math.nan, torch.exp2(exponents))
    return codes.float().double() * factors.repeat_interleave(32, 1)
