"""Tensors and keyed jagged tensors in one piece of memory, which moves and is pickled as one tensor.

`parts` are those of a batch: each a tensor, or one of TorchRec's KeyedJaggedTensor's kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes; of the tensors of a packed batch."""
_Keyed = tuple[type, list[str], int, list[int] | None]
_Place = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]


def packed(parts: Sequence[Any]) -> list[Any]:
    """Copies in one piece of memory."""
    tensors = tensors_of(parts)
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    pieces = torch.empty(sum(sizes), dtype=torch.uint8).split(sizes)
    views = [
        piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        for piece, tensor in zip(pieces, tensors, strict=True)
    ]
    for part in parts:
        if not isinstance(part, Tensor):
            part.length_per_key()  # remembered from now on: later it would have to be read from the device
    return assembled(_about(parts), views)


def moved(parts: Sequence[Any], move: Callable[[Tensor], Tensor]) -> list[Any]:
    """Each tensor moved, in one copy if they lie in one piece of memory."""
    about, tensors, *places = reduced(parts)
    return assembled(about, [move(tensor) for tensor in tensors], *places)


def reduced(parts: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of `assembled`, with one tensor where all lie in one piece of memory."""
    tensors = tensors_of(parts)
    whole = _whole(tensors)
    return (_about(parts), tensors) if whole is None else (_about(parts), [whole], _places(tensors))


def assembled(
    about: Sequence[_Keyed | None], tensors: Sequence[Tensor], places: Sequence[_Place] | None = None
) -> list[Any]:
    """The parts of these tensors, or of their places in the one tensor given."""
    if places is not None:
        memory = tensors[0].untyped_storage()
        empty = partial(torch.empty, 0, device=memory.device)
        tensors = [empty(dtype=dtype).set_(memory, *place) for dtype, *place in places]
    given, parts = iter(tensors), list[Any]()
    for keyed in about:
        if keyed is None:
            parts.append(next(given))
        else:
            kind, keys, stride, counts = keyed
            values, lengths = next(given), next(given)
            parts.append(kind(keys, values, lengths=lengths, stride=stride, length_per_key=counts))
    return parts


def tensors_of(parts: Sequence[Any]) -> list[Tensor]:
    pairs = [(part,) if isinstance(part, Tensor) else (part.values(), part.lengths()) for part in parts]
    return [tensor for pair in pairs for tensor in pair]


def _about(parts: Sequence[Any]) -> list[_Keyed | None]:
    """What of each part is not a tensor."""
    return [
        None if isinstance(part, Tensor) else (type(part), part.keys(), part.stride(), part.length_per_key_or_none())
        for part in parts
    ]


def _whole(tensors: Sequence[Tensor]) -> Tensor | None:
    """The bytes that all of `tensors` are views of; None if they do not share one piece of memory."""
    storage = tensors[0].untyped_storage()
    if any(tensor.untyped_storage().data_ptr() != storage.data_ptr() for tensor in tensors):
        return None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _places(tensors: Sequence[Tensor]) -> list[_Place]:
    return [(tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()) for tensor in tensors]
