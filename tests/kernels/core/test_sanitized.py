"""compute-sanitizer finds nothing in any jagged kernel: no access out of bounds, no misaligned one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.bench.cases.jagged_operators import OPERATORS
from kernels.core import dispatch

SMALL = Path(__file__).with_name("run_small.py")


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize("what", ["operators", "attention"])
def test_memcheck_finds_nothing(what: str) -> None:
    result = subprocess.run(
        ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(SMALL), what],
        # Without PyTorch's cache every tensor is an allocation with bounds of its own.
        env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "done" in result.stdout
    if what == "operators" and torch.cuda.get_device_capability() == (9, 0):
        ran = {line.split()[1] for line in result.stdout.splitlines() if line.startswith("hopper ")}
        assert ran == {name for name in OPERATORS if "hopper" in dispatch.operators().get(name, ())}
    assert "ERROR SUMMARY: 0 errors" in result.stdout
