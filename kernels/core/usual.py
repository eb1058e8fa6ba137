"""What `dispatch.explain` takes for the facts of a call that it is not told: those of an ordinary one."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch

SIZES: dict[str, Hashable] = {
    "width": 128,
    "columns": 128,
    "inner": 128,
    "head_dim": 64,
    "value_dim": 64,
    "in_features": 256,
    "out_features": 256,
    "num_out": 256,
    "num_levels": 1,
    "least_depth": 256,
    "dim": 256,
    "expert_dim": 256,
    "out_dim": 256,
    "num_experts": 8,
    "k": 2,
    "group": 32,
    "axis": -1,
    "query_rows": 64,
    "widths": (384, 384, 768),
    "depth": 128,
}
OPTIONS: dict[str, Hashable] = {
    "masked": False,
    "block_local": False,
    "biased": False,
    "windowed": False,
    "same_offsets": True,
    "positive_scale": True,
    "few_queries": False,
    "one_tile": False,
    "angles_learn": False,
    "angles": torch.float32,
    "weight": torch.float32,
    "operands": "bf16",
    "many": True,
}
DTYPES = ("out_dtype", "bias")
"""Facts that are the dtype of a further tensor, by default that of the first."""


HANDED_ON: dict[str, tuple[str, ...]] = {"joint_attention": ("head_dim", "value_dim", "positive_scale")}
"""Facts of an operator that a verifier does not name because it hands them to another one."""


def usual_facts(given: dict[str, Hashable], names: Iterable[str]) -> dict[str, Hashable]:
    """Values for the facts of these names, as far as there are usual ones, that go with those that are `given`."""
    device = str(given.get("device", "cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
    dtype = given.get("dtype", torch.bfloat16)
    capability = None
    if device == "cuda":
        capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    known = {"device": device, "capability": capability, "dtype": dtype, **SIZES, **OPTIONS}
    known |= dict.fromkeys(DTYPES, dtype)
    return {name: known[name] for name in names if name in known}
