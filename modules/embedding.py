"""Tables of features, by the short path that scripts import."""

from modules.layers.embedding.tokens import FeatureEmbedding

__all__ = ["FeatureEmbedding"]
