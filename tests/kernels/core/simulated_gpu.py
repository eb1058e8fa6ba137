"""A GPU in Python: a Gluon kernel's own functions run, with threads for warps and stand-ins for the units of the chip.

All programs of a launch run at once. What a warp starts and does not wait for (loads, products, stores by TMA) is done
late or early, as a random number decides, and which warp goes on is random, too; some are slow. So a wait that is
missing, or is for the wrong phase, shows in results, or as a deadlock, which names the line where each warp stands.
Products and sums are of float64. What is not simulated: layouts, fences, the order in which writes to memory are seen.
"""

from __future__ import annotations

import inspect
import math
import random
import re
import sys
import textwrap
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from kernels.core.hopper import barrier
from tests.kernels.core.simulated_values import (
    Barrier,
    Barriers,
    Int,
    Memory,
    Pointer,
    Registers,
    extreme,
    held,
    numbers,
    registers,
    sum_of,
    where,
)

SPEEDS = (1.0, 1.0, 0.02)
# What inline assembly does with its first operand, by its first instruction; none of these: nothing.
INSTRUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "rcp": torch.reciprocal,
    "lg2": torch.log2,
}


class Warps(threading.Thread):
    """A program, or a partition of one, which stops at each wait until the machine lets it go on."""

    def __init__(self, machine: Machine, program: int, function: Callable[..., None], arguments: tuple) -> None:
        super().__init__(daemon=True)
        self.machine, self.program, self.function, self.arguments = machine, program, function, arguments
        self.speed, *self.speeds = machine.random.choices(SPEEDS, k=3)  # its own, of products, and of stores
        self.go, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.ended, self.error = False, None
        self.products: list[Callable[[], None]] = []
        self.stores: list[Callable[[], None]] = []
        self.actions, self.polled = 0, None  # how many there were, and what the last reading of a number saw

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

    def where(self) -> str:
        """The innermost line of a kernel that it stands at."""
        frame = sys._current_frames().get(self.ident)
        while frame and "/kernels/" not in frame.f_code.co_filename.replace("/tests/kernels/", ""):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename.rpartition('/kernels/')[2]}:{frame.f_lineno}" if frame else "?"
        return f"program {self.program}, {self.function.__name__}: {place}"


class Machine:
    """Runs one launch. `stand_ins` take the place of device functions whose layouts or assembly do not run here."""

    def __init__(self, seed: int, stand_ins: Mapping[Any, Any]) -> None:
        self.random = random.Random(seed)
        self.warps: list[Warps] = []
        self.loads: list[Callable[[], None]] = []
        self.speed = self.random.choice(SPEEDS)  # of loads
        self.turns: dict[tuple[int, str], Barrier] = defaultdict(Barrier)
        self.plain = Plain({**self.units(), **stand_ins})

    def run(self, kernel: JITFunction, programs: int, arguments: tuple[Any, ...]) -> None:
        self.programs = programs
        function = self.plain(kernel)
        arguments = tuple(_argument(each) for each in arguments)
        for program in range(programs):
            self.start(program, function, arguments)
        try:
            while self.step():
                pass
        finally:
            for warps in self.warps:
                warps.ended = True
                warps.go.release()
                warps.join()

    def start(self, program: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> Warps:
        self.warps.append(Warps(self, program, function, arguments))
        self.warps[-1].start()
        return self.warps[-1]

    def step(self) -> bool:
        """Let one of the warps go on, or one thing that is under way be done; False if there is none."""
        choices = [(warps.speed, warps.resume) for warps in self.warps if not warps.ended and warps.ready()]
        if self.loads:
            choices.append((self.speed, lambda: self.loads.pop(self.random.randrange(len(self.loads)))()))
        for warps in self.warps:
            in_order = zip(warps.speeds, (warps.products, warps.stores), strict=True)
            choices += [(speed, lambda queue=queue: queue.pop(0)()) for speed, queue in in_order if queue]
        waiting = [warps for warps in self.warps if not warps.ended]
        if not choices:
            assert not waiting, "deadlock: " + "; ".join(warps.where() for warps in waiting)
            return False
        self.random.choices([action for _, action in choices], [weight for weight, _ in choices])[0]()
        return True

    def now(self) -> Warps:
        """The warps that run, to which others may be preferred here."""
        warps = threading.current_thread()
        assert isinstance(warps, Warps)
        warps.actions += 1
        if self.random.random() < 0.1:
            warps.until(lambda: True)
        return warps

    def specialize(self, partitions: list[tuple], warps: list[int], registers: list[int]) -> None:
        program = self.now()
        started = [self.start(program.program, *partition) for partition in partitions]
        program.until(lambda: all(each.ended for each in started))

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: object) -> Any:
        if dtype is torch.int64:
            return Barrier() if len(shape) == 1 else Barriers(Barrier() for _ in range(shape[0]))
        # Scales, codes and numbers that were never written are NaNs.
        storage = torch.full((math.prod(shape) * dtype.itemsize,), 255, dtype=torch.uint8).view(dtype).view(shape)
        return Memory(lambda: storage)

    def arrive(self, barrier: Barrier, count: int = 1, pred: Any = True) -> None:
        self.now()
        if pred:
            barrier.update(count, 0)

    def expect(self, barrier: Barrier, number: int, pred: Any = True) -> None:
        if pred:
            barrier.update(1, number)

    def wait(self, barrier: Barrier, parity: int, pred: Any = True) -> None:
        if pred:
            self.now().until(lambda: barrier.phases & 1 != parity)

    def bring(self, descriptor: Any, at: list[int], barrier: Barrier, memory: Memory, pred: Any = True) -> None:
        def arrive() -> None:
            target, source = _box(descriptor, at)
            box = memory.read()
            box.zero_()
            box[target] = descriptor.base[source].to(box.dtype)
            barrier.update(0, -descriptor.block_type.nbytes)

        if pred:
            self.now()
            self.loads.append(arrive)

    def take(self, descriptor: Any, at: list[int], memory: Memory) -> None:
        def write() -> None:
            source, target = _box(descriptor, at)
            descriptor.base[target] = memory.read()[source].to(descriptor.base.dtype)

        self.now().stores.append(write)

    def store_wait(self, left: int) -> None:
        warps = self.now()
        warps.until(lambda: len(warps.stores) <= left)

    def multiply(self, a: Any, b: Memory, sums: Tensor, use_acc: Any = True, is_async: bool = False) -> Registers:
        result = registers(torch.full((a.shape[0], b.shape[1]), math.nan, dtype=torch.float64))

        def product() -> None:
            left = a.read() if isinstance(a, Memory) else a
            value = left.as_subclass(Tensor).double() @ b.read().double()
            result.copy_(value + sums if use_acc else value)

        warps = self.now()
        warps.products.append(product)
        if not is_async:
            self.products_wait(0)
        return result

    def products_wait(self, left: int, deps: tuple[Any, ...] = ()) -> Any:
        warps = self.now()
        warps.until(lambda: len(warps.products) <= left)
        return deps[0] if len(deps) == 1 else deps

    def load(self, pointer: Pointer, *arguments: Any, **options: Any) -> Any:
        self.now()
        return pointer.load(*arguments, **options)

    def store(self, pointer: Pointer, *arguments: Any, **options: Any) -> None:
        self.now()
        pointer.store(*arguments, **options)

    def atomic_add(self, pointer: Pointer, value: Any, *arguments: Any, **options: Any) -> Any:
        """Whoever reads the same number twice in a row waits until it has changed, so that a deadlock is seen."""
        warps = self.now()
        if not torch.is_tensor(pointer.at) and not torch.is_tensor(value) and value == 0:
            seen = (warps.actions - 1, pointer.at, pointer.load())
            if warps.polled == seen:
                warps.until(lambda: pointer.load() != seen[2])
            warps.polled = (warps.actions, pointer.at, pointer.load())
            return pointer.load()
        return pointer.add(value)

    def assembly(self, text: str, constraints: str, arguments: list[Any], *types: Any, **options: Any) -> Any:
        """Instructions of one operand, and barriers of two warpgroups by their number, perhaps beside powers of 2."""
        if turn := re.search(r"bar\.(sync|arrive) (\d+), 256;", text):
            warps = self.now()
            meeting = self.turns[warps.program, turn[2]]
            if not hasattr(meeting, "count"):
                meeting.init(2)
            phase = meeting.phases
            meeting.update(1, 0)
            if turn[1] == "sync":
                warps.until(lambda: meeting.phases > phase)
            return torch.exp2(arguments[0]) if "ex2" in text else arguments[0]
        if instruction := re.match(r"(\w+)\.approx[.\w]* \$0, \$1;$", text):
            return INSTRUCTIONS[instruction[1]](arguments[0])
        assert re.search(r"mov\.b32 \$0, (\$1|0);", text), f"needs a stand-in: {text}"
        return arguments[0] if "$0, $1;" in text else 0

    def units(self) -> dict[Any, Any]:
        """What kernels call of Gluon, and what it is here."""
        layouts = ("NVMMADistributedLayout", "NVMMASharedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout",
                   "SwizzledSharedLayout", "DistributedLinearLayout")  # fmt: skip
        language = SimpleNamespace(
            **{name: getattr(torch, name) for name in ("int32", "int64", "uint8", "exp2")},
            **dict.fromkeys(layouts, _Layout()),
            float32=torch.float64, float16=torch.float64, bfloat16="no kernel is told that it computes in this type",
            cdiv=lambda a, b: Int(-(-a // b)),
            minimum=partial(extreme, torch.minimum, min), maximum=partial(extreme, torch.maximum, max), where=where,
            zeros=lambda shape, dtype, layout: registers(torch.zeros(tuple(shape), dtype=dtype)),
            full=lambda shape, value, dtype, layout: registers(torch.full(tuple(shape), value, dtype=dtype)),
            arange=lambda first, last, layout=None: registers(torch.arange(first, last)),
            join=lambda a, b: torch.stack([a, b], -1),
            expand_dims=lambda x, axis: x.unsqueeze(axis),
            convert_layout=lambda x, layout: x,
            sum=sum_of, max=lambda x, axis: x.amax(axis),
            load=self.load, store=self.store, atomic_add=self.atomic_add,
            inline_asm_elementwise=self.assembly,
            to_tensor=Int, static_range=range, static_assert=lambda holds: None,
            program_id=lambda axis: Int(threading.current_thread().program),
            num_programs=lambda axis: Int(self.programs),
            allocate_shared_memory=self.allocate, warp_specialize=self.specialize,
        )  # fmt: skip
        nothing = lambda *arguments, **options: None  # noqa: E731
        barriers = SimpleNamespace(
            MBarrierLayout=nothing, init=Barrier.init, arrive=self.arrive, expect=self.expect, wait=self.wait
        )
        copies = SimpleNamespace(
            async_copy_global_to_shared=self.bring,
            async_copy_shared_to_global=self.take,
            store_wait=self.store_wait,
        )
        return {
            gl: language, hopper.mbarrier: barriers, hopper.tma: copies, hopper.fence_async_shared: nothing,
            barrier: nothing, hopper.warpgroup_mma: self.multiply, hopper.warpgroup_mma_wait: self.products_wait,
        }  # fmt: skip


class Plain:
    """Device functions as Python functions, which find `units` in the place of what is named there; or other code."""

    def __init__(self, units: Mapping[Any, Any]) -> None:
        self.units = {id(each): (each, stand_in) for each, stand_in in units.items()}
        self.modules: dict[str, dict[str, Any]] = {}

    def __call__(self, value: Any) -> Any:
        stand_in = self.units.get(id(value), (None, None))[1]
        if stand_in is not None and not isinstance(stand_in, CodeType):
            return stand_in
        if isinstance(value, gl.constexpr):
            return value.value
        function = getattr(value, "fn", None)  # of a JITFunction, and of one that others interpret
        if isinstance(function, FunctionType):
            return FunctionType(stand_in or function.__code__, self.names(function.__module__), function.__name__,
                                function.__defaults__, function.__closure__)  # fmt: skip
        return value

    def names(self, module: str) -> dict[str, Any]:
        if module not in self.modules:
            self.modules[module] = names = {"range": numbers, "__name__": module}
            names |= {name: self(value) for name, value in vars(sys.modules[module]).items() if name[:2] != "__"}
        return self.modules[module]


class _Layout:
    def __call__(self, *arguments: Any, **options: Any) -> None:
        return None

    get_default_for = __call__


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Pointer.to_tensor(value)
    if not isinstance(value, TensorDescriptor):
        return value
    base, block = value.base.detach(), value.block_shape
    assert all(stride * base.element_size() % 16 == 0 for stride in value.strides[:-1])
    assert all(width <= 256 for width in block)
    return SimpleNamespace(
        base=base.as_strided(tuple(value.shape), tuple(value.strides)),
        shape=value.shape,
        block_shape=block,
        dtype=held(base.dtype),
        layout=value.layout,
        block_type=SimpleNamespace(shape=block, nbytes=math.prod(block) * base.element_size()),
    )


def _box(descriptor: Any, at: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """The part of a block that is inside of the tensor, in the block and in the tensor."""
    inside, outside = [], []
    for first, width, size in zip(at, descriptor.block_shape, descriptor.shape, strict=True):
        assert first >= 0
        length = max(min(width, size - first), 0)
        inside.append(slice(0, length))
        outside.append(slice(first, first + length))
    return tuple(inside), tuple(outside)


def mutated(function: JITFunction, old: str, new: str) -> CodeType:
    """A stand-in for a device function: its own code with a change."""
    source = textwrap.dedent(inspect.getsource(function.fn))
    assert old in source
    text = "from __future__ import annotations\n" + source[source.index("def ") :].replace(old, new)
    module = compile(text, function.fn.__code__.co_filename, "exec")
    return next(each for each in module.co_consts if isinstance(each, CodeType))


def launcher(
    kernel: JITFunction, stand_ins: Mapping[Any, Any], seed: int, machine: type[Machine] = Machine
) -> Callable[..., None]:
    """What may take the place of a kernel's `Launcher`."""

    def launch(grid: tuple[int, int, int], key: object, *arguments: Any) -> None:
        machine(seed, stand_ins).run(kernel, grid[0], arguments)

    return launch
