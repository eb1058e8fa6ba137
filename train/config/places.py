"""Where this project is and what its packages are called.

In a checkout `train`, `modules`, `kernels` and `launch` are packages of their own; in a wheel they are in `gemsmith`,
and configurations and bundled data lie beside them (tools/wheel.py).
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The folder of the packages, of configs/ and of data/."""
CONFIGS = ROOT / "configs"
PREFIX = __name__.rpartition("train.")[0]
"""What the names of the packages begin with: nothing in a checkout, "gemsmith." in a wheel."""


def name_here(module: str) -> str:
    """The name that a module has here, of the one that a checkout or a wheel has given it."""
    return PREFIX + module.removeprefix("gemsmith.")
