"""The Hopper kernels of linear compression: compiled for it here, run against the reference where there is one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernels.core import triton as triton_common
from kernels.ikbo.hopper import lce_forward, lce_prepare, lce_weight
from kernels.ikbo.hopper.lce_forward import compress, tiling
from kernels.ikbo.hopper.lce_tiles import CHUNK, num_tiles
from kernels.ikbo.hopper.lce_weight import weight_gradient
from kernels.testing import Tolerance, assert_close_to_oracle, check_gradients, compile_ahead, poisoned_empty
from tests.kernels.core.descriptors import descriptor
from tests.kernels.core.devices import on_hopper
from tests.kernels.core.interpreting import interpret
from tests.kernels.ikbo.lce_cases import Case, call

SHARED_LIMIT = 227 * 1024
INSTRUCTIONS = ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg.inc")


@pytest.mark.parametrize(
    ("user_shared", "within", "tiles", "blocks_n", "dtype", "spills"),
    [
        (3, False, (1, 1), 4, "fp16", 256),
        (0, True, (2, 0), 2, "bf16", 0),
    ],
    ids=str,
)
def test_forward_compiles_to_asynchronous_hopper_instructions(
    user_shared: int, within: bool, tiles: tuple[int, int], blocks_n: int, dtype: str, spills: int
) -> None:
    kernel = lce_forward._compress_kernel
    stages = lce_forward.STAGES
    constants = {
        "ROW_TILES": tiles[0],
        "COLUMN_TILES": tiles[1],
        "BLOCKS_N": blocks_n,
        "STAGES": stages,
        "USER_SHARED": user_shared,
        "WITHIN": within,
    }
    signature = {name: "i32" for name in kernel.arg_names if name not in constants}
    signature |= dict.fromkeys(("w_desc", "wu_desc"), descriptor(dtype, 64, 64))
    signature |= dict.fromkeys(("x_desc", "xu_desc"), descriptor(dtype, 1, 64, 64))
    signature |= {"out_desc": descriptor("fp16", 1, 64, 64), "owners": "*i32", "flags": "*i32"}
    signature["scratch"] = "*fp32"
    compiled = compile_ahead(kernel, signature, constants, target="sm_90", gluon=True, maxnreg=168)
    for instruction in (*INSTRUCTIONS, "stmatrix"):
        assert compiled.contains(instruction), instruction
    assert compiled.spill_bytes <= spills  # outside the loop over the tokens
    assert compiled.shared_bytes <= SHARED_LIMIT


def test_weight_gradient_compiles_to_asynchronous_hopper_instructions() -> None:
    kernel = lce_weight._compress_weight_kernel
    constants = {"ROW_TILES": 1, "COLUMN_TILES": 1, "BLOCKS_N": 4, "STAGES": lce_weight.STAGES}
    signature = {name: "i32" for name in kernel.arg_names if name not in constants}
    signature |= dict.fromkeys(("grad_desc", "x_desc"), descriptor("fp16", 1, 64, 64)) | {"parts": "*fp32"}
    compiled = compile_ahead(kernel, signature, constants, target="sm_90", gluon=True, maxnreg=168)
    for instruction in INSTRUCTIONS:
        assert compiled.contains(instruction), instruction
    assert compiled.spill_bytes <= 64  # a few addresses of the result, outside the loop
    assert compiled.shared_bytes <= SHARED_LIMIT


def test_entries_before_the_first_request_are_given_a_row_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, lce_prepare, triton_common)
    offsets = torch.tensor([0, 2, 3, 5])[1:]  # the search reads what lies before them
    weight = torch.randn(4, 64)
    *_, owners, flags = lce_prepare.prepare(weight, weight, offsets, 5, 3)
    assert set(owners.tolist()) <= {0, 1}
    assert flags.tolist() == [0, 0, 0]


def test_weights_are_copied_to_lines_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, lce_prepare, triton_common)
    offsets = torch.tensor([0, 300])
    for weight, w_user in (
        (torch.randn(5, 1100), torch.randn(70, 5).mT),
        (torch.randn(3, 64), torch.randn(3, 65)),
        (torch.randn(3, 65)[:, 1:], torch.randn(3, 32)),
    ):
        with poisoned_empty():
            *copies, owners, flags = lce_prepare.prepare(weight, w_user, offsets, 300, 11)
        for source, copy in zip((weight, w_user), copies, strict=True):
            assert torch.equal(copy, source)
            assert copy.stride(1) == 1
            assert copy.stride(0) % (lce_prepare.LINE // 4) == 0
        assert not owners.any()
        assert not flags.any()


@pytest.mark.parametrize("num_rows", range(1, 1500, 37))
def test_tiles_cover_a_weight_with_little_waste(num_rows: int) -> None:
    rows, columns = tiling(num_rows)
    blocks = -(-num_rows // 64)
    assert blocks <= 3 * rows + 4 * columns <= max(blocks + (blocks in (1, 2, 5)) + (blocks == 1), 3)
    for shared, parts in ((3, 1), (1, 3)):
        assert num_tiles(5 * CHUNK, 1, (rows, columns), shared) == 5 * parts * 3 * (3 * rows + 4 * columns) // 3
        assert (
            num_tiles(5 * CHUNK + 1, 1, (rows, columns), shared) - num_tiles(5 * CHUNK, 1, (rows, columns), shared)
            == parts * rows + columns
        )


# Mostly one number of outputs and one width: every other one is another kernel to compile.
SHAPES = {
    "published": Case(((70, 70, 5),), num_out=433, depth=872, user_depths=(1184,), width=256),
    "published, unaligned": Case(((20, 0, 17, 0),), num_out=433, depth=866, user_depths=(1178,), width=256),
    "one candidate": Case(((1,),), num_out=433, depth=40, user_depths=(100,), width=256),
    "one candidate each": Case(((1,) * 150,), num_out=433, depth=129, user_depths=(70,), width=256),
    "two candidates each": Case(((2,) * 150,), num_out=433, depth=129, user_depths=(70,), width=256),
    "a huge request among empty ones": Case(((0,) * 5 + (400,) + (0,) * 5,), num_out=433, depth=72, width=256),
    "few tokens": Case(((3, 4),), num_out=433, depth=8, user_depths=(1,), width=256),
    "no candidates": Case(((0, 0),), num_out=433, depth=8, width=256),
    "no requests": Case((), num_out=433, depth=872, width=256),
    "tiles of one form": Case(((3, 0, 8),), num_out=256, depth=200, user_depths=(500,), width=128),
}


@on_hopper
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.float16) for shape in SHAPES), ("two candidates each", torch.bfloat16)],
)
def test_against_the_reference(shape: str, dtype: torch.dtype) -> None:
    # The gradient of the users rounds the sum over a request's candidates, and its own result.
    tolerance = Tolerance("products of sums rounded once more", roundings=2, reduction=150_000)
    with poisoned_empty():
        check_gradients(
            lambda **tensors: call("hopper", **tensors),
            lambda **tensors: call("reference", **tensors),
            SHAPES[shape].inputs("cuda", dtype),
            tolerance,
        )


@on_hopper
def test_runs_give_equal_bits() -> None:
    tensors = SHAPES["published"].inputs("cuda", torch.float16)
    arguments = tensors["candidate"], tensors["w_candidate"], tensors["user_0"], tensors["w_user_0"]
    out = compress(*arguments, tensors["offsets_0"])
    gradient = weight_gradient(out, tensors["candidate"])
    for _ in range(20):
        assert torch.equal(compress(*arguments, tensors["offsets_0"]), out)
        assert torch.equal(weight_gradient(out, tensors["candidate"]), gradient)


@on_hopper
def test_entries_do_not_reach_into_each_other() -> None:
    """Tokens are not a multiple of what the kernel loads at once: what lies behind an entry's must not matter."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(4, 70, 256, device="cuda", dtype=torch.float16, generator=generator)
    weight = torch.randn(433, 70, device="cuda", dtype=torch.float16, generator=generator)
    x[2] = torch.nan
    out = compress(x, weight)
    assert bool(out[2].isnan().all())
    others = torch.tensor([0, 1, 3], device="cuda")
    oracle = weight.double() @ x[others].double()
    assert_close_to_oracle(out[others], oracle, Tolerance("one product", reduction=70))
