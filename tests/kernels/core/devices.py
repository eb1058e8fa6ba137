"""What tests ask of the machine that they run on, and know of the chips that they compile for."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def on_hopper(test: Any) -> Any:
    """Marks a test that needs a Hopper GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")(test))


# Bytes of shared memory that a program may use.
SHARED_LIMITS = dict.fromkeys(("sm_90", "sm_100"), 227 * 1024)
SHARED_LIMITS |= {"sm_80": 163 * 1024} | dict.fromkeys(("sm_86", "sm_89", "sm_120"), 99 * 1024)
# Those that differ: sm_80 and sm_89 have what sm_86 has, so few kernels are compiled for them too.
TARGETS = ("sm_86", "sm_90", "sm_100", "sm_120")
# What products are in PTX.
PRODUCTS = dict.fromkeys(SHARED_LIMITS, "mma.sync") | {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}
FROM_REGISTERS = {target for target, product in PRODUCTS.items() if product == "mma.sync"}


def on_chips(cases: Iterable[Any], always: str = "sm_90") -> list[Any]:
    """Parameters, each case with each of TARGETS: `make test` has `always` and every second case another in turn, `make
    nightly` all others.

    A kernel that does not compile mostly does so for no chip, and a chip that fails mostly fails for many kernels.
    """
    others = [target for target in TARGETS if target != always]
    found = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        for target in TARGETS:
            often = target == always or (number % 2 == 0 and target == others[number // 2 % len(others)])
            found.append(pytest.param(*values, target, marks=() if often else pytest.mark.nightly))
    return found
