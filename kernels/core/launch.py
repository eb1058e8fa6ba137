"""Launching a kernel again without Triton's look at all of its arguments."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_thread = threading.local()
_last: Launcher | None = None


class Launcher:
    """Launches a `@triton.jit` or `@gluon.jit` kernel, and keeps the compiled kernel under a key.

    At each launch Triton looks for the compiled kernel by the types and values of all arguments, descriptors and their
    layouts included, and compares every global that the kernel reads. Here the caller says in `key` what the
    compilation depends on: the device, constant arguments, dtypes, the integers that are specialised on (those that
    change with the batch must be `do_not_specialize`), and `aligned` of tensors that are not fresh from the allocator.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        from triton import knobs  # imported here: `processors` needs no Triton

        self.kernel = kernel
        self._options = options
        self._runtime = knobs.runtime
        self._compiled: dict[Hashable, tuple[int, Any]] = {}  # with the device that it was loaded on

    def __call__(self, grid: tuple[int, int, int], key: Hashable, *arguments: Any, **options: Any) -> None:
        """Launch with all arguments of the kernel in their order, on the current device and stream.

        `options` of this launch, such as num_warps, must be implied by the key, too.
        """
        global _last
        _last = self
        if not hasattr(_thread, "bound"):
            _bind()
        device, compiled = self._compiled.get(key, (None, None))
        # The key names the device of the tensors, which need not be the current one.
        if compiled is None or device != torch._C._cuda_getDevice():
            compiled = self.kernel[grid](*arguments, **self._options, **options)
            if compiled is not None:  # None in Triton's interpreter
                self._compiled[key] = torch._C._cuda_getDevice(), compiled
            return
        enter, leave = self._runtime.launch_enter_hook, self._runtime.launch_exit_hook
        # Each is a chain of hooks, unless someone has replaced it by a function or None.
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            compiled[grid](*arguments)
        else:
            stream = torch._C._cuda_getCurrentRawStream(device)
            # No metadata of the launch, and no hooks: empty chains would be called, too.
            nothing = (None, None, None)
            compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, *nothing, *arguments)


def launched_last() -> str:
    """The kernel that a `Launcher` of this process launched last, for reports of a hang; of all threads and devices."""
    return "no kernel" if _last is None else _last.kernel.__name__


def _bind() -> None:
    """Bind the CUDA context to this thread, as any PyTorch operator on a GPU does.

    Descriptors cannot be made without one, and a launch may be the first work of a thread, such as autograd's.
    """
    if torch.cuda.is_initialized():
        torch.zeros((), device="cuda")
        _thread.bound = True


def aligned(*tensors: Tensor) -> tuple[bool, ...]:
    """Whether each tensor starts at a multiple of 16 bytes: kernels are compiled for either case."""
    return tuple([tensor.data_ptr() % 16 == 0 for tensor in tensors])


def kinds(numbers: tuple[int, ...]) -> tuple[tuple[bool, ...], ...]:
    """What compilation depends on of integers, for keys: strides that differ in every batch are of few kinds."""
    return tuple([(number == 1, number % 16 == 0, number < 2**31) for number in numbers])


@cache
def processors(device: torch.device) -> int:
    """How many multiprocessors a CUDA device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count
