"""FlashAttention 4 and quack, whose kernels for Hopper are written in the CuTe DSL, as contenders where installed.

`pip install --pre flash-attn-4 quack-kernels` brings them. Both compile at the first call of a shape's kind, and quack
then tries its configurations on that shape, which is not timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from kernels.bench import Runner
from kernels.core.dispatch import UnsupportedError


def flash_attention_4() -> Callable[..., Any]:
    """Its function of (q, k, v, cu_seqlens_q=, ...), which returns the output first; UnsupportedError without it."""
    return _load("FlashAttention 4", "flash_attn.cute.interface").flash_attn_varlen_func


def quack_gemm() -> Callable[..., Any]:
    """Its function of (a, b, cu_seqlens_m= or cu_seqlens_k=); UnsupportedError without it."""
    return _load("quack", "quack.gemm_interface").gemm


def _load(name: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # also where its libraries do not fit the driver or torch
        raise UnsupportedError(f"{name} cannot be imported: {error!r}") from error


def where_it_runs(prepare: Callable[[], Runner]) -> Runner:
    """The Runner of `prepare` after a first call; UnsupportedError if the peer refuses the shape or the chip."""
    try:
        runner = prepare()
        runner.step()
    except UnsupportedError:
        raise
    except Exception as error:
        raise UnsupportedError(f"cannot run this: {error!r}") from error
    return runner
