"""The Hopper forward of jagged attention: compiled for it anywhere, compared with float64 on one."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.attention.hopper import forward
from kernels.attention.hopper.descriptor import head_descriptor
from kernels.attention.hopper.forward import attention_forward
from kernels.core.mask import NO_MASK, Mask
from kernels.core.rows import Rows
from kernels.testing import Compiled, Tolerance, assert_close_to_oracle, poisoned_empty
from tests.kernels.core.barriers import assert_turns_have_barriers_of_their_own
from tests.kernels.core.descriptors import compile_forward
from tests.kernels.core.devices import on_hopper
from tests.kernels.jagged.jagged_problems import offsets_of

# Probabilities are rounded to the dtype of the values before their product, and so is the result.
ROUNDED = Tolerance("probabilities and result rounded once each, sums in float32", roundings=2, reduction=1024)
LSE = Tolerance("float32 sums of exact products and of exponentials", roundings=8, reduction=1024)
UNLIMITED = (-1, -1)


def lengths_of(rows: int, low: int, high: int, seed: int = 0) -> list[int]:
    return torch.randint(low, high + 1, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()


def _compiled(
    *, window: tuple[int, int] = UNLIMITED, block_k: int = 128, d: int = 128, dtype: str = "bf16", paired: bool = True
) -> Compiled:
    return _compile(window, block_k, d, dtype, paired and window == UNLIMITED)


@functools.cache
def _compile(window: tuple[int, int], block_k: int, d: int, dtype: str, paired: bool) -> Compiled:
    kernel, constants = forward._attention_forward_kernel, {"GROUP": 1, "PAIRED": paired, "STAGES": 256 // block_k}
    return compile_forward(kernel, dtype, d, block_k, window, constants, lse="*fp32", scale="fp32")


@pytest.mark.parametrize(
    ("options", "spill_bytes"),
    [
        ({"block_k": 64}, 0),
        ({"d": 64, "dtype": "fp16"}, 0),
        # A few scalars of a tile; none in the loop over blocks.
        ({"window": UNLIMITED}, 12),
        ({"paired": False}, 12),
        ({"window": (-1, 0)}, 24),
        ({"window": (64, 64)}, 72),
    ],
    ids=str,
)
def test_compiles_to_asynchronous_products_without_spills(options: dict, spill_bytes: int) -> None:
    compiled = _compiled(**options)
    # The vote is on whether sums of outputs need a correction.
    for instruction in ("wgmma.mma_async.sync.aligned", "cp.async.bulk.tensor.2d", "setmaxnreg.inc", "vote.sync.any"):
        assert instruction in compiled.ptx, instruction
    assert compiled.spill_bytes <= spill_bytes
    assert compiled.shared_bytes <= 227 * 1024
    assert_turns_have_barriers_of_their_own(compiled)


@pytest.mark.parametrize("paired", [False, True])
def test_outputs_are_sent_behind_a_barrier_of_all_who_wrote_them(paired: bool) -> None:
    """Each of them makes its stores visible to TMA, and then one sends; a barrier before the fences is none."""
    before, *sends = _compiled(paired=paired).ptx.split("cp.async.bulk.tensor.2d.global.shared::cta")
    assert len(sends) >= 2
    for code in [before, *sends[:-1]]:
        _, fence, since = code.rpartition("fence.proxy.async")
        assert fence
        assert "bar.sync" in since


@pytest.mark.parametrize(
    ("window", "facts"),
    [(UNLIMITED, 6), ((-1, 0), 6), ((64, 64), 7), pytest.param((64, -1), 7, marks=pytest.mark.nightly)],
    ids=str,
)
def test_compiler_keeps_what_tiles_differ_in(window: tuple[int, int], facts: int) -> None:
    """MLIR drops loop-carried values that only bound an inner loop; then all tiles do as many steps as the first."""
    over_tiles = [line for line in _compiled(window=window).ttgir.splitlines() if "scf.for" in line and "bf16" in line]
    # Begin, count, length, steps, head, the stride if paired, the position if masked, the first block if that varies:
    # of this tile and of the next. Besides them the outputs, the maximum, the sum, the probabilities and the place in
    # the ring; without a mask also begin, count and head of outputs that are not sent yet.
    carried = [int(line.split(":")[1].split("=")[0]) for line in over_tiles if "for %turn " in line]
    assert carried == 2 * [2 * facts + 5 + 3 * (window == UNLIMITED)]


def test_windows_wider_than_any_row_are_within_what_positions_can_add_to() -> None:
    assert Mask(False, 2**31 - 1, 2**63 - 1).window == (2**30, 2**30)
    assert Mask(True, 7).window == (7, 0)
    assert NO_MASK.window == UNLIMITED


def test_half_tiles_are_paired_where_some_may_lack_their_other() -> None:
    def paired(heads: int, lengths: list[int], max_q: int, window: tuple[int, int] = UNLIMITED) -> bool:
        return forward.is_paired(heads, window, sum(lengths), offsets_of(lengths), max_q)

    assert paired(4, [512, 511], 512)
    assert paired(2, [64, 64], 64)
    assert paired(2, [320], 320)
    assert not paired(4, [512, 512], 512)
    assert not paired(2, [193, 193], 193)
    assert not paired(2, [4096, 64 * 33], 4096)
    assert not paired(3, [512, 511], 512)
    assert not paired(4, [512, 511], 512, (-1, 0))


def test_descriptors_copy_what_tma_cannot_address() -> None:
    memory = torch.arange(8 * 2 * 64 + 1, dtype=torch.bfloat16)
    for x in (memory[1:].view(8, 2, 64), memory[: 2 * 64].view(1, 2, 64).as_strided((1, 2, 64), (1, 64, 1))):
        descriptor, head_stride = head_descriptor(x, 64)
        assert descriptor.shape == [len(x), 128]
        assert (descriptor.strides, head_stride) == ([128, 1], 64)
        assert torch.equal(descriptor.base.flatten()[: x.numel()], x.flatten())


def test_a_scale_that_is_not_positive_is_refused() -> None:
    x = torch.zeros(3, 1, 64, dtype=torch.bfloat16)
    offsets = offsets_of([3])
    with pytest.raises(ValueError, match="scale"):
        attention_forward(x, x, x, Rows(offsets, 3), Rows(offsets, 3), 0.0, NO_MASK)


def test_other_head_dimensions_are_refused() -> None:
    x = torch.zeros(3, 1, 96, dtype=torch.bfloat16)
    offsets = offsets_of([3])
    with pytest.raises(ValueError, match="head dimensions"):
        attention_forward(x, x, x, Rows(offsets, 3), Rows(offsets, 3), 1.0, NO_MASK)


def oracle(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lengths: list[int],
    k_lengths: list[int],
    scale: float,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """out and lse in float64, a row at a time."""
    left, right = window
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), math.inf, dtype=torch.float64, device=q.device)
    q_rows, k_rows, v_rows = q.double().split(q_lengths), k.double().split(k_lengths), v.double().split(k_lengths)
    starts = [0, *itertools.accumulate(q_lengths)]
    for start, q_row, k_row, v_row in zip(starts, q_rows, k_rows, v_rows, strict=False):
        if not len(q_row) or not len(k_row):
            continue
        scores = scale * torch.einsum("ihd,jhd->hij", q_row, k_row.repeat_interleave(group, 1))
        i = torch.arange(len(q_row), device=q.device)[:, None]
        j = torch.arange(len(k_row), device=q.device)
        seen = torch.ones(len(q_row), len(k_row), dtype=torch.bool, device=q.device)
        if left >= 0:
            seen &= j >= i - left
        if right >= 0:
            seen &= j <= i + right
        row_lse = scores.masked_fill(~seen, -math.inf).logsumexp(-1)
        row_lse = row_lse.where(seen.any(-1), math.inf)
        probabilities = (scores - row_lse[..., None]).exp().where(seen, 0.0)
        out[start : start + len(q_row)] = torch.einsum("hij,jhd->ihd", probabilities, v_row.repeat_interleave(group, 1))
        lse[:, start : start + len(q_row)] = row_lse
    return out, lse


ODD = [1, 0, 5, 300, 0, 129, 64, 63, 65]
CASES = {
    "odd": ({}, ODD, ODD),
    "dense": ({}, [256] * 5, [256] * 5),
    "ragged": ({}, lengths_of(200, 0, 400), lengths_of(200, 0, 400)),
    "cross": ({}, lengths_of(100, 0, 300, 1), lengths_of(100, 0, 500, 2)),
    "no keys": ({}, [100, 200, 0, 5], [0, 30, 70, 0]),
    "huge among empties": ({}, [0] * 50 + [5000] + [0] * 50, [0] * 50 + [3001] + [0] * 50),
    "grouped heads": ({"heads": (8, 2)}, ODD, ODD),
    "odd heads": ({"heads": (3, 3)}, ODD, ODD),
    "two heads": ({"heads": (2, 1)}, lengths_of(90, 0, 400, 12), lengths_of(90, 0, 400, 13)),
    "float16": ({"dtype": torch.float16}, ODD, ODD),
    # Maxima that grow from block to block, by less and by more than sums have room for without correction.
    "steep": ({"steepness": 4.0}, lengths_of(20, 200, 900, 14), lengths_of(20, 200, 900, 14)),
    "steeper": ({"steepness": 16.0}, lengths_of(20, 200, 900, 15), lengths_of(20, 200, 900, 15)),
    "steep float16": ({"steepness": 8.0, "dtype": torch.float16}, ODD, lengths_of(9, 200, 900, 16)),
    "steep window": ({"steepness": 8.0, "window": (300, 10)}, ODD, ODD),
    "steep, head dimension 64": ({"steepness": 16.0, "dims": (64, 64)}, ODD, lengths_of(9, 200, 900, 17)),
    "head dimension 64": ({"dims": (64, 64)}, ODD, ODD),
    "wide values": ({"dims": (64, 128)}, ODD, ODD),
    "narrow values": ({"dims": (128, 64)}, ODD, ODD),
    "fused projection": ({"fused": True}, ODD, ODD),
    "causal": ({"window": (-1, 0)}, lengths_of(60, 0, 700, 3), lengths_of(60, 0, 700, 3)),
    "causal cross": ({"window": (-1, 0)}, lengths_of(60, 0, 500, 4), lengths_of(60, 0, 500, 5)),
    "window": ({"window": (100, 30)}, lengths_of(60, 0, 700, 6), lengths_of(60, 0, 700, 6)),
    "left only": ({"window": (130, -1)}, lengths_of(30, 0, 900, 7), lengths_of(30, 0, 900, 7)),
    "right only": ({"window": (-1, 200)}, lengths_of(30, 0, 900, 8), lengths_of(30, 0, 400, 9)),
    "causal window": ({"window": (70, 0)}, lengths_of(60, 0, 700, 10), lengths_of(60, 0, 700, 10)),
    "long causal window": ({"window": (300, 0)}, lengths_of(40, 500, 2500, 11), lengths_of(40, 500, 2500, 11)),
    "only itself": ({"window": (0, 0)}, ODD, ODD),
}


@on_hopper
@pytest.mark.parametrize("block_k", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_forward_matches_float64(name: str, block_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options, q_lengths, k_lengths = CASES[name]
    monkeypatch.setattr(forward, "block_of_keys", lambda *_: block_k)
    heads, kv_heads = options.get("heads", (4, 4))
    d, dv = options.get("dims", (128, 128))
    dtype, window = options.get("dtype", torch.bfloat16), options.get("window", UNLIMITED)
    generator = torch.Generator("cuda").manual_seed(0)
    if options.get("fused"):
        fused = torch.randn(sum(q_lengths), 3, heads, d, device="cuda", generator=generator).to(dtype)
        q, k, v = fused.unbind(1)
    else:
        q, k, v = (
            torch.randn(shape, device="cuda", generator=generator).to(dtype)
            for shape in (
                (sum(q_lengths), heads, d),
                (sum(k_lengths), kv_heads, d),
                (sum(k_lengths), kv_heads, dv),
            )
        )
    if "steepness" in options:
        q = q * options["steepness"]
    q_offsets, k_offsets = offsets_of(q_lengths).cuda(), offsets_of(k_lengths, torch.int32).cuda()
    queries, keys = Rows(q_offsets, max(q_lengths)), Rows(k_offsets, max(k_lengths))
    mask = Mask(False, *window)
    arguments = (queries, keys, d**-0.5, mask)
    with poisoned_empty():
        out, lse = attention_forward(q, k, v, *arguments)
    expected, expected_lse = oracle(q, k, v, q_lengths, k_lengths, d**-0.5, window)
    assert_close_to_oracle(out, expected, ROUNDED)
    nothing_seen = expected_lse == math.inf
    assert torch.equal(lse == math.inf, nothing_seen)
    assert_close_to_oracle(lse.where(~nothing_seen, 0.0), expected_lse.where(~nothing_seen, 0.0), LSE, "lse")
    paired = forward.is_paired(heads, mask.window, len(q), *queries)
    schedule = forward.tile_list(
        q_offsets, k_offsets, len(q), max(k_lengths), block_k, mask.window, paired, max(q_lengths)
    )
    again, lse_again = attention_forward(q, k, v, *arguments, schedule)
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


@on_hopper
def test_no_keys_at_all() -> None:
    q, k = (torch.randn(n, 2, 64, device="cuda", dtype=torch.bfloat16) for n in (10, 0))
    q_offsets, k_offsets = offsets_of([4, 6]).cuda(), offsets_of([0, 0]).cuda()
    out, lse = attention_forward(q, k, k, Rows(q_offsets, 6), Rows(k_offsets, 6), 0.125, NO_MASK)
    assert torch.equal(out, torch.zeros_like(out))
    assert bool((lse == math.inf).all())


@on_hopper
def test_the_schedule_follows_offsets_that_change() -> None:
    """Outside of a CUDA graph, where it is cached, and in one, whose replays must not take an old one."""
    q = torch.randn(500, 2, 64, device="cuda", dtype=torch.bfloat16)
    offsets = offsets_of([300, 200]).cuda()

    def attend() -> Tensor:
        return attention_forward(q, q, q, Rows(offsets, 500), Rows(offsets, 500), 0.125, NO_MASK)[0]

    def expected() -> Tensor:
        lengths = offsets.diff().tolist()
        return oracle(q, q, q, lengths, lengths, 0.125, UNLIMITED)[0]

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend()
    for lengths in ([1, 499], [250, 250]):
        offsets.copy_(offsets_of(lengths))
        assert_close_to_oracle(attend(), expected(), ROUNDED)
        graph.replay()
        assert_close_to_oracle(captured, expected(), ROUNDED)
