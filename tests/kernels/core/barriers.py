"""Which barriers of threads a Hopper kernel uses."""

from __future__ import annotations

import re

from kernels.testing import Compiled


def assert_turns_have_barriers_of_their_own(compiled: Compiled) -> None:
    """The two of `kernels.core.hopper` where two warpgroups of 128 threads meet: Triton uses them for nothing else."""
    barriers = re.findall(r"\bbar(?:rier)?\.(?:sync|arrive)\s+(\d+)(, 256)?", compiled.ptx)
    turns = {number for number, of_both in barriers if of_both}
    assert turns == {"14", "15"}
    assert not turns & {number for number, of_both in barriers if not of_both}
