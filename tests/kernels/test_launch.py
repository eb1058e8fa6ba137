"""Launches by key: what they promise, on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from kernels.launch import Launcher, aligned


class _Kernel:
    """Stands for a kernel of Triton: compiles at a launch, and what it compiled to is launched in the same way."""

    def __init__(self, launches: list[tuple[Any, ...]], compiled: bool = False) -> None:
        self.launches, self.compiled = launches, compiled

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*arguments: Any, **options: Any) -> _Kernel:
            self.launches.append((self.compiled, grid, arguments, options))
            return _Kernel(self.launches, True)

        return launch


def test_a_kernel_compiles_once_for_each_key() -> None:
    launches: list[tuple[Any, ...]] = []
    launch = Launcher(_Kernel(launches), num_warps=4)
    for key, argument in (("a", 1), ("a", 2), ("b", 3), ("a", 4)):
        launch((argument, 1, 1), key, argument)
    options = {"num_warps": 4}
    assert launches == [
        (False, (1, 1, 1), (1,), options),
        (True, (2, 1, 1), (2,), {}),
        (False, (3, 1, 1), (3,), options),
        (True, (4, 1, 1), (4,), {}),
    ]


def test_alignment_of_views() -> None:
    x = torch.zeros(64, dtype=torch.int64)
    start = x.data_ptr() // 8 % 2
    assert aligned(x[start:], x[start + 1 :], x[start + 2 :]) == (True, False, True)
