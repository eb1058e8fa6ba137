"""Peak memory of a run: what the CUDA allocator handed out, or the resident set of this process on a CPU."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import torch

_CLEAR_REFS, _RESET_PEAK = Path("/proc/self/clear_refs"), "5"


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak. Without Linux's clear_refs the peak of a CPU process is that since it started."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text(_RESET_PEAK)


def peak_memory_bytes(device: torch.device) -> int:
    """Bytes at the peak since `reset_peak_memory`, of this rank."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
