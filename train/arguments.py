"""Arguments of a module as tensors and what they are besides, for those who keep copies of the tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Apart(NamedTuple):
    tensors: list[Tensor]
    kind: Hashable  # equal where only tensors differ
    together: Callable[[Sequence[Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]  # arguments again, and named ones


def take_apart(*arguments: Any, **named: Any) -> Apart:
    """Arguments that are tensors, tuples, lists, dicts and dataclasses of such, and all else by its value.

    What has no hash has a kind of its own each time.
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
