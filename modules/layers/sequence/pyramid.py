"""Long histories at several resolutions: each level's tokens are means of ever longer pieces of a row."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels.jagged import segment_mean
from modules.layers.attention.gdpa import GDPABlock, GDPAConfig, GDPAPooling, GDPASelfAttention, PersonalizedFFN
from modules.layers.attention.jagged_attention import JaggedSelfAttention
from modules.layers.attention.rotary import Rotation
from modules.layers.norms import rms_norm


def pieces(offsets: Tensor, num_pieces: int) -> Tensor:
    """[B * num_pieces + 1] int64: each of the rows of `offsets` [B + 1] cut into `num_pieces` pieces of equal length.

    Lengths of a row's pieces differ by at most 1; a row with fewer values than pieces has empty ones. Their number does
    not depend on the lengths, so the host needs not know these.
    """
    cuts = torch.arange(num_pieces, device=offsets.device) * offsets.diff()[:, None] // num_pieces
    return torch.cat([(offsets[:-1, None] + cuts).flatten(), offsets[-1:]])


def coarser(values: Tensor, offsets: Tensor, num_pieces: int) -> tuple[Tensor, Tensor]:
    """(means [B * num_pieces, dim] of each row's pieces, zeros for empty ones, offsets [B + 1]), from a jagged tensor.

    Layers on such rows must let zeros have no effect, as those of GDPA do, whose activations map 0 to 0.
    """
    starts = torch.arange(offsets.shape[0], device=offsets.device) * num_pieces
    return segment_mean(values, pieces(offsets, num_pieces)), starts


class PyramidLevel(nn.Module):
    """One layer of one level: (values [N, dim], offsets [B + 1]) -> (values, summary [B, num_tokens, dim]).

        S = S + RMSNorm(GDPA(LN(S); context) + LN(S))
        S = S + attention(Norm(S))
        H = Norm(GDPAPooling(Norm(S)))

    The finest level (`window` not None) has softmax attention within a window; a coarser one has GDPA over the whole
    row, to which the zeros of empty pieces contribute nothing and in which they stay zeros. `pffn` has the
    options of GDPA in the network.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_context: int,
        hidden: int,
        num_tokens: int,
        max_length: int,
        window: int | None,
        dropout: float,
        pffn: GDPAConfig | None = None,
    ) -> None:
        super().__init__()
        # The sum over hidden units is not averaged: the block's norm follows.
        inner = vars(pffn or GDPAConfig(out_scale=1.0)) | {"max_length": max_length}
        gdpa = vars(GDPAConfig()) | {"max_length": max_length}
        self.pffn = GDPABlock(PersonalizedFFN(dim, num_heads, num_context, hidden, **inner))
        self.attention: JaggedSelfAttention | GDPASelfAttention
        if window is None:
            self.attention = GDPASelfAttention(dim, num_heads, **gdpa)
        else:
            self.attention = JaggedSelfAttention(dim, num_heads, max_length=max_length, window=window or None)
        self.pooling = GDPAPooling(dim, num_heads, num_tokens, **gdpa)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, values: Tensor, offsets: Tensor, rotation: Rotation, context: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """context [B, num_context, dim] -> (values, what attention read of them, summary)."""
        values = self.pffn(values, offsets, context)
        normed = rms_norm(values)
        values = values + self.dropout(self.attention(normed, offsets, rotation))
        return values, normed, rms_norm(self.pooling(rms_norm(values), offsets))
