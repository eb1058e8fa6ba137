"""What `precision=auto` is on the devices of a run."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist

from train.config.schema import PrecisionConfig
from train.process.distributed import World

log = logging.getLogger(__name__)
CPU_FEATURES = ("amx_bf16", "avx512_bf16")
FORCED = "CPU_MULTIPLIES_BF16"
"""Environment variable, 0 or 1: what a run takes its CPU for, such as a test of `precision=auto`."""


def multiplies_bf16(device: torch.device) -> bool:
    """Whether the device has instructions that multiply bfloat16; others widen each operand first."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if forced := os.environ.get(FORCED):
        return forced == "1"
    features: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # PyTorch 2.11 does not have it
    return any(features.get(name) for name in CPU_FEATURES)


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """What autocast computes in under a precision of this name."""
    fp32 = name == "fp32" or (name == "auto" and not multiplies_bf16(device))
    return torch.float32 if fp32 else torch.bfloat16


def settle(precision: PrecisionConfig, world: World, run_dir: Path | None = None) -> None:
    """Replace `precision.name=auto`: what the earlier start of this run directory had, else bf16 if all ranks can."""
    if precision.name != "auto":
        return
    earlier = world.by_first(lambda: _earlier(run_dir))
    able = [False] * world.size
    dist.all_gather_object(able, multiplies_bf16(world.device), group=world.host_group)
    precision.name = earlier or ("bf16" if all(able) else "fp32")
    if earlier:
        reason = "as this run began"
    elif all(able):
        reason = "the hardware multiplies bfloat16"
    else:
        reason = f"the hardware of {able.count(False)} of {world.size} ranks does not multiply bfloat16"
    if world.is_first:
        log.info("precision=auto is %s: %s", precision.name, reason)


def _earlier(run_dir: Path | None) -> str | None:
    """The precision with which an earlier start of a run began; it may resume on other hardware."""
    file = run_dir / "config.json" if run_dir else None
    if file is None or not file.exists():
        return None
    name = json.loads(file.read_text())["config"]["precision"]["name"]
    return name if name in ("fp32", "bf16") else None
