"""Jagged Feature Interaction of the jagged flash attention paper (RecSys 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.core import dispatch
from kernels.jagged import jagged_dense_bmm, jagged_jagged_bmm, jagged_softmax, jagged_to_padded, padded_to_jagged
from modules.batch import EventType, FeatureSpec
from modules.broadcast import CandidateRows
from modules.config import ModelConfig
from modules.core.checks import check_maximum
from modules.layers.embedding.tokens import JaggedSequence, Tokens
from modules.layers.interaction.lce import LCE
from modules.layers.norms import row_norm


class JaggedFeatureInteraction(nn.Module):
    """A token of each candidate for each history field: the field's values, weighted by how they match the candidate.

        t_cf = sum_i softmax_i(<Norm(v_i), q_cf> / sqrt(d)) v_i             v_i: the values of field f

    The target q_cf is a linear compression of the candidate's normalised tokens. The paper has no equations: it and the
    softmax over a field's values are chosen here. A field without values gives zeros. Values stay at the rows
    of requests, whose targets are padded to `max_candidates`: [values, max_candidates] scores are held in memory.
    """

    def __init__(self, spec: FeatureSpec, dim: int, events: Sequence[EventType]) -> None:
        """`events`: the histories whose fields it takes; with none it makes no tokens."""
        super().__init__()
        self.events = events
        self.num_tokens = sum(len(event.fields) for event in events)
        self.targets = LCE(spec.num_candidate_tokens, self.num_tokens) if self.num_tokens else None
        self.max_candidates = spec.max_candidates
        self.dim = dim

    def forward(self, tokens: Tokens, rows: CandidateRows) -> Tensor:
        """[C, num_tokens + n, dim]: these tokens, then those of each candidate, [C, n, dim]."""
        if self.targets is None:
            return tokens.candidate
        check_maximum(rows.offsets, self.max_candidates, "max_candidates")
        targets = self.targets(row_norm(tokens.candidate)) * self.dim**-0.5
        alone = rows.offsets.shape[0] == 2  # as in an export
        padded = targets[None] if alone else jagged_to_padded(targets, rows.offsets, self.max_candidates)
        parts = padded.split([len(event.fields) for event in self.events], 2)
        made = [
            _weighted(tokens.histories[event.name], part, event.max_length)
            for event, part in zip(self.events, parts, strict=True)
        ]
        pooled = torch.cat(made, dim=2)
        pooled = pooled[0] if alone else padded_to_jagged(pooled, rows.offsets, tokens.candidate.shape[0])
        return torch.cat([pooled, tokens.candidate], dim=1)


def _weighted(events: JaggedSequence, targets: Tensor, max_length: int) -> Tensor:
    """Values [N, fields * d] at R rows, targets [R, M, fields, d] -> [R, M, fields, d]."""
    num_rows, _, fields, dim = targets.shape
    total = events.values.shape[0]
    # One jagged tensor whose rows are those of the first field, then those of the next.
    values = events.values.unflatten(1, (fields, dim)).transpose(0, 1).flatten(0, 1)
    starts = torch.arange(fields, device=events.offsets.device)[:, None] * total + events.offsets[:-1]
    offsets = torch.cat([starts.flatten(), events.offsets[-1:] + (fields - 1) * total])
    columns = targets.permute(2, 0, 3, 1).flatten(0, 1)  # [fields * R, d, M]
    keys = row_norm(values, dispatch.autocast_dtype(values))
    weights = jagged_softmax(jagged_dense_bmm(keys, offsets, columns, max_length), offsets)
    pooled = jagged_jagged_bmm(values, weights, offsets, max_length)
    return pooled.unflatten(0, (fields, num_rows)).permute(1, 3, 0, 2)


@dataclass(kw_only=True)
class FeatureInteractionConfig(ModelConfig):
    """Before `StackConfig` among the bases of a model's `Config`."""

    jagged_interaction: bool = False  # each history field is also a token of each candidate, which weighs its values

    def make_interaction(self, spec: FeatureSpec) -> JaggedFeatureInteraction:
        return JaggedFeatureInteraction(spec, self.dim, spec.histories if self.jagged_interaction else ())
