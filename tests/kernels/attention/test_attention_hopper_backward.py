"""The Hopper backward of jagged attention: compiled here, run against a float64 formula where there is a GPU."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.core.launch import Launcher
from kernels.testing import compile_ahead, poisoned_empty

pytest.importorskip("triton")
gl = pytest.importorskip("triton.experimental.gluon.language")

from kernels.attention.gradients import contiguous_gradients, gradients_in_projection  # noqa: E402
from kernels.attention.hopper import backward, tables  # noqa: E402
from kernels.attention.hopper.backward import attention_backward  # noqa: E402
from kernels.core.mask import NO_MASK, Mask  # noqa: E402
from kernels.core.projection import whole_of  # noqa: E402
from kernels.core.rows import Rows  # noqa: E402
from kernels.tokens import parts  # noqa: E402
from tests.kernels.core.descriptors import descriptor  # noqa: E402
from tests.kernels.core.interpreting import interpret  # noqa: E402

# p, ds, out (in delta) and the result are rounded once each, with errors of up to 2^-9 and 2^-12 of the value that add
# like a random walk; measured on an H200: 3e-3 and 4e-4.
LIMITS = {torch.bfloat16: 8e-3, torch.float16: 1e-3}


def compiled(head_dim: int, window: bool, dtype: str, runs: int) -> object:
    tile = descriptor(dtype, 64, head_dim, swizzle=128)
    signature = {f"{name}_desc": tile for name in ("q", "v", "g", "dk", "dv")}
    signature["k_desc"] = descriptor(dtype, 64, head_dim, swizzle=head_dim)
    signature["statistics_desc"] = descriptor("fp32", 64, swizzle=0)
    signature |= {"table_ptr": "*i32", "flags_ptr": "*i32", "tiles_stride": "i32", "scratch_ptr": "*fp32"}
    signature |= {f"{name}_ptr": f"*{dtype}" for name in ("dq", "dk", "dv")}
    signature |= {"exponent": "fp32", "scale": "fp32", "left": "i32", "right": "i32"}
    constants = {f"{name}_STEP": head_dim for name in "QKVG"} | {"HEADS": 2, "GROUP": 2}
    return compile_ahead(
        backward._attention_backward_kernel,
        signature,
        constants
        | {
            "RUNS": runs,
            "LEFT": window,
            "RIGHT": window,
            "DK_PARTS": 2 if window else 1,
            "DV_PARTS": 3 if window else 1,
        },
        target="sm_90",
        gluon=True,
        maxnreg=backward.MAX_REGISTERS,
    )


@pytest.mark.parametrize(
    ("head_dim", "window", "dtype", "runs"), [(64, False, "bf16", 1), (128, False, "fp16", 2), (128, True, "bf16", 1)]
)
def test_compiles_to_asynchronous_hopper_instructions(head_dim: int, window: bool, dtype: str, runs: int) -> None:
    built = compiled(head_dim, window, dtype, runs)
    for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg.inc", "mbarrier.try_wait", "stmatrix"):
        assert built.contains(instruction), instruction
    # Four elements to a reduction; flags keep the order of an element's, so runs do not differ.
    assert built.contains("atom.global.gpu.relaxed.add.v4.f32")
    assert built.shared_bytes <= 227 * 1024
    # Mostly what only the outer loops need is spilled; how much depends on the compiler.
    assert built.spill_bytes <= (16 if head_dim == 64 else 768)
    assert not built.serialized


@pytest.mark.parametrize(
    ("offsets", "target"),
    [
        ("*i32", "sm_90"),
        ("*i64", "sm_100"),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (("*i64", "sm_90"), ("*i32", "sm_100"))),
    ],
)
def test_preparation_compiles_without_spills(offsets: str, target: str) -> None:
    table = compile_ahead(
        tables._row_table_kernel,
        {"q_offsets_ptr": offsets, "k_offsets_ptr": offsets, "table_ptr": "*i32", "num_rows": "i32"},
        {"RUNS": 2, "SHORT": 64, "BLOCK": 4, "OTHERS": 256},
        target=target,
    )
    pointers = {"out_ptr": "*bf16", "grad_ptr": "*bf16", "lse_ptr": "*fp32", "offsets_ptr": offsets}
    pointers |= {"k_offsets_ptr": offsets}
    sizes = ("num_queries", "stride", "out_row", "out_head", "grad_row", "grad_head")
    statistics = compile_ahead(
        tables._attention_statistics_kernel,
        pointers | {"statistics_ptr": "*fp32", "flags_ptr": "*i32", "lse_factor": "fp32"} | dict.fromkeys(sizes, "i32"),
        {"D": 128, "SHORT": 64},
        target=target,
        divisible_by_16=sizes[2:],
    )
    tiles = compile_ahead(
        tables._tile_table_kernel,
        {"rows_ptr": "*i32", "table_ptr": "*i32", "num_rows": "i32"},
        {"RUNS": 2, "SHORT": 64, "MEMBERS": 8, "SCAN": 1024},
        target=target,
    )
    waves = compile_ahead(
        tables._wave_table_kernel,
        {"rows_ptr": "*i32", "table_ptr": "*i32", "num_rows": "i32"},
        {"TOGETHER": 128, "SHORT": 64},
        target=target,
    )
    assert table.spill_bytes == tiles.spill_bytes == waves.spill_bytes == statistics.spill_bytes == 0
    assert statistics.contains("ld.global.v4.b32")


def test_more_rows_are_under_way_where_queries_see_only_keys_before_them() -> None:
    rows = backward.rows_in_flight
    assert [rows(length * 4, 4, 1, False) for length in (64, 512, 2048, 100_000)] == [128, 16, 4, 1]
    assert [rows(length * 4, 4, 1, True) for length in (64, 512, 4096, 8192, 100_000)] == [16, 16, 16, 8, 1]
    assert rows(512 * 96, 96, 1, True) == 1
    assert rows(512 * 4, 4, 2, False) == 16


@pytest.mark.parametrize("short", [0, 64])
@pytest.mark.parametrize("members", [1, 2, 4])
def test_key_tiles_come_in_order_a_few_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, members: int, short: int
) -> None:
    interpret(monkeypatch, tables)
    q_lengths, k_lengths = [10, 0, 300, 64, 7], [300, 5, 128, 0, 129]
    left_out = {1, 3} if short else set()
    q_offsets, k_offsets = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (q_lengths, k_lengths))
    rows = sorted(set(range(5)) - left_out, key=lambda row: -(q_lengths[row] + 64) * (k_lengths[row] + 64))
    count = {row: max(math.ceil(k_lengths[row] / 128), 1) for row in rows}
    expected = []
    for start in range(0, len(rows), members):
        taken = rows[start : start + members]
        for j in range(max(count[row] for row in taken)):
            expected += [(row, j) for row in taken if j < count[row]]
    table = tables.tile_table(q_offsets, k_offsets, sum(k_lengths), members, short=short).tolist()
    assert table[0][0] == len(expected) == sum(count.values())
    for entry, (row, j) in zip(table[1:], expected, strict=False):
        first_tile = int(q_offsets[row]) // 64 + row
        where = [int(q_offsets[row]), q_lengths[row], int(k_offsets[row]), k_lengths[row], first_tile, j]
        assert entry[:6] == where


def test_key_tiles_name_all_runs_of_queries_of_their_row(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, tables)
    # By its first run alone the last row would come first.
    runs, k_lengths = ([10, 0, 300], [200, 0, 64], [0, 3, 1]), [300, 5, 129]
    q_offsets = torch.tensor([[0, *lengths] for lengths in runs]).flatten().cumsum(0)
    k_offsets = torch.tensor([0, *k_lengths]).cumsum(0)
    expected = []
    for row, j in [(0, 0), (2, 0), (0, 1), (2, 1), (0, 2), (1, 0)]:
        for run, lengths in enumerate(runs):
            start = int(q_offsets[4 * run + row])
            later = sum(math.ceil(others[row] / 64) for others in runs[run + 1 :])
            where = [start, lengths[row], int(k_offsets[row]), k_lengths[row], start // 64 + 4 * run + row]
            expected.append([*where, j, later])
    table = tables.tile_table(q_offsets, k_offsets, sum(k_lengths), 2, 3).tolist()
    assert table[0][0] == 6
    assert [entry[:7] for entry in table[1 : 1 + len(expected)]] == expected


@pytest.mark.parametrize("short", [0, 64])
@pytest.mark.parametrize("together", [2, 16])
def test_key_tiles_come_in_order_a_few_tiles_of_queries_at_a_time(
    monkeypatch: pytest.MonkeyPatch, together: int, short: int
) -> None:
    interpret(monkeypatch, tables)
    # The second and the fourth are short. By its scores the last comes behind them.
    q_lengths, k_lengths = [10, 0, 300, 64, 7, 700, 1, 0], [300, 5, 128, 0, 129, 2, 600, 65]
    left_out = {1, 3} if short else set()
    q_offsets, k_offsets = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (q_lengths, k_lengths))
    count = [max(math.ceil(length / 128), 1) for length in k_lengths]
    waves: dict[int, list[int]] = {}
    before = 0
    for row in sorted(set(range(8)) - left_out, key=lambda row: -(q_lengths[row] + 64) * (k_lengths[row] + 64)):
        waves.setdefault(before // together, []).append(row)
        before += max(math.ceil(q_lengths[row] / 64), 1)
    expected = [
        (row, j)
        for rows in waves.values()
        for j in range(max(count[row] for row in rows))
        for row in rows
        if j < count[row]
    ]
    table = tables.wave_table(q_offsets, k_offsets, sum(k_lengths), together, short).tolist()
    assert table[0][0] == len(expected) == sum(count[row] for row in range(8) if row not in left_out)
    for entry, (row, j) in zip(table[1:], expected, strict=False):
        first_tile = int(q_offsets[row]) // 64 + row
        where = [int(q_offsets[row]), q_lengths[row], int(k_offsets[row]), k_lengths[row], first_tile, j]
        assert entry[:6] == where


def test_statistics_lie_on_tiles_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, tables)
    lengths = [10, 0, 100, 64]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    out, grad = (torch.randn(174, 2, 16) for _ in range(2))
    lse = torch.randn(2, 174)
    with poisoned_empty():
        (starts, delta), flags = tables.row_statistics(out, grad, lse, offsets, 100, -2.0)
        (_, some), _ = tables.row_statistics(out, grad, lse, offsets, 100, -2.0, offsets, 64)
    for row, length in enumerate(lengths):
        start = int(offsets[row])
        tile = start // 64 + row
        tiles = math.ceil(length / 64)
        own, padding = (slice(tile * 64 + a, tile * 64 + b) for a, b in ((0, length), (length, tiles * 64)))
        torch.testing.assert_close(starts[:, own], lse[:, start : start + length] * -2)
        torch.testing.assert_close(delta[:, own], (out * grad).sum(2).T[:, start : start + length])
        assert (starts[:, padding] == -math.inf).all()
        assert (delta[:, padding] == 0).all()
        assert (flags[:, tile : tile + tiles] == 0).all()
        first = some[:, tile * 64]
        assert first.isnan().all() if 0 < length <= 64 else torch.equal(first, delta[:, tile * 64]) or length == 0


def test_what_it_cannot_serve_is_an_error_and_nothing_gives_zeros() -> None:
    def attempt(queries: int, keys: int, head_dim: int, scale: float) -> tuple[Tensor, ...]:
        q, k = (torch.randn(n, 2, head_dim, dtype=torch.bfloat16) for n in (queries, keys))
        rows = Rows(torch.tensor([0, 0], dtype=torch.int32), 8)
        return attention_backward(q, q, k, k, q, torch.zeros(2, queries), rows, rows, scale, NO_MASK)

    with pytest.raises(ValueError, match="head dimensions"):
        attempt(3, 3, 96, 1.0)
    with pytest.raises(ValueError, match="positive scale"):
        attempt(3, 3, 64, 0.0)
    with poisoned_empty():
        for queries, keys in ((0, 3), (3, 0)):
            assert all((gradient == 0).all() for gradient in attempt(queries, keys, 64, 1.0))


def test_rows_of_hardly_any_queries_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []
    monkeypatch.setattr(Launcher, "__call__", lambda self, grid, key, *arguments: launched.append(grid[0]))
    monkeypatch.setattr(backward, "processors", lambda device: 132)
    monkeypatch.setattr(backward, "likely_short", lambda *numbers: 0)
    q = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    rows = Rows(torch.tensor([0, 0, 0, 1]), 1)
    attention_backward(q, q, q, q, q, torch.zeros(1, 1), rows, rows, 1.0, NO_MASK)
    assert len(launched) == 4
    assert all(launched)


def formula(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, lengths: list[tuple[int, int]], scale: float, causal: bool,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """(out, lse [H, Nq] float32, [dq, dk, dv] float64), a row at a time, without autograd."""
    num_heads, kv_heads = q.shape[1], k.shape[1]
    out, dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (q, q, k, v))
    lse = q.new_full((num_heads, q.shape[0]), math.inf, dtype=torch.float32)
    starts = [0, 0]
    for row in lengths:
        queries, keys = (slice(start, start + length) for start, length in zip(starts, row, strict=True))
        starts = [queries.stop, keys.stop]
        qs, gs = (x[queries].double().transpose(0, 1) for x in (q, grad))
        ks, vs = (x[keys].double().transpose(0, 1).repeat_interleave(num_heads // kv_heads, 0) for x in (k, v))
        ahead = torch.arange(row[1], device=q.device) - torch.arange(row[0], device=q.device)[:, None]
        seen = torch.ones_like(ahead, dtype=torch.bool)
        seen &= (ahead >= -window[0]) if window[0] >= 0 else True
        seen &= (ahead <= window[1]) if window[1] >= 0 else True
        seen &= (ahead <= 0) if causal else True
        scores = (qs @ ks.transpose(1, 2) * scale).masked_fill(~seen, -math.inf)
        sums = scores.logsumexp(-1)
        sums = sums.masked_fill(sums == -math.inf, math.inf)
        p = (scores - sums[..., None]).exp().masked_fill(~seen, 0.0)
        ds = p * (gs @ vs.transpose(1, 2) - (p @ vs * gs).sum(-1, keepdim=True))
        out[queries], lse[:, queries] = (p @ vs).transpose(0, 1), sums.float()
        dq[queries] = (ds @ ks * scale).transpose(0, 1)
        for total, share in ((dk, ds.transpose(1, 2) @ qs * scale), (dv, p.transpose(1, 2) @ gs)):
            total[keys] = share.unflatten(0, (kv_heads, -1)).sum(1).transpose(0, 1)
    return out.to(q.dtype), lse, [dq, dk, dv]


def check(
    q_lengths: list[int],
    k_lengths: list[int],
    heads: tuple[int, int] = (2, 2),
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    offsets_dtype: torch.dtype = torch.int32,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    packed: bool = False,
    paired: bool = False,
    expanded: bool = False,
) -> None:
    generator = torch.Generator("cuda").manual_seed(sum(q_lengths))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    total_q, total_k = sum(q_lengths), sum(k_lengths)
    q, grad = random(total_q, heads[0], head_dim), random(total_q, heads[0], head_dim)
    k, v = random(total_k, heads[1], head_dim), random(total_k, heads[1], head_dim)
    if packed:  # views of one tensor, and a cotangent whose heads come first
        q, k, v = random(total_q, 3, heads[0], head_dim).unbind(1)
        grad = random(heads[0], total_q, head_dim).transpose(0, 1)
    if paired:
        k, v = random(total_k, 2, heads[1], head_dim).unbind(1)
    if expanded:  # the cotangent of a sum
        grad = random(1).expand(total_q, heads[0], head_dim)
    q_offsets, k_offsets = (
        torch.tensor([0, *x], device="cuda").cumsum(0).to(offsets_dtype) for x in (q_lengths, k_lengths)
    )
    scale = head_dim**-0.5
    out, lse, expected = formula(q, k, v, grad, list(zip(q_lengths, k_lengths, strict=True)), scale, causal, window)
    queries, keys = Rows(q_offsets, max(q_lengths)), Rows(k_offsets, max(k_lengths))
    arguments = (grad, q, k, v, out, lse, queries, keys, scale, Mask(causal, *window))
    gradients = gradients_in_projection if packed or paired else contiguous_gradients
    with poisoned_empty():
        runs = [attention_backward(*arguments, gradients) for _ in range(3)]
    if packed:  # what lies beside dv is left to others
        whole = whole_of(runs[0][2], 3)
        assert whole is not None
        assert bool(whole[:, :2].isnan().all())
    assert (parts.whole(runs[0][1:]) is not None) is paired
    for first, second in pairwise(runs):
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True)), "runs differ"
    for name, gradient, oracle in zip(("dq", "dk", "dv"), runs[0], expected, strict=True):
        assert gradient.isfinite().all(), name
        assert (gradient.double() - oracle).norm() <= LIMITS[dtype] * oracle.norm(), name


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"),
    [
        ([64], [128]),
        ([1], [2]),
        ([192], [384]),
        ([100, 0, 33, 1, 257], [70, 5, 0, 300, 129]),
        ([0, 0, 3000, 0, 0], [0, 0, 3000, 0, 0]),
        ([700, 0, 2000, 64, 1], [300, 5, 129, 900, 1000]),
        ([1 + i * 37 % 300 for i in range(200)], [1 + i * 53 % 400 for i in range(200)]),
    ],
)
def test_gradients_of_rows_of_any_length(q_lengths: list[int], k_lengths: list[int], head_dim: int) -> None:
    check(q_lengths, k_lengths, head_dim=head_dim)


@pytest.mark.gpu
def test_gradients_of_a_sum() -> None:
    check([100, 0, 33, 1], [70, 5, 0, 300], expanded=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("causal", "window"), [(True, (-1, -1)), (False, (100, 30)), (False, (10, -1)), (True, (64, -1))]
)
@pytest.mark.parametrize("k_lengths", [[300, 64, 1, 700], [100, 200, 350, 5]])
def test_gradients_under_masks(k_lengths: list[int], causal: bool, window: tuple[int, int]) -> None:
    check([300, 64, 1, 700], k_lengths, causal=causal, window=window)


@pytest.mark.gpu
def test_gradients_of_grouped_heads_of_views_and_of_other_dtypes() -> None:
    check([100, 64, 300], [200, 129, 20], heads=(6, 2))
    check([100, 64, 300], [100, 64, 300], heads=(4, 4), packed=True)
    check([100, 64, 300], [100, 64, 300], heads=(2, 2), head_dim=64, packed=True, causal=True)
    check([40, 0, 64, 1] * 300, [40, 0, 64, 1] * 300, packed=True)  # rows of one tile
    check([40, 0, 65, 1] * 300 + [700], [40, 0, 65, 1] * 300 + [700], packed=True)  # many of them
    check([100, 64, 300, 0], [300, 65, 1, 2], heads=(4, 2), paired=True)
    check([40, 0, 65, 1] * 300 + [700], [40, 0, 65, 1] * 300 + [700], paired=True)
    check([300, 200], [300, 200], dtype=torch.float16, offsets_dtype=torch.int64)


@pytest.mark.gpu
@pytest.mark.parametrize("max_q", [1024, 2048])
def test_many_runs_give_equal_bits(max_q: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    lengths = torch.randint(1, 1025, (64,), generator=generator, device="cuda")
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    total = int(offsets[-1])
    q, k, v, out, grad = (
        torch.randn(total, 2, 128, generator=generator, device="cuda").to(torch.bfloat16) for _ in range(5)
    )
    lse = torch.full((2, total), 8.0, device="cuda")
    rows = Rows(offsets, max_q), Rows(offsets, 1024)
    arguments = (grad, q, k, v, out, lse, *rows, 128**-0.5, NO_MASK)
    first = attention_backward(*arguments)
    for _ in range(20):
        assert all(torch.equal(x, y) for x, y in zip(first, attention_backward(*arguments), strict=True))
