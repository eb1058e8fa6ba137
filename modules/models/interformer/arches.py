"""The arches of InterFormer (arXiv 2411.09852): summaries of both sides, interaction, sequence.

An arch is one of the parts that a layer has in the paper. Shapes: C candidates; `rows` sequences, one for each request
(in the paper's form one for each candidate); N tokens of all sequences together, CLS included; n feature tokens; d the
width of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from kernels.core import dispatch
from kernels.jagged import jagged_dense_bmm, jagged_low_rank
from kernels.tokens import split_tokens
from modules.broadcast import CandidateRows, VendorTokens
from modules.config import HeadsConfig, TokenConfig, option
from modules.core.vanilla import is_vanilla
from modules.layers.attention.gdpa import GDPAConfig, GDPASelfAttention, PersonalizedFFN
from modules.layers.attention.jagged_attention import JaggedSelfAttention
from modules.layers.attention.rotary import Rotation
from modules.layers.feed_forward.mlp import MLP, activated
from modules.layers.interaction.dot_cross import ENSEMBLES, DHENLayer
from modules.layers.interaction.lce import LCE
from modules.layers.interaction.wukong import WukongConfig, WukongLayer
from modules.layers.norms import add_rms_norm, rms_norm, row_norm
from modules.layers.pooling.pma import PMA


@dataclass
class ArchConfig(HeadsConfig, TokenConfig):
    """What several arches share."""

    num_cls: int = option(4, least=1)  # summary tokens of the non-sequence side; prepended to the sequence as CLS


class Gating(nn.Module):
    """Gating(Z) = Z * MLP(Z), the same for every token: [..., d] -> [..., d].

    The paper prints a gate around the product; a sigmoid would squash tokens into (0, 1) and turn the zeros of missing
    recent tokens into 0.5. The MLP has one hidden layer as wide as the token and an output bias that starts at 1: at
    first tokens pass. Only the MLP sees Z normalised, so that the product carries the magnitude of a token once:
    without the norm it would grow with its square.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.hidden = MLP(dim, [dim])
        self.output = nn.Linear(dim, dim)
        nn.init.ones_(self.output.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return activated(self.output, self.hidden(rms_norm(tokens)), factor=tokens)


class Summary(nn.Module):
    """X_sum = Gating(LCE(X)): [rows, n, d] -> [rows, num_cls, d]. X is not normalised, to keep magnitudes."""

    def __init__(self, num_tokens: int, config: ArchConfig) -> None:
        super().__init__()
        self.lce = LCE(num_tokens, config.num_cls)
        self.gating = Gating(config.dim)
        self.num_summary = config.num_cls
        self.dim = config.dim

    def forward(self, tokens: Tensor) -> Tensor:
        return self.gating(self.lce(tokens))


class LearnedSummary(nn.Module):
    """In the place of `Summary`, where features do not inform the sequence: the same tokens for every row."""

    def __init__(self, config: ArchConfig) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(config.num_cls, config.dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.tokens.repeat(tokens.shape[0], 1, 1)


class SequenceTokens(NamedTuple):
    """The sequence between two layers, in the forms in which it is read: what `add_rms_norm` makes for two readers."""

    values: Tensor  # [N, d]
    normed: Tensor  # the same normalised, for the summary
    ends: Tensor  # [rows, num_cls + num_recent, d]: those of `places_of_ends`, zeros where there is none
    normed_again: Tensor  # for the PFFN: the norm's backward adds up the gradients of both


def places_of_ends(offsets: Tensor, num_cls: int, num_recent: int) -> Tensor:
    """[rows, num_cls + num_recent] int64: which tokens are the CLS of each row, then its newest events.

    The events are right-aligned, -1 where missing; CLS tokens do not count as events.
    """
    cls = offsets[:-1, None] + torch.arange(num_cls, device=offsets.device)
    age = torch.arange(num_recent, 0, -1, device=offsets.device)
    recent = torch.where(age <= offsets.diff()[:, None] - num_cls, offsets[1:, None] - age, -1)
    return torch.cat([cls, recent], dim=1)


class SequenceSummary(nn.Module):
    """S_sum = Gating([CLS | recent K | PMA]), the first two at the rows of the sequence, PMA for each candidate.

    CLS and recent tokens belong to the request, and readers of the summary treat them so. In PMA the candidate meets
    the sequence: its queries are seeds plus an LCE of the candidate's tokens.
    """

    @dataclass
    class Config(ArchConfig):
        num_pma: int = option(2, least=1)
        num_recent: int = option(2, least=1)

    def __init__(
        self,
        num_candidate: int,
        num_request: int,
        config: Config,
        *,
        max_candidates: int,
        max_length: int,
        num_vendor: int = 0,
    ) -> None:
        super().__init__()
        self.dim = config.dim
        self.num_cls = config.num_cls
        self.num_pma = config.num_pma
        self.num_recent = config.num_recent
        self.condition = LCE(num_candidate, config.num_pma, num_request, num_vendor)
        self.pma = PMA(
            config.dim, config.num_heads, config.num_pma, max_candidates=max_candidates, max_length=max_length
        )
        self.gating = Gating(config.dim)

    def forward(
        self,
        candidate: Tensor,
        request: Tensor | None,
        tokens: SequenceTokens,
        offsets: Tensor,
        rows: CandidateRows,
        vendor: VendorTokens | None = None,
    ) -> tuple[Tensor, Tensor]:
        """([rows, num_cls + num_recent, d], [C, num_pma, d]).

        `candidate` [C, n_c, d] is normalised; in the first layer it, `request` [rows, n_u, d] and vendors are rows of
        tables. The sequence is at `rows` rows."""
        dtype = dispatch.autocast_dtype(candidate)  # in which the LCE reads them
        if request is None:
            condition = self.condition(candidate, None, rows)
        else:
            condition = self.condition(row_norm(candidate, dtype), row_norm(request, dtype), rows, vendor)
        pooled = self.pma(condition, rows.offsets, tokens.normed, offsets)
        return self.gating(tokens.ends), self.gating(pooled)


@dataclass
class WukongStackConfig(WukongConfig):
    num_layers: int = option(2, least=1)  # each squares the order of interactions
    num_fmb: int = option(4, least=1)
    num_lcb: int = option(4, least=1)


class InteractionArch(nn.Module):
    """X + MLP(Interaction([X | S_sum])) for n tokens X of each candidate; the MLP restores the n tokens.

    `interaction` is a DHEN layer, one of its two parts, or a stack of Wukong layers. The first `num_request_summary`
    tokens of S_sum are at request rows. So are the first `num_request` tokens of X in the first layer, where X is still
    what was looked up. They enter the first layer of the stack as a request's tokens, before all others.
    """

    @dataclass
    class Config(TokenConfig):
        # inner products and a cross layer | one of the two | factorisation machines
        interaction: str = option("dhen", choices=[*ENSEMBLES, "wukong"])
        wukong: WukongStackConfig = field(default_factory=WukongStackConfig)
        interaction_hidden: list[int] = option([128], least=1)  # the MLP that restores n x d tokens

    def __init__(
        self,
        num_candidate: int,
        num_request: int,
        num_summary: int,
        num_request_summary: int,
        config: Config,
        *,
        max_candidates: int,
    ) -> None:
        super().__init__()
        dim, hidden, dropout = config.dim, config.interaction_hidden, config.dropout
        num_tokens = num_request + num_candidate
        mixed = num_tokens + num_summary
        common: dict[str, Any] = {"hidden": hidden, "dropout": dropout}
        num_of_request = num_request_summary + num_request  # of a request, to the first layer
        first: dict[str, Any] = {"num_request": num_of_request, "max_candidates": max_candidates}
        layers: list[DHENLayer | WukongLayer] = []
        wukong = config.wukong
        for index in range(wukong.num_layers if config.interaction == "wukong" else 1):
            options = common | ({} if index else first)
            num_of_candidate = mixed if index else mixed - num_of_request
            if config.interaction != "wukong":
                options["ensemble"] = config.interaction
                layers.append(DHENLayer(num_of_candidate, dim, **options))
            else:
                options |= wukong.layer_options()
                layers.append(WukongLayer(num_of_candidate, dim, **options))
                mixed = wukong.num_fmb + wukong.num_lcb
        # Named after its kind in checkpoints and in the globs of a precision.
        self.interaction = config.interaction
        self.add_module(config.interaction, nn.ModuleList(layers))
        self.restore = MLP(mixed * dim, hidden, num_tokens * dim, dropout)
        self.dropout = nn.Dropout(dropout)
        self.dim = dim

    @property
    def stack(self) -> Sequence[DHENLayer | WukongLayer]:
        return cast("Sequence[DHENLayer | WukongLayer]", self.get_submodule(self.interaction))

    def normed(self, candidate: Tensor) -> tuple[Tensor, ...]:
        """What `SequenceSummary` and this arch read of the tokens of an earlier layer, and these tokens."""
        dtype = dispatch.autocast_dtype(candidate)
        if self.reads(candidate) is dtype:
            return rms_norm(candidate, dtype=dtype, twice=True, beside=True)
        of_summary, candidate = rms_norm(candidate, dtype=dtype, beside=True)
        return of_summary, *rms_norm(candidate, beside=True)

    def reads(self, tokens: Tensor) -> torch.dtype:
        """Wukong has products of all tokens, which round them; DHEN also adds them up as they are."""
        return dispatch.autocast_dtype(tokens) if self.interaction == "wukong" else tokens.dtype

    def forward(
        self,
        candidate: Tensor,
        request: Tensor | None,
        summary: Sequence[Tensor],
        rows: CandidateRows,
        normed: Tensor | None = None,
    ) -> Tensor:
        """candidate [C, num_candidate, d], `normed` if it is of an earlier layer, request [rows, num_request, d] if
        there are any, summary a pair or empty -> [C, num_request + num_candidate, d]."""
        own, shared = [row_norm(candidate, self.reads(candidate)) if normed is None else normed], []
        if summary:
            shared.append(summary[0])
            own.append(summary[1])
        if request is not None:
            shared.append(row_norm(request, self.reads(request)))
        first, *rest = self.stack
        mixed = first(torch.cat(own, dim=1), torch.cat(shared, dim=1) if shared else None, rows)
        for layer in rest:
            mixed = layer(mixed)
        change = self.dropout(self.restore(mixed.flatten(1)).unflatten(1, (-1, self.dim)))
        if request is None:
            return candidate + change
        of_request, of_candidate = split_tokens(change, [request.shape[1], candidate.shape[1]])
        return torch.cat([rows.add(of_request, request), candidate + of_candidate], dim=1)


class LinearPersonalizedFFN(nn.Module):
    """PFFN(X_sum, S) = S (X_sum^T W): each row's tokens times a d x d matrix made from its summary, W [num_summary, d].

    That matrix has rank num_summary, so it is never formed: (S X_sum^T) W is the same product with fewer operations, of
    one reading of S. W starts small, so that the residual branch around it starts near the identity for every row.
    """

    def __init__(self, num_summary: int, dim: int, max_length: int) -> None:
        super().__init__()
        self.max_length = max_length
        self.output = nn.Linear(num_summary, dim, bias=False)
        nn.init.normal_(self.output.weight, std=0.1 * (num_summary * dim) ** -0.5)

    def forward(self, values: Tensor, offsets: Tensor, summary: Tensor) -> Tensor:
        """values [N, d], offsets [rows + 1], summary [rows, num_summary, d] -> [N, d]."""
        if is_vanilla(self.output, nn.Linear) and self.output.bias is None:
            return jagged_low_rank(values, offsets, summary, self.output.weight, self.max_length)
        return self.output(jagged_dense_bmm(values, offsets, summary.mT, self.max_length))


class SequenceArch(nn.Module):
    """S + PFFN(X_sum, S), then + self-attention, then + feed-forward when there is one; CLS tokens take part in all.

    `pffn` and `sequence_attention` each are the paper's operator or GDPA, which gives the first an activation and
    replaces the softmax of the second by one.
    """

    @dataclass
    class Config(ArchConfig):
        pffn: str = option("linear", choices=["linear", "gdpa"])  # the paper's | a network of pffn_hidden units
        pffn_hidden: int = option(128, least=1)
        pffn_gdpa: GDPAConfig = field(default_factory=GDPAConfig)
        sequence_attention: str = option("softmax", choices=["softmax", "gdpa"])  # gdpa: an activation in its place
        attention_gdpa: GDPAConfig = field(default_factory=GDPAConfig)

    def __init__(self, config: Config, *, max_length: int, feed_forward: nn.Module | None = None) -> None:
        super().__init__()
        dim, num_heads = config.dim, config.num_heads
        self.pffn: LinearPersonalizedFFN | PersonalizedFFN
        if config.pffn == "linear":
            self.pffn = LinearPersonalizedFFN(config.num_cls, dim, max_length)
        else:
            self.pffn = PersonalizedFFN(
                dim,
                num_heads,
                config.num_cls,
                config.pffn_hidden,
                max_length=max_length,
                **vars(config.pffn_gdpa),
            )
        self.attention: JaggedSelfAttention | GDPASelfAttention
        if config.sequence_attention == "softmax":
            self.attention = JaggedSelfAttention(dim, num_heads, max_length=max_length)
        else:
            self.attention = GDPASelfAttention(dim, num_heads, max_length=max_length, **vars(config.attention_gdpa))
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        summary: Tensor,
        tokens: SequenceTokens,
        offsets: Tensor,
        rotation: Rotation,
        ends: Tensor | None = None,
    ) -> SequenceTokens:
        """`ends`, if given, are the indices made by `places_of_ends`; the result then has the tokens there."""
        change = self.dropout(self.pffn(tokens.normed_again, offsets, summary))
        values, normed, _ = add_rms_norm(tokens.values, change)
        change = self.dropout(self.attention(normed, offsets, rotation))
        if self.feed_forward is not None:
            values, normed, _ = add_rms_norm(values, change)
            change = self.dropout(self.feed_forward(normed))
        return SequenceTokens(*add_rms_norm(values, change, ends, twice=True))
