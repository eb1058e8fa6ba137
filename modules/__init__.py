"""Drop-in modules and the models made of them. Nothing here needs a trainer, a config object or a process group."""

from modules.layers.attention.cross_layer import CrossLayerAttention
from modules.layers.attention.gdpa import GDPABlock, GDPAPooling, GDPASelfAttention, PersonalizedFFN
from modules.layers.attention.jagged_attention import JaggedSelfAttention
from modules.layers.attention.target_attention import SelfAndTargetAttention, TargetAttention
from modules.layers.attention.token_attention import TokenAttention
from modules.layers.feed_forward.mlp import MLP, SharedLinear, linear_of_both
from modules.layers.feed_forward.token_linear import TokenFeedForward, TokenLinear
from modules.layers.interaction.dot_cross import DHENLayer
from modules.layers.interaction.jagged_feature_interaction import JaggedFeatureInteraction
from modules.layers.interaction.lce import LCE
from modules.layers.interaction.sum_kron import SumKronLinear
from modules.layers.interaction.wukong import WukongExperts, WukongLayer
from modules.layers.moe import MoE, update_router_biases
from modules.layers.pooling.pma import PMA
from modules.layers.pooling.seed_pooling import SeedPooling
from modules.layers.sequence.pyramid import PyramidLevel
from modules.rewrite import ikbo_rewrite

__all__ = [
    "LCE", "MLP", "PMA", "CrossLayerAttention", "DHENLayer", "GDPABlock", "GDPAPooling", "GDPASelfAttention",
    "JaggedFeatureInteraction", "JaggedSelfAttention", "MoE", "PersonalizedFFN", "PyramidLevel", "SeedPooling",
    "SelfAndTargetAttention", "SharedLinear", "SumKronLinear", "TargetAttention", "TokenAttention", "TokenFeedForward",
    "TokenLinear", "WukongExperts", "WukongLayer", "ikbo_rewrite", "linear_of_both", "update_router_biases",
]  # fmt: skip
