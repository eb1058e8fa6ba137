"""FlashAttention 4 and quack, whose kernels for Hopper are written in the CuTe DSL, as contenders where installed.

`pip install --pre flash-attn-4 quack-kernels` brings them. Both compile at the first call of a shape's kind, and quack
then tries its configurations on that shape, which is not timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels.bench import Runner
from kernels.core.dispatch import UnsupportedError


def flash_attention_4() -> Callable[..., Any]:
    """Its function of (q, k, v, cu_seqlens_q=, ...), which returns the output first; UnsupportedError without it."""
    try:
        from flash_attn.cute.interface import flash_attn_varlen_func
    except Exception as error:  # its libraries may not fit the driver or torch
        raise UnsupportedError(f"FlashAttention 4 cannot be imported: {error!r}") from error
    return flash_attn_varlen_func


def quack_gemm() -> Callable[..., Any]:
    """Its function of (a, b, cu_seqlens_m= or cu_seqlens_k=); UnsupportedError without it."""
    try:
        from quack.gemm_interface import gemm
    except Exception as error:
        raise UnsupportedError(f"quack cannot be imported: {error!r}") from error
    return gemm


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
