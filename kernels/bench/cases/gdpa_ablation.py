"""What each part of the Hopper forward of GDPA brings: every line adds one part to the kernel of the line before.

    a program per tile    one grid entry per tile and head: nothing overlaps from one tile to the next
    persistent            a program per processor takes tiles in the order of rows, the next one's loads under way
    sorted and dealt      the tiles with the most keys first, dealt as in `kernels.core.scheduling`
    keys shared by tiles  neighbouring tiles of a row on one program, which keeps short keys where they are
    polynomial GELU       no transcendental function, in place of the tanh form

The backend is the fourth line where `max_k` keys fit into shared memory, otherwise the third. In all lines, lists of
tiles are made outside the timing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.core import dispatch
from kernels.core.launch import processors

HOPPER_STEPS = ("a program per tile", "persistent", "sorted and dealt", "keys shared by tiles", "polynomial GELU")


def hopper_steps(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, max_k: int, activation: str
) -> dict[str, Callable[[], Tensor]]:
    """Functions that compute GDPA with score_scale 1, by their names above; the last one with `gelu_poly` for
    `activation`. UnsupportedError off Hopper."""
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
    if reason := dispatch.needs_capability(q.device.type, capability, (9, 0)):
        raise dispatch.UnsupportedError(reason)
    from kernels.core import scheduling
    from kernels.gdpa.hopper.forward import BLOCK_Q, RUN, block_of_keys, launch

    block_k = block_of_keys(k.shape[0], k_offsets.shape[0] - 1, max_k)
    schedule = scheduling.tile_schedule(q_offsets, k_offsets, q.shape[0], max_k, BLOCK_Q, block_k)
    num_tiles = int(schedule[0, 0])
    in_order = schedule.clone()
    tiles = schedule[1 : 1 + num_tiles]
    in_order[1 : 1 + num_tiles] = tiles[tiles[:, scheduling.MAIN_BEGIN.value].argsort()]
    most = processors(q.device)
    items = num_tiles * q.shape[1]

    def step(table: Tensor, programs: int, run: int, activation: str = activation) -> Callable[[], Tensor]:
        def attend() -> Tensor:
            out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
            launch(
                out, q, k, v, table, block_k, min(programs, items), run, (activation,) * q.shape[1], 1.0, 1.0, (-1, -1)
            )
            return out

        return attend

    steps = (
        step(in_order, items, 1),
        step(in_order, most, 1),
        step(schedule, most, 1),
        step(schedule, most, RUN),
        step(schedule, most, RUN, "gelu_poly"),
    )
    return dict(zip(HOPPER_STEPS, steps, strict=True))
