"""What a measurement depends on besides the code: versions, device, driver."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def environment(device: torch.device) -> dict[str, str]:
    """Versions, device and driver; "none" for what is absent."""
    facts = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "driver": "none",
        "triton": "none",
        "ptxas": "none",
    }
    if device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = _output(query).splitlines()[0]
    if importlib.util.find_spec("triton"):
        import triton

        facts["triton"] = triton.__version__
        facts["ptxas"] = re.search(r"V([\d.]+)", _output([triton.knobs.nvidia.ptxas.path, "--version"]))[1]
    return facts


def commit() -> str:
    """The commit of the code that runs: GEMSMITH_COMMIT if it is set (for a copy without the history, or an image),
    otherwise git's, with "+dirty" when files differ from it; "none" without either.
    """
    if named := os.environ.get("GEMSMITH_COMMIT"):
        return named
    revision = _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    if revision == "none":
        return revision
    return revision + "+dirty" * bool(_output(["git", "-C", str(ROOT), "status", "--porcelain"]))


def slug(name: str) -> str:
    """A device name as a folder name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"
