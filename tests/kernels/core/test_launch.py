"""Launches by key: what they promise, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton import knobs

from kernels.core.launch import Launcher, aligned


class _Compiled:
    """Stands for what a kernel compiled to."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        self.launches = launches

    def run(self, *arguments: Any) -> None:
        self.launches.append(("at once", *arguments))

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.launches.append(("with hooks", grid, arguments))


class _Kernel(_Compiled):
    """Stands for a kernel of Triton, which compiles at a launch."""

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        def launch(*arguments: Any, **options: Any) -> _Compiled:
            self.launches.append(("compiled", grid, arguments, options))
            return _Compiled(self.launches)

        return launch


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", {3: 77}.get, raising=False)


def test_a_kernel_compiles_once_for_each_key() -> None:
    launches: list[tuple[Any, ...]] = []
    launch = Launcher(_Kernel(launches), num_warps=4)
    for key, argument in (("a", 1), ("a", 2), ("b", 3), ("a", 4)):
        launch((argument, 1, 1), key, argument)
    options = {"num_warps": 4}
    known = (77, "function", "metadata", None, None, None)
    assert launches == [
        ("compiled", (1, 1, 1), (1,), options),
        ("at once", 2, 1, 1, *known, 2),
        ("compiled", (3, 1, 1), (3,), options),
        ("at once", 4, 1, 1, *known, 4),
    ]


def test_what_was_loaded_on_another_device_is_not_launched_on_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []
    launch = Launcher(_Kernel(launches))
    launch((1, 1, 1), "tensors on 4")  # while 3 is current
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 4)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", {4: 88}.get)
    launch((1, 1, 1), "tensors on 4")
    launch((1, 1, 1), "tensors on 4")
    assert [entry[0] for entry in launches] == ["compiled", "compiled", "at once"]
    assert launches[2][4] == 88


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_a_profiler_see_launches(name: str) -> None:
    launches: list[tuple[Any, ...]] = []
    launch = Launcher(_Kernel(launches))
    launch((1, 1, 1), "a")
    hook = getattr(knobs.runtime, name)
    hook.add(print)
    try:
        launch((2, 1, 1), "a", 5)
    finally:
        hook.remove(print)
    launch((3, 1, 1), "a")
    assert [entry[0] for entry in launches] == ["compiled", "with hooks", "at once"]
    assert launches[1] == ("with hooks", (2, 1, 1), (5,))


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize(("hook", "way"), [(None, "at once"), (print, "with hooks")])
def test_a_hook_may_be_put_in_place_of_the_chain(
    monkeypatch: pytest.MonkeyPatch, name: str, hook: Any, way: str
) -> None:
    launches: list[tuple[Any, ...]] = []
    launch = Launcher(_Kernel(launches))
    monkeypatch.setattr(knobs.runtime, name, hook)
    for _ in range(2):
        launch((1, 1, 1), "a")
    assert [entry[0] for entry in launches] == ["compiled", way]


def test_alignment_of_views() -> None:
    x = torch.zeros(64, dtype=torch.int64)
    start = x.data_ptr() // 8 % 2
    assert aligned(x[start:], x[start + 1 :], x[start + 2 :]) == (True, False, True)
