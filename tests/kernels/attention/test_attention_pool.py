"""Attention over values that are keys at once: the specification, the kernels in the interpreter, compiled for absent
chips, and on a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.attention import attention_pool, jagged_attention, pools
from kernels.attention.pool_tiles import shared_bytes, tile_of
from kernels.core import dispatch
from kernels.testing import Tolerance, check_gradients, compile_ahead, poisoned_empty, serving
from tests.kernels.attention.attention_cases import EXACT, EXACT_GRADIENTS, outputs
from tests.kernels.core.devices import SHARED_LIMITS, on_chips
from tests.kernels.jagged.jagged_problems import offsets_of

# Queries and values: no queries, no values, neither, one value, odd lengths.
LENGTHS = [2, 0, 4, 0, 1, 3, 4], [300, 17, 0, 0, 1, 64, 111]
SCALE = 0.2
FACTS = {"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "width": 128, "query_rows": 4}


def gradients(rows: int, dtype: torch.dtype) -> Tolerance:
    return Tolerance(
        "the gradient of a score is p * (dp - sum p dp): dp and the sum are rounded at about ten times the size of "
        "their difference, which counts as 100 roundings; in a row of one value they are equal and exact but for "
        "float32 sums, rounded at up to 30 times the size of other gradients, which counts as 1000 roundings of "
        f"float32; sums over up to {rows} rows",
        roundings=1000 if dtype is torch.float32 else 100,
        reduction=rows,
    )


def inputs_of(heads: int, width: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    # Scores of unit variance, as those of queries that a projection was absorbed into.
    return {
        "q": random(sum(LENGTHS[0]), heads, width) / (SCALE * width**0.5),
        "values": random(sum(LENGTHS[1]), width),
    }


def attend(backend: str, device: str = "cpu", **inputs: Tensor) -> Tensor:
    offsets = offsets_of(LENGTHS[0]).to(device), offsets_of(LENGTHS[1], torch.int32).to(device)
    return attention_pool(**inputs, q_offsets=offsets[0], k_offsets=offsets[1], max_q=4, max_k=300, scale=SCALE,
                          backend=backend)  # fmt: skip


def check(heads: int, width: int, dtype: torch.dtype, device: str, backend: str) -> None:
    inputs = inputs_of(heads, width, dtype, device)
    oracle = partial(attend, "reference", device)
    with poisoned_empty():
        check_gradients(partial(attend, backend, device), oracle, inputs, outputs(300), gradients(300, dtype))


def test_the_specification_is_attention_whose_keys_are_its_values() -> None:
    def oracle(q: Tensor, values: Tensor) -> Tensor:
        offsets = offsets_of(LENGTHS[0]), offsets_of(LENGTHS[1])
        return jagged_attention(q, values[:, None], values[:, None], *offsets, max_q=4, max_k=300, scale=SCALE)

    inputs = inputs_of(3, 24, torch.float64)
    check_gradients(partial(attend, "reference"), oracle, inputs, EXACT, EXACT_GRADIENTS)


def test_no_rows_and_no_values() -> None:
    none, values = torch.zeros(1, dtype=torch.int64), torch.zeros(0, 8)
    assert attention_pool(values.view(0, 2, 8), values, none, none, max_q=1, max_k=1, scale=1.0).shape == (0, 2, 8)
    q = torch.randn(2, 1, 8, requires_grad=True)
    out = attention_pool(q, values, torch.tensor([0, 2]), torch.tensor([0, 0]), max_q=2, max_k=0, scale=1.0)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(torch.autograd.grad(out.sum(), q)[0], torch.zeros_like(q))


def test_arguments_that_do_not_fit() -> None:
    one = torch.tensor([0, 3])
    with pytest.raises(ValueError, match=r"q \(3, 2, 8\), values \(3, 6\); expected q \[Nq, H, d\]"):
        attention_pool(torch.randn(3, 2, 8), torch.randn(3, 6), one, one, max_q=3, max_k=3, scale=1.0)
    two = torch.tensor([0, 1, 3])
    with pytest.raises(ValueError, match="q has 1 rows and values have 2"):
        attention_pool(torch.randn(3, 2, 8), torch.randn(3, 8), one, two, max_q=3, max_k=3, scale=1.0)
    with pytest.raises(ValueError, match="more than max_k=2"):
        attention_pool(torch.randn(3, 2, 8), torch.randn(3, 8), one, one, max_q=3, max_k=2, scale=1.0)


@pytest.mark.parametrize(("heads", "width"), [(1, 16), (3, 24), (2, 64), (8, 128), (4, 200)], ids=str)
def test_in_the_interpreter(heads: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", minversion="3.7", reason="earlier interpreters fail with current NumPy versions")
    from kernels.attention.triton import pool
    from tests.kernels.core.interpreting import interpret

    interpret(monkeypatch, pool)
    monkeypatch.setitem(dispatch._registry, "attention_pool", serving("attention_pool", "triton"))
    dispatch._chosen.clear()
    check(heads, width, torch.float32, "cpu", "triton")
    dispatch._chosen.clear()


@pytest.mark.parametrize("num_rows", [1, 40, 600])
def test_the_longest_rows_come_first(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", minversion="3.7", reason="earlier interpreters fail with current NumPy versions")
    from kernels.attention.triton import pool
    from tests.kernels.core.interpreting import interpret

    interpret(monkeypatch, pool)
    lengths = torch.randint(50, (num_rows,), generator=torch.Generator().manual_seed(0))
    order = pool.longest_first(offsets_of(lengths.tolist()))
    assert torch.equal(order.long(), lengths.argsort(descending=True, stable=True))


SIZES = [(128, 4), (256, 32), (512, 8), (512, 32), (1024, 16)]


@pytest.mark.parametrize(
    ("name", "width", "rows", "target"), on_chips((name, *size) for name in ("forward", "backward") for size in SIZES)
)
def test_compiles_within_registers_and_shared_memory(name: str, width: int, rows: int, target: str) -> None:
    pytest.importorskip("triton")
    from kernels.attention.triton import pool

    tile = tile_of(width, rows, 2, name == "backward", SHARED_LIMITS[target])
    if tile is None:
        assert shared_bytes(width, rows, 2) > SHARED_LIMITS[target]
        return
    constants = {"HEADS": 2, "WIDTH": width, "HALF": tile.features // 2, "BLOCK_M": tile.rows, "BLOCK_N": tile.values,
                 "PRECISION": "tf32", "ORDERED": True}  # fmt: skip
    kernel = getattr(pool, f"attention_pool_{name}_kernel")
    strides = [argument for argument in kernel.arg_names if argument.endswith(("_token", "_head"))]
    types = {"lse": "*fp32", "q_offsets": "*i64", "offsets": "*i64", "order": "*i32", "scale": "fp32"}
    types |= dict.fromkeys([*strides, "total_q"], "i32")
    signature = {argument: types.get(argument, "*bf16") for argument in kernel.arg_names if argument not in constants}
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "divisible_by_16": strides}
    compiled = compile_ahead(kernel, signature, constants, target=target, **options)
    # Of 1,024 features on the chips that are not sm_90, a few addresses.
    assert compiled.spill_bytes <= (0 if target == "sm_90" or width < 1024 else 16)
    assert compiled.shared_bytes <= SHARED_LIMITS[target]


def test_who_serves() -> None:
    def refusal(**change: object) -> str:
        return dispatch.explain("attention_pool", "triton", **FACTS | change)

    assert dispatch.serving("attention_pool", torch.empty(0), width=128, query_rows=4) == "reference"
    assert dispatch.selection("attention_pool", **FACTS) == ("triton", {})
    assert dispatch.selection("attention_pool", **FACTS | {"width": 1024, "query_rows": 16})[0] == "triton"
    assert "needs max_q times heads of at most 32" in refusal(query_rows=33)
    assert "needs values of at most 1024 features, got 1025" in refusal(width=1025)
    large = refusal(width=1024, query_rows=32)
    assert "needs 320 KiB of shared memory for 32 queries and heads of 1024 features in bfloat16" in large
    assert "a program may use 227" in large
    assert "may use 99" in refusal(width=1024, query_rows=16, capability=(8, 6))
    assert "not torch.float64" in refusal(dtype=torch.float64)
    assert pools(torch.empty(0), 128, 32)
    assert not pools(torch.empty(0), 128, 33)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
class TestOnAGPU:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    @pytest.mark.parametrize(
        ("heads", "width"), [(1, 16), (3, 24), (2, 64), (1, 128), (8, 128), (5, 200), (4, 256), (4, 512), (2, 768),
                             (4, 1024)], ids=str
    )  # fmt: skip
    def test_matches_the_reference(self, heads: int, width: int, dtype: torch.dtype) -> None:
        facts = FACTS | {"dtype": dtype, "width": width, "query_rows": 4 * heads}
        facts["capability"] = torch.cuda.get_device_capability()
        if dispatch.selection("attention_pool", **facts)[0] != "triton":
            pytest.skip(dispatch.selection("attention_pool", **facts)[1]["triton"])
        check(heads, width, dtype, "cuda", "triton")

    def test_views_bits_and_rows_that_do_not_exist(self) -> None:
        q_offsets, k_offsets = offsets_of([2] * 50).cuda(), offsets_of([n * 7 for n in range(50)]).cuda()
        wide = torch.randn(int(k_offsets[-1]), 3, 128, device="cuda", dtype=torch.bfloat16)
        by_head = torch.randn(2, 100, 128, device="cuda", dtype=torch.bfloat16)
        grad = torch.randn_like(by_head)
        pool = partial(attention_pool, max_q=2, max_k=343, scale=0.1, backend="triton")
        results = []
        for copied in (False, True) * 2:
            views = wide[:, 1], by_head.transpose(0, 1)
            values, q = (x.contiguous() if copied else x for x in views)
            leaves = [x.detach().requires_grad_() for x in (q, values)]
            out = pool(*leaves, q_offsets, k_offsets)
            cotangent = grad.transpose(0, 1)
            cotangent = cotangent.contiguous() if copied else cotangent
            results.append((out, *torch.autograd.grad(out, leaves, cotangent)))
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
        none = torch.zeros(1, dtype=torch.int64, device="cuda")
        assert pool(by_head[:, :0].transpose(0, 1), wide[:0, 1], none, none).shape == (0, 2, 128)

    def test_opcheck(self) -> None:
        from kernels.attention.triton import operators  # noqa: F401  defines the operator

        q_offsets, k_offsets = offsets_of([2, 1]).cuda(), offsets_of([5, 9]).cuda()
        q = torch.randn(3, 2, 16, device="cuda", dtype=torch.float16, requires_grad=True)
        values = torch.randn(14, 16, device="cuda", dtype=torch.float16, requires_grad=True)
        operator = torch.ops.gemsmith.attention_pool.default
        torch.library.opcheck(operator, (q, values, q_offsets, k_offsets, 2, 0.25))
