"""Inputs of linear compression that its tests share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.ikbo import linear_compression


@dataclass(frozen=True)
class Case:
    """`counts`: rows of the level below that belong to each row of a level, outermost first."""

    counts: tuple[tuple[int, ...], ...]
    num_out: int = 5
    depth: int = 6
    user_depths: tuple[int, ...] = (3, 7)
    width: int = 4
    offsets_dtype: torch.dtype = torch.int64

    def inputs(self, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Leaves by name: candidate, w_candidate, and user_i, w_user_i, offsets_i of each level."""
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

        num_candidates = sum(self.counts[-1]) if self.counts else 9
        tensors = {
            "candidate": random(num_candidates, self.depth, self.width),
            "w_candidate": random(self.num_out, self.depth) * max(self.depth, 1) ** -0.5,
        }
        for level, counts in enumerate(self.counts):
            depth = self.user_depths[level]
            offsets = torch.tensor([0, *counts]).cumsum(0)
            tensors |= {
                f"user_{level}": random(len(counts), depth, self.width),
                f"w_user_{level}": random(self.num_out, depth) * max(depth, 1) ** -0.5,
                f"offsets_{level}": offsets.to(device, self.offsets_dtype),
            }
        return tensors


def call(backend: str | None, **tensors: Tensor) -> Tensor:
    """`linear_compression` of the tensors of `Case.inputs`."""
    levels = sum(name.startswith("user_") for name in tensors)
    users, weights, offsets = (
        [tensors[f"{kind}_{level}"] for level in range(levels)] for kind in ("user", "w_user", "offsets")
    )
    return linear_compression(tensors["candidate"], users, tensors["w_candidate"], weights, offsets, backend=backend)


# One request, requests without candidates at both ends, one candidate each, a huge request among empty ones.
SHAPES = {
    "no requests": Case(()),
    "one request": Case(((5,),)),
    "uneven": Case(((0, 2, 0, 1, 4, 0),), offsets_dtype=torch.int32),
    "one candidate each": Case(((1,) * 7,)),
    "one huge": Case(((0, 0, 300, 0),)),
    "one candidate": Case(((1,),), num_out=1, depth=1, user_depths=(1,), width=1),
    "no candidates": Case(((0, 0),)),
    "two levels": Case(((2, 0, 2), (3, 0, 1, 2))),
    "no tokens": Case(((2, 0, 3),), depth=0, user_depths=(0,)),
}
