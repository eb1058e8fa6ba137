"""Types of TMA descriptors, as the signatures of kernels that are compiled ahead of time have them."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

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
