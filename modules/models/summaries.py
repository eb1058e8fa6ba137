"""The keys of models that summarise long histories in every layer, Kunlun and GEM."""

from __future__ import annotations

from dataclasses import dataclass, field

from modules.config import HeadsConfig, option
from modules.layers.attention.gdpa import GDPAConfig
from modules.layers.feed_forward.block import FeedForwardConfig
from modules.layers.feed_forward.plain_head import PlainHeadConfig
from modules.layers.interaction.wukong import WukongConfig


@dataclass(kw_only=True)
class SummariesConfig(FeedForwardConfig, HeadsConfig, PlainHeadConfig):
    num_context: int = option(8, least=1)  # tokens that a request is compressed to, for the weights of the PFFNs
    pffn_hidden: int = option(32, least=1)  # hidden units of a PFFN
    # its activation, normalisation and scales; the sum over hidden units is not averaged: the block's norm follows
    pffn_gdpa: GDPAConfig = field(default_factory=lambda: GDPAConfig(out_scale=1.0))
    window: int = 64  # self-attention sees |i - j| <= window; 0: the whole sequence
    num_target: int = 2  # tokens in which a candidate attends to a sequence; 0, of Kunlun: it does not
    num_tokens: int = option(4, least=1)  # of a sequence's summary
    wukong: WukongConfig = field(default_factory=WukongConfig)
    interaction_hidden: list[int] = option([128], least=1)  # of the machines' MLPs
