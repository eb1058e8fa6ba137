"""InterFormer (arXiv 2411.09852)."""

from modules.models.interformer.model import InterFormer

__all__ = ["InterFormer"]
