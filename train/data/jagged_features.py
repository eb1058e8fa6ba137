"""Ids of several features over the same rows, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class JaggedFeatures:
    """What a batch reads of TorchRec's `KeyedJaggedTensor`, by the same names, where TorchRec is not needed.

    values [N]: the ids of the first key's rows, then those of the second key's, ...; lengths [keys x stride].
    `length_per_key` is counted from lengths on the host if it is not given.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        *,
        lengths: Tensor,
        stride: int,
        length_per_key: Sequence[int] | None = None,
    ) -> None:
        self._keys, self._values, self._lengths, self._stride = list(keys), values, lengths, stride
        if length_per_key is None:
            length_per_key = lengths.view(len(self._keys), stride).sum(1).tolist() if self._keys else []
        self._length_per_key = list(length_per_key)

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths

    def stride(self) -> int:
        return self._stride

    def offsets(self) -> Tensor:
        """[keys x stride + 1] int64"""
        return torch.nn.functional.pad(self._lengths.cumsum(0), (1, 0))

    def length_per_key(self) -> list[int]:
        return self._length_per_key

    def length_per_key_or_none(self) -> list[int]:
        return self._length_per_key

    def __getitem__(self, key: str) -> JaggedFeatures:
        """The rows of one key. KeyError with the keys that there are."""
        if key not in self._keys:
            raise KeyError(f"{key!r} is none of {', '.join(self._keys)}")
        index = self._keys.index(key)
        count = self._length_per_key[index]
        return JaggedFeatures(
            [key],
            self._values.split(self._length_per_key)[index],
            lengths=self._lengths.view(-1, self._stride)[index],
            stride=self._stride,
            length_per_key=[count],
        )
