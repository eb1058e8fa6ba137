"""Drop-in modules and the models made of them. Nothing here needs a trainer, a config object or a process group."""

from modules.rewrite import ikbo_rewrite

__all__ = ["ikbo_rewrite"]
