"""A layer of OneTrans: a stage of the sequence at the rows of requests, and one of the tokens of candidates.

Shapes: R requests, C candidates, N tokens of all sequences, T tokens of a candidate, width D. A sequence comes newest
first, so what is kept of it is its beginning, and a token sees itself and those behind it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from kernels.attention import jagged_attention
from kernels.tokens import unbind
from modules.broadcast import CandidateRows
from modules.layers.attention.token_attention import attend_one_way, attend_within
from modules.layers.feed_forward.token_linear import TokenFeedForward, TokenLinear
from modules.layers.norms import rms_norm
from modules.layers.sequence.newest import newest, with_spare_rows


class Part(nn.Module):
    """Attention's projections and the network of some tokens: one set of weights, or one for each of `num_tokens`.

    Where nobody reads what the tokens become (`keys_only`), there are keys and values alone.
    """

    def __init__(self, num_tokens: int, dim: int, options: dict[str, Any], *, own: bool, keys_only: bool) -> None:
        super().__init__()
        self.key_value = TokenLinear(num_tokens, dim, 2 * dim, bias=False, per_token=own)
        self.query: TokenLinear | None = None
        if not keys_only:
            self.query = TokenLinear(num_tokens, dim, dim, bias=False, per_token=own)
            self.output = TokenLinear(num_tokens, dim, dim, bias=False, per_token=own)
            width = options["hidden"]
            rest = {"activation": "gelu", "per_token": own, "dropout": options["dropout"]}
            self.ffn = TokenFeedForward(num_tokens, dim, width, dim, **rest)
            self.dropout = nn.Dropout(options["dropout"])

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """x + W_O attended, then + FFN(Norm( ))."""
        x = x + self.dropout(self.output(attended))
        return x + self.ffn(x, normalize=True)


class Sequence(NamedTuple):
    values: Tensor  # [N, D], newest first
    offsets: Tensor  # [R + 1], or with spare rows (`modules.layers.sequence.newest`) [2 R + 1]


class OneTransLayer(nn.Module):
    """z = x + MHA(Norm(x)), x' = z + FFN(Norm(z)) of both stages; `kept` tokens of a sequence of at most `length` go
    on. In the last layer (`kept` 0) candidates read the sequence and nobody what it would become."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_tokens: int,
        *,
        length: int,
        kept: int,
        max_candidates: int,
        own_weights: bool = True,
        causal: bool = True,
        hidden: int,
        dropout: float = 0.0,
    ) -> None:
        """`length` 0: there is no sequence. `own_weights`: each token of a candidate has weights of its own."""
        super().__init__()
        self.heads = (num_heads, dim // num_heads)
        self.length, self.kept, self.max_candidates, self.causal = length, kept, max_candidates, causal
        options = {"hidden": hidden, "dropout": dropout}
        self.own = Part(num_tokens, dim, options, own=True, keys_only=False) if own_weights else None
        self.sequence: Part | None = None
        if length or not own_weights:
            self.sequence = Part(1, dim, options, own=False, keys_only=own_weights and not kept)

    def forward(self, sequence: Sequence, x: Tensor, rows: CandidateRows) -> tuple[Sequence, Tensor]:
        """x [C, T, D] -> (the sequence that goes on, x)."""
        own = self.own or self.sequence
        assert own is not None
        assert own.query is not None
        normed = rms_norm(x)
        query, (key, value) = own.query(normed).unflatten(2, self.heads), self._key_value(own, normed)
        if not self.length or self.sequence is None:
            return sequence, own.after(x, attend_within(query, key, value, rows.offsets).flatten(2))
        read = rms_norm(sequence.values)
        keys = self._key_value(self.sequence, read)
        counting = rows.offsets
        if counting.shape != sequence.offsets.shape:
            counting = with_spare_rows(counting)
        attended = attend_one_way(
            query,
            (key, value),
            keys,
            sequence.offsets,
            counting,
            max_candidates=self.max_candidates,
            max_above=self.length,
        )
        x = own.after(x, attended.flatten(2))
        return (self._shared(sequence, read, keys, rows) if self.kept else sequence), x

    def _shared(self, sequence: Sequence, read: Tensor, keys: tuple[Tensor, Tensor], rows: CandidateRows) -> Sequence:
        """The newest `kept` tokens of each sequence, having attended to all that came in."""
        part, (values, offsets) = self.sequence, sequence
        assert part is not None
        assert part.query is not None
        key_offsets = offsets
        if self.kept < self.length:
            num_requests = rows.offsets.shape[0] - 1
            index, offsets = newest(offsets[: num_requests + 1], values.shape[0], self.kept, newest_first=True)
            values, read = values[index], read[index]
            if key_offsets.shape != offsets.shape:
                key_offsets = with_spare_rows(key_offsets)
        attended = jagged_attention(
            part.query(read).unflatten(1, self.heads),
            *keys,
            offsets,
            key_offsets,
            max_q=self.kept,
            max_k=self.length,
            window=(0, None) if self.causal else None,
        )
        return Sequence(part.after(values, attended.flatten(1)), offsets)

    def _key_value(self, part: Part, x: Tensor) -> tuple[Tensor, Tensor]:
        """[..., D] -> keys and values [..., H, d]."""
        key, value = unbind(part.key_value(x).reshape(-1, 2, *self.heads))
        return key.unflatten(0, x.shape[:-1]), value.unflatten(0, x.shape[:-1])


def kept_lengths(longest: int, last: int, num_layers: int, multiple: int) -> list[int]:
    """Tokens of a sequence that go on from each layer: falling linearly from all after the first to `last` after the
    last, rounded up to multiples; `last` 0 keeps all."""
    if not last or num_layers == 1:
        return [longest] * num_layers
    exact = [longest + (min(last, longest) - longest) * layer / (num_layers - 1) for layer in range(num_layers)]
    return [min(longest, int(-(-each // multiple)) * multiple) for each in exact]
