"""Linear compression for Hopper, in Gluon: the products of users and candidates in one persistent kernel.

A program works through tiles (`hopper.lce_tiles`): one warpgroup loads blocks with TMA into a ring that runs through
users and candidates without a stop, two multiply (`hopper.lce_consumer`). All tiles of users come before a program's
first tile of candidates. When a candidate's own product is complete, the program waits for the product of the user that
it needs, by a flag raised with release semantics. No program waits before its own share of the users is done, and there
are no more programs than multiprocessors. So none waits for ever as long as all of them run, which other kernels on the
chip must not prevent by waiting for this one to end.

Neither M nor K need be multiples of a block: blocks are zero beyond the end on both sides, and TMA does not write rows
beyond the last one.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.core.hopper import swizzled_layout
from kernels.core.launch import Launcher, processors
from kernels.ikbo.hopper.lce_consumer import BLOCK, consume
from kernels.ikbo.hopper.lce_prepare import LINE, prepare
from kernels.ikbo.hopper.lce_tiles import PANELS, load, num_tiles
from kernels.ikbo.lce_torch import aligned_rows

STAGES = 4

# Three warpgroups at this limit fill the register file; the loader gives most of its share to the consumers.
_MAX_REGISTERS = 168
_CONSUMER_REGISTERS = gl.constexpr(240)
_LOADER_REGISTERS = gl.constexpr(24)

# Sizes of a batch, which must not be compiled for when they happen to be 1 or multiples of 16.
_SIZES = ["num_user_tiles", "num_tiles", "num_steps", "num_user_steps", "num_blocks", "num_entries", "num_users"]


@cache
def tiling(num_rows: int) -> tuple[int, int]:
    """(ROW_TILES, COLUMN_TILES) of `hopper.lce_tiles` that cover this many rows of a weight with the least waste."""
    blocks = -(-num_rows // 64)
    covers = [(rows, columns) for columns in range(3) for rows in range(blocks // 3 + 2) if 3 * rows + 4 * columns]
    return min(
        (cover for cover in covers if 3 * cover[0] + 4 * cover[1] >= blocks),
        key=lambda cover: 3 * cover[0] + 4 * cover[1],
    )


def _weight_descriptor(weight: Tensor) -> TensorDescriptor:
    block = [64, LINE // weight.element_size()]
    return TensorDescriptor(
        weight, list(weight.shape), list(weight.stride()), block, swizzled_layout(LINE, weight.element_size(), 2)
    )


def batch_descriptor(x: Tensor) -> TensorDescriptor:
    """Blocks [1, 64, 64] of x [B, K, N]; x is copied if TMA cannot address it."""
    size = x.element_size()
    if (
        x.stride(2) != 1
        or min(x.stride()) <= 0
        or any(step * size % 16 for step in x.stride()[:2])
        or x.data_ptr() % 16
    ):
        lines = x.new_empty(*x.shape[:2], -(-x.shape[2] * size // LINE) * LINE // size)
        x = lines[:, :, : x.shape[2]].copy_(x)
    block = [1, 64, LINE // size]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, swizzled_layout(LINE, size, 3))


def compress(
    x: Tensor,
    weight: Tensor,
    user: Tensor | None = None,
    w_user: Tensor | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """out[b] = weight x[b] + w_user user[owner of b]: [B, M, N] of x's dtype, contiguous.

    x [B, K, N], weight [M, K], user [R, Ku, N], w_user [M, Ku], float16 or bfloat16, N a multiple of 128, any strides;
    offsets [R + 1] as in the public function. Without users their part is left out.
    """
    num_entries, depth, width = x.shape
    num_rows = weight.shape[0]
    out = torch.empty(num_entries, num_rows, width, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    tiles = tiling(num_rows)
    row_tiles, column_tiles = tiles
    blocks_n, block_k = width // 64, LINE // x.element_size()
    total = num_tiles(num_entries, blocks_n, tiles)
    programs = processors(x.device)
    owners, scratch, flags = out, out, out
    num_users, user_shared, user_tiles, user_steps, blocks = 0, 0, 0, 0, 0
    user_descs, within = None, False
    if user is not None and w_user is not None and offsets is not None and user.shape[0]:
        num_users = user.shape[0]
        within = 3 * num_users > 2 * num_entries
        user_steps = -(-user.shape[1] // block_k)
        num_flags = 1
        if not within:
            user_shared, user_tiles = _tiles_of_users(num_users, blocks_n, tiles, programs)
            num_flags += num_users * blocks_n * (row_tiles + 2 * column_tiles)
            blocks = num_users * blocks_n * (3 * row_tiles + 4 * column_tiles)
            scratch = torch.empty(blocks * BLOCK.value, dtype=torch.float32, device=x.device)
        weight, w_user, owners, flags = prepare(weight, w_user, offsets, num_entries, num_flags)
        user_descs = _weight_descriptor(w_user), batch_descriptor(user)
    else:
        weight = aligned_rows(weight, LINE)
    descs = _weight_descriptor(weight), batch_descriptor(x)
    constants = row_tiles, column_tiles, blocks_n, STAGES, user_shared, within
    _launch_forward(
        (min(programs, total + user_tiles), 1, 1),
        (x.device, x.dtype, *constants),
        *descs, *(user_descs or descs), batch_descriptor(out), owners, scratch, flags, user_tiles,
        total, -(-depth // block_k), user_steps, blocks, num_entries, num_users, *constants,
    )  # fmt: skip
    return out


def _tiles_of_users(num_users: int, blocks_n: int, tiles: tuple[int, int], programs: int) -> tuple[int, int]:
    """(USER_SHARED, tiles of the users): small tiles if there are then no more of them than programs."""
    small = num_tiles(num_users, blocks_n, tiles, shared=1)
    return (1, small) if small <= programs else (3, num_tiles(num_users, blocks_n, tiles))


@gluon.jit(do_not_specialize=_SIZES)
def _compress_kernel(
    w_desc, x_desc, wu_desc, xu_desc, out_desc, owners, scratch, flags, num_user_tiles,
    num_tiles, num_steps, num_user_steps, num_blocks, num_entries, num_users,
    ROW_TILES: gl.constexpr, COLUMN_TILES: gl.constexpr, BLOCKS_N: gl.constexpr, STAGES: gl.constexpr,
    USER_SHARED: gl.constexpr, WITHIN: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = w_desc.dtype
    ring = gl.allocate_shared_memory(dtype, [STAGES * PANELS, 64, w_desc.block_type.shape[1]], w_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    barriers = (full, empty)
    gl.warp_specialize(
        [
            (consume, (out_desc, ring, barriers, owners, scratch, flags, num_user_tiles,
                       num_tiles, num_steps, num_user_steps, num_blocks, num_entries, num_users,
                       ROW_TILES, COLUMN_TILES, BLOCKS_N, STAGES, USER_SHARED, WITHIN, 0)),
            (consume, (out_desc, ring, barriers, owners, scratch, flags, num_user_tiles,
                       num_tiles, num_steps, num_user_steps, num_blocks, num_entries, num_users,
                       ROW_TILES, COLUMN_TILES, BLOCKS_N, STAGES, USER_SHARED, WITHIN, 1)),
            (load, (w_desc, x_desc, wu_desc, xu_desc, ring, barriers, owners, num_user_tiles, num_tiles, num_steps,
                    num_user_steps, num_entries, num_users,
                    ROW_TILES, COLUMN_TILES, BLOCKS_N, STAGES, USER_SHARED, WITHIN)),
        ],
        [4, 4],
        [_CONSUMER_REGISTERS, _LOADER_REGISTERS],
    )  # fmt: skip


_launch_forward = Launcher(_compress_kernel, num_warps=4, maxnreg=_MAX_REGISTERS)
