"""Types of TMA descriptors, as the signatures of kernels that are compiled ahead of time have them."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl

from kernels.testing import Compiled, compile_ahead

TYPES = {"bf16": gl.bfloat16, "fp16": gl.float16, "fp32": gl.float32, "fp8e4nv": gl.float8e4nv}
TYPES |= {"u8": gl.uint8, "i16": gl.int16, "i32": gl.int32}


def descriptor(dtype: str, *block: int, swizzle: int | None = None) -> str:
    """Of tiles of `block`, swizzled in units of `swizzle` bytes (0: not at all); by default the layout is Gluon's."""
    if swizzle is None:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), TYPES[dtype])
    else:
        width = TYPES[dtype].primitive_bitwidth
        layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=width, rank=len(block))
    return f"tensordesc<{dtype}{list(block)},{layout!r}>"


def compile_forward(
    kernel: Any, dtype: str, d: int, block_k: int, window: tuple[int, int], constants: dict[str, Any], **types: str
) -> Compiled:
    """The Hopper forward of attention or of GDPA, of four heads of `d` features."""
    constants = {"HEADS": 4, "LEFT": window[0] >= 0, "RIGHT": window[1] >= 0} | constants
    constants |= {"BLOCK_K": block_k, "D": d, "DV": d}
    signature = {name: "i32" for name in kernel.arg_names if name not in constants}
    signature |= {
        f"{name}_desc": descriptor(dtype, 64 if name in ("q", "out") else block_k, d) for name in ("q", "k", "v", "out")
    }
    signature |= {"out": f"*{dtype}", "schedule": "*i32"} | types
    strides = ("q_head_stride", "k_head_stride", "v_head_stride")
    return compile_ahead(kernel, signature, constants, target="sm_90", gluon=True, maxnreg=168, divisible_by_16=strides)
