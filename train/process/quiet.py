"""Messages of libraries in every run that a user can do nothing about."""

from __future__ import annotations

import logging
import warnings

KNOWN_WARNINGS = (
    (UserWarning, "torch.distributed is disabled, unavailable or uninitialized"),  # commands of one process
    (FutureWarning, ".*ShardedTensor"),
    (FutureWarning, ".*broadcast_buffers"),
)
KNOWN_LOGGERS = ("torchrec.distributed.planner.types", "torch.fx._symbolic_trace")


def quieten() -> None:
    """Leave them out in this process."""
    for category, message in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", category=category, message=message)
    for name in KNOWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
