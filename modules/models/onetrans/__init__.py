"""OneTrans (arXiv 2510.26104): events and features in one causal sequence."""

from modules.models.onetrans.model import OneTrans, OneTransConfig

__all__ = ["OneTrans", "OneTransConfig"]
