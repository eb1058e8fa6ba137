"""Training runs."""

from train.trainer.loop import Trainer

__all__ = ["Trainer"]
