"""Which backend an ordinary call gets, and which one as soon as one fact of it is another."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import kernels  # noqa: F401  declares the operators
from kernels.core import dispatch

pytest.importorskip("triton")

SM_90: dict[str, Any] = {"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16}
CPU: dict[str, Any] = {"device": "cpu", "capability": None}
FP8 = {"dtype": torch.float8_e4m3fn, "group": 128}
NARROW = {"head_dim": 32, "value_dim": 32}
LAYER = {"group": 128, "in_features": 512, "out_features": 512, "out_dtype": torch.bfloat16}
MLP = {"group": 128, "widths": (256, 384, 128), "bias": torch.float32, "out_dtype": torch.bfloat16}
SM_100 = {"capability": (10, 0)}
# Of an operator: facts of the call, and what differs from it with who serves then.
CHOICES: dict[str, tuple[dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    "jagged_attention": (
        {},
        [
            ({}, "hopper"),
            ({"with_lse": True}, "hopper"),
            ({"query_rows": 8}, "decode"),
            ({"query_rows": 8, "with_lse": True}, "decode"),
            ({"query_rows": 8, "masked": True}, "hopper"),
            (NARROW, "torch"),
            (NARROW | {"with_lse": True}, "triton"),
            ({"few_queries": True}, "torch"),
            ({"capability": (8, 0)}, "torch"),
            ({"biased": True}, "triton"),
            ({"block_local": True}, "triton"),
            ({"structured": True}, "triton"),
            ({"structured": True, "query_rows": 8}, "triton"),
            ({"positive_scale": False}, "triton"),  # scores are masked before they are scaled
            ({"dtype": torch.float32}, "triton"),
            ({"dtype": torch.float64}, "reference"),
            ({"head_dim": 264}, "reference"),
            ({"capability": (7, 5)}, "reference"),
            (CPU, "reference"),
        ],
    ),
    "gdpa": (
        {"activations": ("gelu",)},
        [
            ({}, "hopper"),
            ({"structured": True}, "triton"),
            ({"biased": True}, "triton"),
            *(({"capability": chip}, "triton") for chip in ((8, 0), (8, 9), (10, 0))),
            ({"capability": (7, 5)}, "reference"),
            ({"dtype": torch.float64}, "reference"),
            ({"value_dim": 264}, "reference"),
            (CPU, "reference"),
        ],
    ),
    **{
        op: (
            {"head_dim": 128, "value_dim": 128},
            [
                ({}, "hopper"),
                ({"head_dim": 64, "value_dim": 64}, "hopper"),
                *((change, "reference") for change in (SM_100, {"dtype": torch.float32}, {"head_dim": 96})),
                ({"positive_scale": False}, "reference"),
            ],
        )
        for op in ("joint_attention", "tree_attention")
    },
    "linear_compression": (
        {"dtype": torch.float16, "num_out": 433, "width": 256},
        [({"least_depth": 1}, "hopper"), ({"least_depth": 0}, "triton")],
    ),
    "float32_linear": (
        {"in_features": 512},
        [
            ({}, "split"),
            *(({fact: value}, "reference") for fact, value in (("dtype", torch.float32), ("weight", torch.float64))),
            ({"in_features": 64}, "reference"),
            ({"capability": (7, 5)}, "reference"),
            (CPU, "reference"),
        ],
    ),
    "mxfp8_linear": (
        LAYER,
        [
            ({}, "hopper"),
            *((change, "reference") for change in ({"group": 32}, {"in_features": 96}, {"out_dtype": torch.float32})),
            (SM_100, "torch"),
            (SM_100 | {"in_features": 48}, "reference"),
            (SM_100 | {"dtype": torch.float64}, "reference"),
            ({"capability": (10, 3)}, "reference"),
        ],
    ),
    "mxfp8_silu_mlp": (
        MLP,
        [
            ({}, "hopper"),
            *(({"widths": widths}, "reference") for widths in ((256, 96, 128), (256, 384, 96))),
            *((change, "reference") for change in ({"group": 32}, {"out_dtype": torch.float32}, SM_100)),
            ({"bias": torch.float64}, "reference"),
        ],
    ),
    "moe_hidden": (
        FP8 | {"in_features": 256, "out_features": 256},
        [
            ({}, "hopper"),
            ({"group": 0, "in_features": 192}, "hopper"),
            *((change, "reference") for change in ({"group": 32}, {"in_features": 192}, {"out_features": 64}, SM_100)),
            ({"group": 0, "in_features": 96}, "reference"),
        ],
    ),
    "grouped_mm": (
        {"in_features": 512, "out_features": 512},
        [
            ({}, "hopper"),
            ({"in_features": 520}, "torch"),
            ({"out_features": 12}, "reference"),
            (SM_100, "torch"),
            ({"capability": (9, 9)}, "reference"),
        ],
    ),
    "grouped_wgrad": ({"in_features": 512, "out_features": 512}, [({"multiple": 32}, "torch"), ({}, "hopper")]),
    "mxfp8_grouped_fprop": (
        FP8 | {"in_features": 512, "out_features": 512},
        [({}, "hopper"), ({"out_features": 64}, "reference"), (SM_100 | {"group": 32}, "torch"), (SM_100, "torch")],
    ),
    "mxfp8_grouped_wgrad": (FP8 | {"in_features": 96, "out_features": 160}, [(SM_100, "torch")]),
    "mxfp8_grouped_mm": ({"in_features": 96, "out_features": 160, "group": 32}, [(SM_100, "torch"), ({}, "reference")]),
}


@pytest.mark.parametrize("op", CHOICES)
def test_who_serves(op: str) -> None:
    ordinary, changes = CHOICES[op]
    found = [re.search(r"(\S+) +chosen", dispatch.explain(op, **SM_90 | ordinary | change)) for change, _ in changes]
    assert [(change, line and line[1]) for (change, _), line in zip(changes, found, strict=True)] == changes
