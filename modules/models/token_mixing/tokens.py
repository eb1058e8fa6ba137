"""From features to T tokens of a side: groups of features, equal slices of all, tokens of everything.

Shapes: F features of width d, T tokens of width D; rows are requests or candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from modules.broadcast import CandidateRows
from modules.layers.feed_forward.mlp import SharedLinear
from modules.layers.feed_forward.token_linear import TokenLinear


class SideTokens(nn.Module):
    """T tokens [rows, T, D], each by a linear layer of its own, from features [rows, F, d].

    With `groups`, T lists of places, token t reads the features of its group; without, the t-th of T equal slices of
    all features side by side. Groups and slices are filled up with zeros to one width.
    """

    def __init__(
        self, num_features: int, dim: int, num_tokens: int, out_dim: int, groups: Sequence[Sequence[int]] | None
    ) -> None:
        super().__init__()
        self.num_tokens = num_tokens
        self.groups = None if groups is None else [list(group) for group in groups]
        if self.groups is None:
            self.width = -(-num_features * dim // num_tokens)
        else:
            self.width = max(map(len, self.groups)) * dim
        self.linear = TokenLinear(num_tokens, self.width, out_dim)

    def forward(self, features: Tensor) -> Tensor:
        if self.groups is None:
            flat = features.flatten(1)
            flat = F.pad(flat, (0, self.num_tokens * self.width - flat.shape[1]))
            return self.linear(flat.unflatten(1, (self.num_tokens, self.width)))
        parts, most = features.unbind(1), self.width // features.shape[2]
        zeros = [torch.zeros_like(parts[0])]
        places = [part for group in self.groups for part in [*(parts[i] for i in group), *zeros * (most - len(group))]]
        return self.linear(torch.cat(places, 1).unflatten(1, (self.num_tokens, self.width)))


class GlobalTokens(nn.Module):
    """T tokens [C, T, D] of all features, each by an MLP of its own with one hidden layer as wide as it.

    The first layer of features of a request, if it has `num_request`, runs once a request.
    """

    def __init__(self, num_candidate: int, num_request: int, num_tokens: int, out_dim: int) -> None:
        super().__init__()
        self.first = SharedLinear(num_candidate, num_request, num_tokens * out_dim)
        self.second = TokenLinear(num_tokens, out_dim, out_dim)

    def forward(self, candidate: Tensor, request: Tensor | None = None, rows: CandidateRows | None = None) -> Tensor:
        """candidate [C, num_candidate], request [R, num_request] with its rows."""
        hidden = F.silu(self.first(candidate, request, None if request is None else rows))
        return self.second(hidden.unflatten(1, self.second.weight.shape[:2]))


def even_groups(num_features: int, num_tokens: int) -> list[list[int]]:
    """Places of features in order, as evenly as they go; where there are fewer than tokens, several tokens have one."""
    starts = [token * num_features // num_tokens for token in range(num_tokens + 1)]
    return [list(range(first, max(last, first + 1))) for first, last in pairwise(starts)]


def named_groups(groups: Sequence[Sequence[str]], user: Sequence[str], item: Sequence[str]) -> list[list[list[int]]]:
    """Places of the features of each side's groups. ValueError that names a feature for groups that are not a partition
    of each side's, user groups first."""
    given = [name for group in groups for name in group]
    known = {*user, *item}
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"model.groups names {unknown[0]!r}; the features are {', '.join([*user, *item])}")
    if (missing := [name for name in [*user, *item] if name not in given]) or len(given) > len(known):
        which = missing[0] if missing else next(name for name in given if given.count(name) > 1)
        raise ValueError(f"model.groups must name each feature once; {which!r} is named {given.count(which)} times")
    sides: list[list[list[int]]] = [[], []]
    for group in groups:
        of_user = [name for name in group if name in user]
        if of_user and len(of_user) < len(group):
            raise ValueError(
                f"model.groups: {list(group)} mixes features of requests, {of_user}, with those of candidates; make "
                "two groups of them"
            )
        names = user if of_user else item
        sides[not of_user].append([list(names).index(name) for name in group])
    return sides
