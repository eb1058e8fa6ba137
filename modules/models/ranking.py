"""The whole model: embeddings looked up by TorchRec, then an architecture that only sees tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn

from modules.batch import RequestBatch
from modules.broadcast import CandidateRows
from modules.layers.embedding.tokens import FeatureEmbedding, Tokens
from modules.layers.feed_forward.plain_head import PlainHead
from modules.layers.moe import MoE


class Architecture(Protocol):
    """What the trainer needs of every architecture in `modules.models`, besides being a module."""

    def aux_loss(self) -> Tensor:
        """Scalar to add to the loss of the last forward."""
        ...


WITHOUT_HISTORIES = "without histories it has no summaries of them; name event types in data.histories"


class RequestVectors:
    """Mixed into architectures that know each request by a vector, which depends on none of its candidates.

    While `gives_vectors` is set, evaluations get these vectors [R, width] in place of logits: what the model reads of
    the request's side last.
    """

    gives_vectors = False
    training: bool

    def only_vectors(self) -> bool:
        return self.gives_vectors and not self.training

    def vectors_refusal(self) -> str | None:
        """Why this one has no such vectors, and what has; None if it has."""
        return None


class Ranker(RequestVectors, nn.Module):
    """What the architectures here have in common."""

    @cached_property
    def _routed(self) -> list[MoE]:
        # Found once: a walk over all modules in each step would take the host longer than many a kernel.
        return [module for module in self.modules() if isinstance(module, MoE)]

    def aux_loss(self) -> Tensor:
        """Sum of the routers' balancing losses of the last forward; 0 without routed experts."""
        losses = [layer.aux_loss for layer in self._routed]
        return torch.stack(losses).sum() if losses else next(self.parameters()).new_zeros(())


class LowerLogits(ABC):
    """Mixed into architectures whose lower blocks have logits of their own in training."""

    @abstractmethod
    def take_lower(self) -> list[tuple[float, Tensor]]:
        """(weight, logits [C, tasks]) of each of the last training step's, once: their losses are added to the loss."""


class PlainLogits(LowerLogits):
    """Mixed into architectures that may have a `PlainHead` beside their own heads.

    It has a loss of its own in training; else logits are the mean of both.
    """

    plain_heads: PlainHead | None
    plain_logits: Tensor | None = None
    training: bool

    def with_plain(self, logits: Tensor, tokens: Tokens, batch: RequestBatch) -> Tensor:
        """[C, tasks] of the architecture's own heads."""
        if self.plain_heads is None:
            return logits
        plain = self.plain_heads(tokens, CandidateRows.of(batch))
        if self.training:
            self.plain_logits = plain
            return logits
        return (logits + plain) / 2

    def take_lower(self) -> list[tuple[float, Tensor]]:
        made, self.plain_logits = self.plain_logits, None
        return [] if made is None else [(1.0, made)]


class RankingModel(nn.Module):
    """Logits [C, tasks] of a `RequestBatch`.

    The two halves are separate modules so that the sharded pipeline can start the next batch's lookups while this one
    is in `arch`, which it need not look into.
    """

    def __init__(self, embedding: FeatureEmbedding, arch: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.arch = arch

    def forward(self, batch: RequestBatch) -> Tensor:
        return self.arch(self.embedding(batch), batch)
