"""Imports of a program, which stay for as long as it runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting() -> Iterator[None]:
    """What is imported in this block, the garbage collector leaves alone from then on.

    It would go through half a million objects, of which none can be freed, several times while they are made, in every
    full collection of a run, and once more at its end: a third of the time that a short run takes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
