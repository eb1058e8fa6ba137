"""What a Gluon kernel computes with, in Python: numbers of C, registers, pointers, memory. See `simulated_gpu`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

WIDE = {torch.float16, torch.bfloat16, torch.float32}  # held as float64


class Int(int):
    """A number of a kernel: its operations are those of C, and comparisons are numbers, too."""

    __hash__ = int.__hash__

    def to(self, dtype: torch.dtype) -> Int:
        return self

    def __floordiv__(self, other: int) -> Int:
        return Int(abs(int(self)) // abs(int(other)) * (1 if (self < 0) == (other < 0) else -1))

    def __mod__(self, other: int) -> Int:
        return Int(math.fmod(self, other))


def _numbers_of_c(name: str) -> Callable[[Int, Any], Any]:
    function = getattr(int, name)

    def method(self: Int, other: Any) -> Any:
        result = function(self, other)
        return result if result is NotImplemented else Int(result)

    return method


for _name in "add radd sub rsub mul rmul and rand or ror xor rxor lshift rshift eq ne lt le gt ge".split():
    setattr(Int, f"__{_name}__", _numbers_of_c(f"__{_name}__"))


class Registers(Tensor):
    """A tensor of a kernel. Its values are NaNs until the product that makes it is complete."""

    type = SimpleNamespace(layout=None)

    def split(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self[..., 0], self[..., 1]


def registers(x: Tensor) -> Registers:
    return x.as_subclass(Registers)


class Pointer:
    """Into the memory behind a tensor."""

    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    @classmethod
    def to_tensor(cls, x: Tensor) -> Pointer:
        size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return cls(x.detach().as_strided((size,), (1,)))

    dtype = property(lambda self: SimpleNamespace(element_ty=self.memory.dtype))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)

    def load(self, mask: Any = True, other: Any = 0, **options: Any) -> Any:
        if not torch.is_tensor(self.at):
            value = self.memory[self._inside(self.at)].item() if mask else other
            return Int(value) if isinstance(value, int) else value
        at, mask = torch.broadcast_tensors(self.at, torch.as_tensor(mask).bool())
        values = torch.full(at.shape, other, dtype=held(self.memory.dtype))
        values[mask] = self.memory[self._inside(at[mask])].to(values.dtype)
        return registers(values)

    def store(self, value: Any, mask: Any = True, **options: Any) -> None:
        if not torch.is_tensor(self.at):
            if mask:
                self.memory[self._inside(self.at)] = value
            return
        at, mask, value = torch.broadcast_tensors(self.at, torch.as_tensor(mask).bool(), torch.as_tensor(value))
        self.memory[self._inside(at[mask])] = value[mask].to(self.memory.dtype)

    def add(self, value: Any) -> Any:
        before = self.load()
        self.store(before + value)
        return before

    def _inside(self, at: Any) -> Any:
        assert torch.is_tensor(at) or 0 <= at < self.memory.numel(), f"element {at} of {self.memory.numel()}"
        assert not torch.is_tensor(at) or not at.numel() or at.min() >= 0
        return at.as_subclass(Tensor).long() if torch.is_tensor(at) else at


def held(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in WIDE else dtype


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


class Barriers(list):
    index = list.__getitem__


class Memory:
    """A view of shared or of tensor memory, which is read when it is used and not when it is made."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self.read = read

    shape = property(lambda self: tuple(self.read().shape))
    dtype = property(lambda self: self.read().dtype)

    def index(self, i: int) -> Memory:
        assert 0 <= i < self.shape[0]
        return Memory(lambda: self.read()[i])

    def slice(self, start: int, length: int, dim: int = 1) -> Memory:
        return Memory(lambda: self.read().narrow(dim, start, length))

    def permute(self, dims: tuple[int, ...]) -> Memory:
        return Memory(lambda: self.read().permute(dims))

    def reshape(self, shape: tuple[int, ...]) -> Memory:
        return Memory(lambda: self.read().reshape(shape))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: object) -> Memory:
        return Memory(lambda: self.read().view(-1)[: math.prod(shape)].view(shape))

    def load(self, layout: object) -> Registers:
        return registers(self.read().clone())

    def store(self, value: Tensor) -> None:
        self.read().copy_(value)


def numbers(*bounds: int) -> Iterator[Int]:
    return map(Int, range(*map(operator.index, bounds)))


def where(condition: Any, a: Any, b: Any) -> Any:
    if torch.is_tensor(condition):
        return torch.where(condition, *(torch.tensor(x).double() if isinstance(x, float) else x for x in (a, b)))
    if torch.is_tensor(a) or torch.is_tensor(b):
        a, b = (x if torch.is_tensor(x) else torch.full_like(y, x) for x, y in ((a, b), (b, a)))
        return a if condition else b
    chosen = a if condition else b
    return Int(chosen) if isinstance(chosen, int) else chosen


def extreme(of_tensors: Callable[..., Tensor], of_numbers: Callable[..., Any], a: Any, b: Any) -> Any:
    if torch.is_tensor(a) or torch.is_tensor(b):
        return of_tensors(*(torch.as_tensor(x, dtype=torch.float64) for x in (a, b)))
    chosen = of_numbers(a, b)
    return Int(chosen) if isinstance(chosen, int) else chosen


def sum_of(x: Tensor, axis: int) -> Any:
    total = x.sum(axis)
    return total if total.dim() else Int(total.item())
