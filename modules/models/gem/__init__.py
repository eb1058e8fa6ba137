"""A model after Meta's descriptions of its Generative Ads Recommendation Model (GEM)."""

from modules.models.gem.model import GEM

__all__ = ["GEM"]
