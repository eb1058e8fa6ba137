"""The Hopper kernels of attention and GDPA on a GPU in Python: results are right, and no order of events deadlocks.

A kernel that waits for what never comes hangs the device, so the kernels run here first: their own loaders, keepers of
order and consumers, on the tables that their own host code makes.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernels.attention import jagged_attention
from kernels.attention.hopper import backward as attention
from kernels.attention.hopper import backward_consumer as attention_consumer
from kernels.attention.hopper import backward_loader, softmax, tables
from kernels.attention.hopper import forward as attention_forward
from kernels.attention.operator import attention_operator
from kernels.core import scheduling
from kernels.core.activations import activate
from kernels.core.mask import NO_MASK, Mask
from kernels.core.rows import Rows
from kernels.gdpa.hopper import backward as gdpa
from kernels.gdpa.hopper import backward_consumer as gdpa_consumer
from kernels.gdpa.hopper import backward_loader as gdpa_loader
from kernels.gdpa.hopper import forward as gdpa_forward
from kernels.testing import check_gradients, poisoned_empty
from tests.kernels.attention.attention_cases import gradients, inputs_of, outputs, with_lse
from tests.kernels.core import simulated_gpu as gpu
from tests.kernels.core.interpreting import interpret
from tests.kernels.core.simulated_values import Pointer
from tests.kernels.jagged.jagged_problems import offsets_of
from tools.device_sources import Sources
from tools.gpu_ledger import KERNELS as KERNEL_FAMILIES

KERNELS = {
    attention_forward: attention_forward._attention_forward_kernel,
    attention: attention._attention_backward_kernel,
    gdpa_forward: gdpa_forward._gdpa_forward_kernel,
    gdpa: gdpa._gdpa_backward_kernel,
}
DIM, SCALE, OUT_SCALE = 64, 0.125, 0.5
# Those that the kernel computes without approximations.
MIXED, ALIKE = ("silu", "relu", "silu", "relu", "identity", "silu"), ("silu",) * 6


def store_rows(x: Tensor, pointer: Pointer, rows: int, stride: int) -> None:
    row, column = torch.arange(x.shape[0])[:, None], torch.arange(x.shape[1])
    (pointer + (row * stride + column)).store(x, mask=row < rows)


def store_to_stay(place: Pointer, flat: Tensor) -> None:
    (place + torch.arange(flat.shape[0])).store(flat)


def forget(scratch: Pointer, index: int, dim: int) -> None:
    if index >= 0:
        store_to_stay(scratch + index * 64 * dim, torch.full((64 * dim,), torch.nan))


STAND_INS: dict[Any, Callable[..., Any]] = {
    backward_loader.forget: forget,
    gdpa_consumer._store_rows: store_rows,
    gdpa_consumer._store_to_stay: store_to_stay,
    attention_consumer._rounded: lambda x, dtype: x,
    attention_consumer._times: torch.mul,
    attention_consumer.in_lines: lambda x: x,
    softmax.rounded: lambda p, dtype, layout: p,
    softmax.corrected: lambda acc, factors: acc * factors[:, None],
}


class Problem:
    """Rows of queries, for each run, and of keys; with the result and its gradients in float64."""

    def __init__(
        self,
        q_lengths: list[list[int]],
        k_lengths: list[int],
        heads: int = 1,
        group: int = 1,
        mask: Mask = NO_MASK,
        kinds: tuple[str, ...] | None = None,  # activations, None for softmax
    ) -> None:
        generator = torch.Generator().manual_seed(sum(k_lengths))
        starts = torch.tensor([length for run in q_lengths for length in [0, *run]]).cumsum(0)
        self.q_offsets, self.k_offsets = starts, torch.tensor([0, *k_lengths]).cumsum(0)
        together = [sum(lengths) for lengths in zip(*q_lengths, strict=True)]
        self.rows = Rows(self.q_offsets, max(together)), Rows(self.k_offsets, max(k_lengths))
        self.mask, self.kinds = mask, kinds and kinds[: heads * group]
        shapes = [(int(starts[-1]), heads * group)] * 2 + [(int(self.k_offsets[-1]), heads)] * 2
        tensors = (torch.randn(*shape, DIM, generator=generator).bfloat16() for shape in shapes)
        self.grad_out, *self.inputs = tensors
        wide = [x.double().requires_grad_() for x in self.inputs]
        out, lse = self.attended(*wide)
        self.out, self.lse = out.detach().float(), lse.detach().float()
        self.gradients = torch.autograd.grad(out, wide, self.grad_out.double())

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        group, count = q.shape[1] // k.shape[1], len(self.k_offsets) - 1
        out, lse = torch.zeros_like(q), torch.full((q.shape[1], len(q)), math.inf, dtype=torch.float64)
        for place in range(len(self.q_offsets)):
            row = place % (count + 1)
            if row == count:
                continue
            i, j = slice(*self.q_offsets[place : place + 2]), slice(*self.k_offsets[row : row + 2])
            keys, values = (x[j].repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("ihd,jhd->hij", q[i], keys) * SCALE
            queries, others = torch.arange(scores.shape[1])[:, None], torch.arange(scores.shape[2])
            seen = self.mask.restrict(torch.ones(scores.shape[1:], dtype=torch.bool), queries, others)
            if self.kinds:
                weights = torch.stack([activate(*each) for each in zip(self.kinds, scores, strict=True)]) * OUT_SCALE
                weights = weights.where(seen, 0)
            else:
                sums = scores.where(seen, -math.inf).logsumexp(2)
                lse[:, i] = sums.where(sums > -math.inf, math.inf)
                weights = (scores.where(seen, -math.inf) - lse[:, i, None]).exp()
            out[i] = torch.einsum("hij,jhd->ihd", weights, values)
        return out, lse


@pytest.fixture(scope="module", autouse=True)
def _interpreted() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch, tables, scheduling)
        yield


def check(
    problem: Problem,
    patch: pytest.MonkeyPatch,
    programs: int,
    seed: int,
    uneven: bool = False,
    in_flight: int = 32768,
    changed: Mapping[Any, Any] | None = None,
) -> None:
    """Forward, unless there are several runs of queries, and backward, perhaps with other code of some functions."""
    forward, backward = (gdpa_forward, gdpa) if problem.kinds else (attention_forward, attention)
    for module, name in ((forward, "_launch_forward"), (backward, "_launch_backward")):
        launcher = gpu.launcher(KERNELS[module], {**STAND_INS, **(changed or {})}, seed)
        patch.setattr(module, name, lambda *arguments, launch=launcher: launch(*arguments))
        patch.setattr(module, "processors", lambda device: programs)
    patch.setattr(backward, "TOKENS_IN_FLIGHT", in_flight)
    patch.setattr(gdpa.triton_short, "limit_of", lambda *arguments: 0)
    patch.setattr(gdpa, "short_and_uneven", lambda *arguments: uneven)
    patch.setattr(attention, "likely_short", lambda *arguments: 0)
    settings = (problem.kinds, SCALE, OUT_SCALE, problem.mask) if problem.kinds else (SCALE, problem.mask)
    found: list[Tensor] = []
    with poisoned_empty():
        if len(problem.q_offsets) == len(problem.k_offsets):
            results = getattr(forward, "forward" if problem.kinds else "attention_forward")(
                *problem.inputs, *problem.rows, *settings
            )
            found += [results] if problem.kinds else results
        if problem.kinds:
            found += gdpa.backward(problem.grad_out, *problem.inputs, *problem.rows, *settings)
        else:
            given = (problem.grad_out, *problem.inputs, problem.out, problem.lse)
            found += attention.attention_backward(*given, *problem.rows, *settings)
    results = (problem.out,) if problem.kinds else (problem.out, problem.lse)
    expected = [*results, *problem.gradients][-len(found) :]
    for name, actual, oracle in zip("dv dk dq lse out".split(), reversed(found), reversed(expected), strict=False):
        # The result is rounded to bfloat16; sums of dq, lse and delta are held in float32. Inputs have unit variance.
        wrong = ~((actual.double() - oracle).abs() <= oracle.abs() * 2**-8 + 1e-5) & (actual != oracle)
        assert not wrong.any(), f"{name} is wrong in {int(wrong.sum())} places"


def test_sinks_and_gradients_of_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator around the kernels: what it gives them in place of lse, values and gradients."""
    for module, name in ((attention_forward, "_launch_forward"), (attention, "_launch_backward")):
        monkeypatch.setattr(module, name, gpu.launcher(KERNELS[module], STAND_INS, 0))
        monkeypatch.setattr(module, "processors", lambda device: 3)
    monkeypatch.setattr(attention, "likely_short", lambda *arguments: 0)
    kernels = attention_forward.attention_forward, attention.attention_backward
    offsets = {"q_offsets": offsets_of([70, 0, 5, 3]), "k_offsets": offsets_of([130, 9, 60, 0])}
    rows = Rows(offsets["q_offsets"], 70), Rows(offsets["k_offsets"], 130)
    operator = attention_operator("simulated_hopper", *kernels, features=False)
    check_gradients(
        with_lse(lambda q, k, v, **call: operator(q, k, v, *rows, SCALE, Mask(False, 60, 3), **call)),
        with_lse(partial(jagged_attention, **offsets, max_q=70, max_k=130, scale=SCALE, window=(60, 3))),
        inputs_of(**offsets, heads=(2, 1), widths=(DIM, DIM), dtype=torch.bfloat16, sinks=True),
        outputs(130),
        gradients(130),
    )


def kinds_of(family: str) -> tuple[str, ...] | None:
    return None if family == "attention" else MIXED if family == "mixed" else ALIKE


FAMILIES = ("attention", "gdpa", "mixed")


@pytest.mark.parametrize("family", FAMILIES[:2])
@pytest.mark.parametrize("keys", [1, 64, 65, 128, 129, 256, 257, 700, 2048])
def test_one_row(monkeypatch: pytest.MonkeyPatch, family: str, keys: int) -> None:
    check(Problem([[100]], [keys], kinds=kinds_of(family)), monkeypatch, 3, keys)


@pytest.mark.parametrize("family", FAMILIES[:2])
@pytest.mark.parametrize("seed", range(4))
def test_many_whole_tiles_a_program(monkeypatch: pytest.MonkeyPatch, family: str, seed: int) -> None:
    for q_lengths, k_lengths in (([64, 64], [640, 640]), ([64, 64, 200], [512, 128, 256])):
        check(Problem([q_lengths], k_lengths, kinds=kinds_of(family)), monkeypatch, 1 + seed % 2, seed)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(8))
def test_random_rows(monkeypatch: pytest.MonkeyPatch, family: str, seed: int) -> None:
    chance = random.Random(seed)
    most = chance.choice([1, 64, 100, 200]), chance.choice([1, 128, 200, 400])

    def length(side: int) -> int:
        return chance.choice([0, chance.randint(0, side), side])

    window = chance.choice([(-1, -1), (-1, -1), (50, -1), (-1, 0), (100, 30), (0, 0)])
    # Only attention has several runs of queries a row, and only without a window.
    runs = chance.choice([1, 2, 3]) if family == "attention" and window == (-1, -1) else 1
    rows = [([length(most[0]) for _ in range(runs)], length(most[1])) for _ in range(4)]
    rows.append(([most[0]] * runs, most[1]))
    q_lengths = [list(lengths) for lengths in zip(*(queries for queries, _ in rows), strict=True)]
    heads, group = chance.choice([(1, 1), (1, 3), (2, 1), (2, 2)])
    programs = chance.choice([1, 2, 3, 5, 40])
    problem = Problem(q_lengths, [keys for _, keys in rows], heads, group, Mask(False, *window), kinds_of(family))
    check(problem, monkeypatch, programs, seed, chance.random() < 0.5, chance.choice([64, 512, 32768]))


GDPA_TURN = "mbarrier.wait(step_done.index(step & 1), (step - 2) // 2 & 1, pred=step > 1)"


@pytest.mark.parametrize(
    ("family", "function", "old", "new"),
    [
        ("gdpa", gdpa_loader.keep_order, "step_done, step, b)", "step_done, step + 1, b)"),
        ("gdpa", gdpa_loader.keep_order, GDPA_TURN, GDPA_TURN.replace("(step - 2)", "step")),
        ("gdpa", backward_loader.await_flag, "(step - 1)", "(step - 2)"),
        ("attention", backward_loader.await_flag, "(step - 1)", "(step - 2)"),
        ("attention", backward_loader.load_tiles, "mbarrier.wait(done, 0)", "pass"),
        ("attention", backward_loader.load_tiles, "raise_flag(flags_ptr, c)", "raise_flag(flags_ptr, b)"),
    ],
)
def test_a_wrong_wait_is_seen(monkeypatch: pytest.MonkeyPatch, family: str, function: Any, old: str, new: str) -> None:
    problem = Problem([[64, 100]], [400, 300], kinds=kinds_of(family))
    changed = {function: gpu.mutated(function, old, new)}

    def check_all() -> None:
        for seed in range(8):
            check(problem, monkeypatch, 3, seed, changed=changed)

    with pytest.raises(AssertionError, match="deadlock|is wrong"):
        check_all()


def test_all_kernels_that_share_the_order_of_sums_run_here() -> None:
    """Whoever uses `await_flag` keeps barriers that it waits for, and can hang."""
    shared, users, sources = (backward_loader.__name__, "await_flag"), set(), Sources()
    for family in KERNEL_FAMILIES:
        for path in sources.files(family):
            module = sources.name_of(path)
            launched = re.findall(r"= Launcher\((\w+)", path.read_text())
            users |= {(module, kernel) for kernel in launched if shared in sources.closure([(module, kernel)])}
    assert users == {(kernel.fn.__module__, kernel.fn.__name__) for kernel in (KERNELS[attention], KERNELS[gdpa])}
