"""What a run was made with: versions of packages and the commit of this repository."""

from __future__ import annotations

import platform
from importlib import metadata

from kernels.bench import commit

PACKAGES = ("torch", "triton", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "hydra-core", "wandb", "numpy", "pyarrow")


def collect() -> dict[str, str]:
    """Versions by package (absent ones left out), and `commit`."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found | {"commit": commit()}
