"""Token mixing: RankMixer, TokenMixer-Large, HyFormer and MixFormer are configurations of one model."""

from modules.models.token_mixing.config import SparseConfig, TokenMixingConfig
from modules.models.token_mixing.model import TokenMixing

__all__ = ["SparseConfig", "TokenMixing", "TokenMixingConfig"]
