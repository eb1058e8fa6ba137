"""The product of rows with themselves on Hopper: compiled, what it refuses, and on a GPU held to the reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from kernels import dispatch, jagged
from kernels.jagged import gluon_square
from kernels.testing import Tolerance, check_gradients, compile_ahead, poisoned_empty
from tests.kernels.descriptors import descriptor
from tests.kernels.devices import HOPPER
from tests.kernels.jagged_problems import offsets_of

FEW_WORDS = 64
TABLES = {"offsets": "*i64", "squares": "*i64"}


def test_compiles() -> None:
    kernel = gluon_square._bmm_outer_kernel
    constants = {"D_PIECES": 4, "LEVELS": 2}
    signature = {name: "i32" for name in kernel.arg_names if name not in constants} | TABLES | {"out": "*bf16"}
    signature |= dict.fromkeys(("x_desc", "y_desc"), descriptor("bf16", 64, 64))
    compiled = compile_ahead(
        kernel, signature, constants, target="sm_90", gluon=True, maxnreg=gluon_square._MAX_REGISTERS
    )
    assert compiled.spill_bytes <= FEW_WORDS
    assert compiled.contains("wgmma.mma_async")
    assert not compiled.serialized
    assert compiled.shared_bytes <= 227 * 1024


def test_what_it_serves() -> None:
    op = "jagged_jagged_bmm_jagged_out"
    hopper = {"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "width": 256}
    assert "gluon        priority  20  chosen" in dispatch.explain(op, **hopper)
    for name, value in {"capability": (10, 0), "dtype": torch.float32, "width": 20}.items():
        assert "refused" in dispatch.explain(op, "gluon", **hopper | {name: value})


LENGTHS = [[0, 5, 0, 70, 1, 0], [1], [0, 0], [], [64, 32, 96, 128], [0] * 50 + [517] + [0] * 50, [1] * 170 + [33] * 900]


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "width"),
    [(lengths, 256) for lengths in LENGTHS] + [(LENGTHS[0], width) for width in (8, 40, 64, 200)],
    ids=lambda value: str(value)[:20],
)
def test_matches_the_reference(lengths: list[int], width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(width)
    offsets = offsets_of(lengths, torch.int32 if len(lengths) % 2 else torch.int64).cuda()
    squares, longest = jagged.squared_offsets(offsets), max(lengths, default=0)
    total = sum(length * length for length in lengths)
    # Rows are the ends of wider ones, at places that TMA cannot address.
    inputs = {
        name: torch.randn(sum(lengths), width + 4, device="cuda", generator=generator).to(dtype)[:, 4:] for name in "xy"
    }

    def run(backend: str, **tensors: torch.Tensor) -> torch.Tensor:
        return jagged.jagged_jagged_bmm_jagged_out(
            **tensors, offsets=offsets, squares=squares, total=total, max_length=longest, backend=backend
        )

    tolerance = Tolerance("the result rounded; sums over a row or its width", reduction=max(longest, width))
    with poisoned_empty():
        check_gradients(partial(run, "gluon"), partial(run, "reference"), inputs, tolerance)
        assert torch.equal(run("gluon", **inputs), run("gluon", **inputs))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_what_is_not_finite_stays_in_its_row() -> None:
    lengths = [3, 70, 5, 64, 1]
    offsets = offsets_of(lengths).cuda()
    squares = jagged.squared_offsets(offsets)
    x, y = (torch.randn(sum(lengths), 64, device="cuda").bfloat16() for _ in "xy")
    y[20, 3], y[74, 4], x[1, 1] = float("nan"), float("inf"), -float("inf")
    out, exact = (
        jagged.jagged_jagged_bmm_jagged_out(x.to(kind), y.to(kind), offsets, squares, int(squares[-1]), 70)
        for kind in (torch.bfloat16, torch.float64)
    )
    assert torch.equal(out.isfinite(), exact.isfinite())
    assert torch.equal(out.isnan(), exact.isnan())
