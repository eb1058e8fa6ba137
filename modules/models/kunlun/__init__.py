"""Kunlun (arXiv 2602.10016)."""

from modules.models.kunlun.config import KunlunConfig
from modules.models.kunlun.model import Kunlun

__all__ = ["Kunlun", "KunlunConfig"]
