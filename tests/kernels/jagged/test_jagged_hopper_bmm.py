"""The stream behind `jagged_jagged_bmm` on Hopper: compiled for it anywhere, compared with the reference on one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels import jagged
from kernels.core import dispatch
from kernels.jagged.hopper import bmm
from kernels.testing import Tolerance, check_gradients, compile_ahead, poisoned_empty
from tests.kernels.jagged.jagged_problems import offsets_of


@pytest.mark.parametrize(("width", "columns"), [(256, 8), (80, 3)])
def test_compiles(width: int, columns: int) -> None:
    constants = {"T": columns, "STEPS": 10, **bmm.config(width)}
    num_warps = constants.pop("num_warps")
    kernel = bmm._bmm_stream_kernel
    kinds = {"offsets": "*i64", "x": "*bf16", "y": "*bf16", "out": "*bf16"}
    signature = {name: kinds.get(name, "i32") for name in kernel.arg_names if name not in constants}
    compiled = compile_ahead(
        kernel,
        signature,
        constants,
        target="sm_90",
        num_warps=num_warps,
        divisible_by_16=("W", "x_stride"),
        gluon=True,
    )
    assert compiled.spill_bytes == 0
    assert "cp.async.cg.shared.global" in compiled.ptx, "copies are not of 16 bytes"
    assert compiled.contains("mma.sync")
    # Rings of all programs beside each other.
    assert bmm.PROGRAMS * (compiled.shared_bytes + 1024) <= 228 * 1024


def test_what_it_serves() -> None:
    hopper = {"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "width": 256, "columns": 8}
    served = dispatch.explain("jagged_jagged_bmm", **hopper, long_rows=False)
    assert "hopper        chosen" in served
    others = {"capability": (10, 0), "dtype": torch.float32, "width": 72, "columns": 9, "long_rows": True}
    for name, value in others.items():
        facts = hopper | {"long_rows": False, name: value}
        assert "refused" in dispatch.explain("jagged_jagged_bmm", "hopper", **facts)


def test_what_serves_is_remembered_whatever_the_longest_row() -> None:
    x, offsets = torch.ones(3, 64), offsets_of([1, 2])
    jagged.jagged_jagged_bmm(x, x, offsets, 2)
    before = len(dispatch._chosen)
    for longest in range(3, 9):
        jagged.jagged_jagged_bmm(x, x, offsets, longest)
    assert len(dispatch._chosen) == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "columns"), [(256, 8), (64, 3), (80, 5), (208, 1)])
@pytest.mark.parametrize(
    "lengths",
    [
        [0, 5, 0, 70, 1, 0],
        [1],
        [0, 0],
        [],
        [64, 32, 32, 32],
        [0] * 50 + [517] + [0] * 50,
        [1] * 70 + [33] * 900,
        [0] * 3000 + [7] + [0] * 2000 + [40] * 5,
    ],
    ids=lambda value: str(value)[:20],
)
def test_matches_the_reference(lengths: list[int], width: int, columns: int, dtype: torch.dtype) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    generator = torch.Generator("cuda").manual_seed(width)
    offsets, longest = offsets_of(lengths, torch.int32).cuda(), max(lengths, default=0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    # Rows of both are the ends of wider ones, of strides that can be copied from or not.
    before = 16 if columns == 8 else 8
    inputs = {"x": random(sum(lengths), width + before)[:, before:], "y": random(sum(lengths), columns + 1)[:, 1:]}
    with poisoned_empty():
        check_gradients(
            lambda x, y: jagged.jagged_jagged_bmm(x, y, offsets, longest, backend="hopper"),
            lambda x, y: jagged.jagged_jagged_bmm(x, y, offsets, longest, backend="reference"),
            inputs,
            Tolerance("rounded once; sums over 517 places or 256 columns", roundings=2, reduction=517),
        )


@pytest.mark.gpu
def test_what_is_not_finite_stays_in_its_row() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    offsets = offsets_of([5, 3, 40, 7]).cuda()
    x, y = torch.ones(55, 64, device="cuda").bfloat16(), torch.ones(55, 8, device="cuda").bfloat16()
    x[6] = float("nan")
    out = jagged.jagged_jagged_bmm(x, y, offsets, 40, backend="hopper")
    assert out.isfinite().all((1, 2)).tolist() == [True, False, True, True]
