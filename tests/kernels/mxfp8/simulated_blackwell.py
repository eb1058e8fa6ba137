"""A machine in Python for the block-scaled kernel: the kernel's own functions run, with sm_100's units in their place.

What the kernel starts and does not wait for (loads, products, arrivals, stores) is done late or early, as a random
number decides, but products and their arrivals in their order. Between waits warps run undisturbed; which one goes on
is random, too. So a barrier that is missing, or waited for in the wrong phase, shows in results, or as a deadlock.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from kernels.mxfp8.blackwell import grouped
from kernels.mxfp8.hopper.grouped import order
from tests.kernels.mxfp8.test_grouped_tiles import Pointer

PROCESSORS = 3
SHARED_BYTES = 227 * 1024


class Barrier:
    """An mbarrier: a phase ends when all have arrived and the bytes that they expect are there."""

    def __init__(self) -> None:
        self.phases = 0

    def init(self, count: int) -> None:
        self.count = self.left = count
        self.bytes = 0

    def update(self, arrivals: int, expected_bytes: int) -> None:
        self.left -= arrivals
        self.bytes += expected_bytes
        assert self.left >= 0, "more arrivals than the barrier counts"
        if self.left == 0 and self.bytes == 0:
            self.phases, self.left = self.phases + 1, self.count

    def passed(self, parity: int) -> bool:
        return self.phases & 1 != parity


class Barriers(list):
    index = list.__getitem__


class Memory:
    """A view of shared or of tensor memory, which is read when it is used and not when it is made."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self.read = read

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.read().shape)

    def index(self, i: int) -> Memory:
        assert 0 <= i < self.shape[0]
        return Memory(lambda: self.read()[i])

    def slice(self, start: int, length: int) -> Memory:
        return Memory(lambda: self.read()[:, start : start + length])

    def permute(self, dims: tuple[int, ...]) -> Memory:
        return Memory(lambda: self.read().permute(dims))

    def reshape(self, shape: tuple[int, ...]) -> Memory:
        return Memory(lambda: self.read().reshape(shape))

    def load(self, layout: None) -> Tensor:
        return self.read().clone()

    def store(self, value: Tensor) -> None:
        self.read().copy_(value)


class Warps(threading.Thread):
    """A partition of the kernel, which stops at each wait until the machine lets it go on."""

    def __init__(self, machine: Machine, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        super().__init__(daemon=True)
        self.machine, self.function, self.arguments = machine, function, arguments
        self.go, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.ended, self.error = False, None
        self.stores: list[Callable[[], None]] = []

    def run(self) -> None:
        self.go.acquire()
        try:
            if not self.ended:
                self.function(*self.arguments)
        except BaseException as error:
            self.error = error
        self.ended = True
        self.stopped.release()

    def until(self, ready: Callable[[], bool]) -> None:
        self.ready = ready
        self.stopped.release()
        self.go.acquire()
        if self.ended:  # the machine has failed
            raise SystemExit

    def resume(self) -> None:
        self.go.release()
        self.stopped.acquire()
        if self.error is not None:
            raise self.error


class Machine:
    """One program of the kernel."""

    def __init__(self, program: int, seed: int) -> None:
        self.program, self.random = program, random.Random(seed)
        self.loads: list[Callable[[], None]] = []
        self.products: list[Callable[[], None]] = []
        self.shared_bytes = 0

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: object) -> Any:
        if dtype is torch.int64:
            return Barriers(Barrier() for _ in range(shape[0]))
        self.shared_bytes += math.prod(shape) * dtype.itemsize
        assert self.shared_bytes <= SHARED_BYTES
        # Scales, codes and numbers that were never written are NaNs.
        storage = torch.full((math.prod(shape) * dtype.itemsize,), 255, dtype=torch.uint8).view(dtype).view(shape)
        return Memory(lambda: storage)

    def allocate_tensor_memory(self, dtype: torch.dtype, shape: list[int], layout: object) -> Memory:
        storage = torch.full(shape, 255 if dtype is torch.uint8 else math.nan, dtype=dtype)
        return Memory(lambda: storage)

    def specialize(self, partitions: list[tuple], warps: list[int], registers: list[int]) -> None:
        partitions = [Warps(self, *partition) for partition in partitions]
        for partition in partitions:
            partition.start()
        try:
            while not all(partition.ended for partition in partitions):
                self.step(partitions)
            while self.loads or self.products or any(partition.stores for partition in partitions):
                self.step(partitions)
        finally:
            for partition in partitions:
                partition.ended = True
                partition.go.release()
                partition.join()

    def step(self, partitions: list[Warps]) -> None:
        choices = [partition.resume for partition in partitions if not partition.ended and partition.ready()]
        if self.loads:
            choices.append(lambda: self.loads.pop(self.random.randrange(len(self.loads)))())
        in_order = (self.products, *(partition.stores for partition in partitions))
        choices += [lambda queue=queue: queue.pop(0)() for queue in in_order if queue]
        assert choices, "deadlock: all warps wait, and nothing is under way"
        self.random.choice(choices)()

    def expect(self, barrier: Barrier, number: int) -> None:
        barrier.update(1, number)

    def wait(self, barrier: Barrier, parity: int) -> None:
        threading.current_thread().until(lambda: barrier.passed(parity))

    def load(self, descriptor: Any, at: list[int], barrier: Barrier, memory: Memory) -> None:
        def arrive() -> None:
            memory.store(torch.zeros_like(memory.read()))
            target, source = _box(descriptor, at)
            memory.read()[target] = descriptor.base[source]
            barrier.update(0, -descriptor.block_type.nbytes)

        self.loads.append(arrive)

    def store(self, descriptor: Any, at: list[int], memory: Memory) -> None:
        def write() -> None:
            source, target = _box(descriptor, at)
            descriptor.base[target] = memory.read()[source]

        threading.current_thread().stores.append(write)

    def store_wait(self, left: int) -> None:
        stores = threading.current_thread().stores
        threading.current_thread().until(lambda: len(stores) <= left)

    def multiply(self, a: Memory, b: Memory, sums: Memory, a_scales: Memory, b_scales: Memory, *types: str,
                 use_acc: bool) -> None:  # fmt: skip
        def product() -> None:
            value = _values(a.read(), a_scales.read()) @ _values(b.read().t(), b_scales.read()).t()
            sums.store(sums.read() + value if use_acc else value)

        self.products.append(product)

    def run(self, arguments: tuple[Any, ...]) -> None:
        language = SimpleNamespace(
            **{name: getattr(torch, name) for name in ("int32", "int64", "uint8")},
            float32=torch.float64,
            cdiv=lambda a, b: -(-a // b),
            minimum=min,
            maximum=max,
            where=lambda condition, a, b: a if condition else (torch.full_like(a, b) if torch.is_tensor(a) else b),
            load=Pointer.load,
            to_tensor=int,
            static_range=range,
            program_id=lambda axis: self.program,
            num_programs=lambda axis: PROCESSORS,
            allocate_shared_memory=self.allocate,
            warp_specialize=self.specialize,
        )
        units = {
            "gl": language,
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: None,
                init=Barrier.init,
                arrive=lambda barrier, count: barrier.update(count, 0),
                expect=self.expect,
                wait=self.wait,
            ),
            "tma": SimpleNamespace(
                async_copy_global_to_shared=self.load,
                async_copy_shared_to_global=self.store,
                store_wait=self.store_wait,
            ),
            "allocate_tensor_memory": self.allocate_tensor_memory,
            "tcgen05_copy": lambda source, target: self.products.append(lambda: target.store(source.read())),
            "tcgen05_commit": lambda barrier: self.products.append(lambda: barrier.update(1, 0)),
            "tcgen05_mma_scaled": self.multiply,
        }
        nothing = ("barrier", "fence_async_shared", "get_tmem_reg_layout", "TensorMemoryLayout")
        units |= dict.fromkeys((*nothing, "TensorMemoryScalesLayout"), lambda *arguments, **options: None)
        plain_functions(grouped, order, **units)["_grouped_block_scaled_kernel"](*arguments)


def plain_functions(*modules: Any, **names: Any) -> dict[str, Any]:
    """The device functions of the modules as Python functions, which find `names` and the modules' constants."""
    for module in modules:
        for name, value in vars(module).items():
            if name in names:
                continue
            if isinstance(value, gl.constexpr):
                names[name] = value.value
            elif isinstance(getattr(value, "fn", None), FunctionType):
                names[name] = FunctionType(value.fn.__code__, names, name)
    return names


def _box(descriptor: Any, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The part of a block that is inside of the tensor, in the block and in the tensor."""
    inside, outside = [], []
    for first, width, size in zip(at, descriptor.block_shape, descriptor.shape, strict=True):
        assert first >= 0
        length = max(min(width, size - first), 0)
        inside.append(slice(0, length))
        outside.append(slice(first, first + length))
    return tuple(inside), tuple(outside)


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    """float64 [lines, 128] of codes and scales [lines, 4], byte by byte as block-scaled instructions read them."""
    exponents = scales.double() - 127
    factors = torch.where(scales == 255, math.nan, torch.exp2(exponents))
    return codes.float().double() * factors.repeat_interleave(32, 1)


def launch(grid: tuple[int, int, int], key: object, *arguments: Any, seed: int = 0) -> None:
    """In the place of the kernel's launcher: all programs, one after another."""
    descriptors, ends, sizes = arguments[:5], arguments[5], arguments[6:]
    for descriptor in descriptors:
        assert all(stride * descriptor.base.element_size() % 16 == 0 for stride in descriptor.strides[:-1])
        assert all(width <= 256 for width in descriptor.block_shape)
    for program in range(grid[0]):
        stand_ins = [
            SimpleNamespace(
                base=descriptor.base,
                shape=descriptor.shape,
                block_shape=descriptor.block_shape,
                dtype=descriptor.base.dtype,
                layout=descriptor.layout,
                block_type=SimpleNamespace(
                    shape=descriptor.block_shape,
                    nbytes=math.prod(descriptor.block_shape) * descriptor.base.element_size(),
                ),
            )
            for descriptor in descriptors
        ]
        Machine(program, seed + program).run((*stand_ins, Pointer(ends.tolist()), *sizes))
