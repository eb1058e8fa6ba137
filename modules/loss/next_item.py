"""Losses of the next item at every place of a sequence, against items drawn as negatives.

The negatives of a step are shared by its places: `uniform` items drawn from the whole table by the loader, which puts
them behind the batch as candidates of a request of their own, and `in_batch` targets of other places, drawn here. A
negative that is the target itself counts nowhere.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from modules.models.retrieval import NextItems

MASKED = -1e30
"""Score of a negative that does not count: in place of -inf, so that a place without any has no gradient of NaN."""


@dataclass(frozen=True)
class ItemShares:
    """How often items come as targets: `shares` [rows of the item table] float32 of sum 1, None if nobody asks."""

    num_items: int
    shares: Tensor | None = None


@dataclass(frozen=True)
class NextItemLoss:
    """The fields are the arguments in the configuration."""

    uniform: int = 512
    in_batch: int = 0
    metrics: ClassVar[str] = "next_item"

    def __post_init__(self) -> None:
        if self.uniform < 0 or self.in_batch < 0 or not self.uniform + self.in_batch:
            raise ValueError(
                f"uniform={self.uniform} and in_batch={self.in_batch} are numbers of negatives: at least 0, one of "
                "them more, e.g. uniform=512"
            )

    @property
    def needs_shares(self) -> bool:
        """Whether `terms` reads `ItemShares.shares`."""
        return False

    def predict(self, logits: Tensor) -> Tensor:
        """The scores themselves."""
        return logits

    def terms(self, items: NextItems, known: ItemShares) -> tuple[Tensor, Tensor]:
        """(losses [P], their weights [P]) of places."""
        first = items.candidate_ids.shape[0] - self.uniform
        negatives, ids = items.candidates[first:], items.candidate_ids[first:]
        if self.in_batch:
            drawn = torch.randint(items.target_ids.shape[0], (self.in_batch,), device=ids.device)
            # A place without a known target has row 0, which is nobody's target.
            negatives = torch.cat([negatives, items.target[drawn]])
            ids = torch.cat([ids, items.target_ids[drawn]])
        with torch.autocast(negatives.device.type, enabled=False):
            positive = (items.query * items.target).sum(1)
            scores = items.query @ negatives.T
        counted = (ids != items.target_ids[:, None]) & (ids > 0)
        return self.losses(positive, scores, counted, ids, known), items.weights

    @abstractmethod
    def losses(self, positive: Tensor, negative: Tensor, counted: Tensor, ids: Tensor, known: ItemShares) -> Tensor:
        """[P] from scores of targets [P] and negatives [P, n] of which those `counted` count; ids [n]."""

    def expected(self, ids: Tensor, known: ItemShares) -> Tensor:
        """[n] float32: how often each of these items is expected among a step's negatives."""
        count = torch.full(ids.shape, self.uniform / known.num_items, device=ids.device)
        if self.in_batch and known.shares is not None:
            count = count + self.in_batch * known.shares[ids]
        return count


@dataclass(frozen=True)
class SampledSoftmax(NextItemLoss):
    """-ln of the target's share in softmax over it and the negatives.

    With `logq` a negative's score is less by the logarithm of how often it is expected in the sample, so that the sum
    over negatives is an unbiased estimate of that over all other items (Bengio and Senecal 2008). The target is always
    in the sum and gets no correction (arXiv 2507.09331).
    """

    logq: bool = True

    @property
    def needs_shares(self) -> bool:
        return self.logq and self.in_batch > 0

    def losses(self, positive: Tensor, negative: Tensor, counted: Tensor, ids: Tensor, known: ItemShares) -> Tensor:
        if self.logq:
            negative = negative - self.expected(ids, known).clamp(min=1e-12).log()
        others = negative.masked_fill(~counted, MASKED).logsumexp(1)
        return F.softplus(others - positive)


@dataclass(frozen=True)
class GBCE(NextItemLoss):
    """Generalised binary cross-entropy of gSASRec (arXiv 2308.07192).

    -[beta ln sigmoid(s+) + sum of ln(1 - sigmoid(s-))] / (n + 1) with beta = a (t (1 - 1 / a) + 1 / a) for the sampling
    rate a = n / (items - 1): t = 0 is plain cross-entropy (SASRec's, with n = 1), t = 1 gives calibrated probabilities.
    Here a score of 0 is where the two sums pull equally, at a probability of beta / (n + beta), instead of at 1 / 2:
    otherwise states all take one direction at first, which lowers the scores of all items, and do not leave it.
    """

    uniform: int = 256
    t: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.t <= 1:
            raise ValueError(f"t={self.t} must be in 0..1, e.g. t=0.75")

    def losses(self, positive: Tensor, negative: Tensor, counted: Tensor, ids: Tensor, known: ItemShares) -> Tensor:
        number = negative.shape[1]
        rate = min(1.0, number / max(1, known.num_items - 1))
        beta = rate * (self.t * (1 - 1 / rate) + 1 / rate)
        start = math.log(beta / number)
        positive, negative = positive + start, negative + start
        wrong = (F.softplus(negative) * counted).sum(1)
        return (beta * F.softplus(-positive) + wrong) / (number + 1)


@dataclass(frozen=True)
class BPR(NextItemLoss):
    """-ln sigmoid(s+ - s-), mean over the negatives (arXiv 1205.2618)."""

    def losses(self, positive: Tensor, negative: Tensor, counted: Tensor, ids: Tensor, known: ItemShares) -> Tensor:
        losses = F.softplus(negative - positive[:, None]) * counted
        return losses.sum(1) / counted.sum(1).clamp(min=1)
