"""Splits the arguments of a module into tensors and a description of the rest, so that copies can be passed instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Apart(NamedTuple):
    tensors: list[Tensor]
    kind: Hashable  # the rest: equal for arguments that differ only in their tensors
    together: Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]  # arguments with other tensors


def take_apart(*arguments: Any, **named: Any) -> Apart:
    """Find the tensors in arguments that are tensors, or tuples, lists, dicts and dataclasses of them.

    Anything else is part of the kind by its value. A value without a hash makes a new kind each time.
    """
    tensors: list[Tensor] = []
    kind = _take((arguments, named), tensors)
    return Apart(tensors, kind, lambda parts: _give(kind, iter(parts)))


def _take(value: Any, tensors: list[Tensor]) -> Hashable:
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return type(value), tuple([_take(field, tensors) for field in fields])
    if isinstance(value, dict):
        return dict, tuple([(name, _take(part, tensors)) for name, part in value.items()])
    if isinstance(value, tuple | list):
        return type(value), tuple([_take(part, tensors) for part in value])
    return None, value if isinstance(value, Hashable) else _Unequal(value)


def _give(kind: Any, parts: Iterator[Tensor]) -> Any:
    if kind is Tensor:
        return next(parts)
    holder, held = kind
    if holder is None:
        return held.value if isinstance(held, _Unequal) else held
    if holder is dict:
        return {name: _give(each, parts) for name, each in held}
    values = [_give(each, parts) for each in held]
    return holder(values) if holder in (tuple, list) else holder(*values)


@dataclasses.dataclass(eq=False)
class _Unequal:
    value: Any
