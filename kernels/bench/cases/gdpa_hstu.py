"""HSTU's attention as `gdpa` with SiLU: causal, with targets, and semi-local with a prefix, lengths uniform.

Rivals have no prefix beside a window. One is the Triton kernel of generative-recommenders, from a checkout that
GEMSMITH_PEER_HSTU names (github.com/meta-recsys/generative-recommenders), which also has loads by TMA. It tries all its
configurations at the first length of a width, each for a tenth of the time that it would give, and the best few of
them at others. The other is NVIDIA's CUTLASS kernel, from PyPI's fbgemm-gpu-hstu-nightly.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.attention import checked_structure
from kernels.bench import Case, Problem, Runner, backends_of, check_relative_error, runner_of
from kernels.bench.cases.cute_peers import where_it_runs
from kernels.core.dispatch import UnsupportedError
from kernels.core.mask import checked_mask
from kernels.core.offsets import attended_pairs
from kernels.gdpa import gdpa

VARIABLE = "GEMSMITH_PEER_HSTU"
HEADS = 4
WIDTHS = {"cuda": (64, 128, 256), "cpu": (16,)}
# Longest rows and how many there are: about 260 thousand tokens.
ROWS = {"cuda": {1024: 512, 4096: 128, 8192: 64}, "cpu": {32: 4}}
MOST_TARGETS = 64
# (events, first events) that a query of semi-local attention sees, as TorchEasyRec's example has them.
SEMI_LOCAL = {"cuda": (256, 32), "cpu": (8, 4)}
# As of `gdpa`'s other cases.
LIMIT = 1e-2
SCRATCH_BYTES = 5e8
# The peer's configurations that are tried again at another length of the same kind of call.
BEST = 4
KIND = ("DimQ", "HAS_MULTIPLE_TARGETS", "ENABLE_TMA")


class Masks(NamedTuple):
    targets: bool
    local: bool = False


MASKS = {"causal": Masks(False), "targets": Masks(True), "semilocal": Masks(True, True)}


def cases(device: torch.device) -> list[Case]:
    return [
        Case(f"hstu_{name}_{direction}_d{dim}_L{length}", partial(_problem, masks, direction, dim, length))
        for name, masks in MASKS.items()
        for dim in WIDTHS[device.type]
        for length in ROWS[device.type]
        for direction in ("fwd", "bwd")
    ]


@cache
def load_peer() -> Callable[..., Tensor]:
    """Its function of (N, alpha, q, k, v, seq_offsets, num_targets, ...); UnsupportedError if there is none."""
    place = os.environ.get(VARIABLE)
    if not place:
        raise UnsupportedError(f"{VARIABLE} does not name a checkout of generative-recommenders")
    sys.path.insert(0, place)
    try:
        common = importlib.import_module("generative_recommenders.common")
        common.triton_autotune = partial(common.triton_autotune, warmup=2, rep=10)  # type: ignore[attr-defined]
        module = importlib.import_module("generative_recommenders.ops.triton.triton_hstu_attention")
    except Exception as error:
        raise UnsupportedError(f"{VARIABLE}={place} cannot be imported: {error!r}") from error
    finally:
        sys.path.remove(place)
    for tuner in (module._hstu_attn_fwd, module._hstu_attn_bwd):
        try_the_best_again(tuner)
    return module.triton_hstu_mha


def load_cutlass() -> Callable[..., Tensor]:
    """Its function of (q, k, v, edges, edges, max_q, max_k, contexts, targets, ...); UnsupportedError without it."""
    try:
        return importlib.import_module("fbgemm_gpu.experimental.hstu").hstu_attn_varlen_func
    except Exception as error:
        raise UnsupportedError(f"fbgemm_gpu.experimental.hstu cannot be imported: {error!r}") from error


def try_the_best_again(tuner: Any) -> None:
    """Let a Triton `Autotuner` try all configurations for the first call of a KIND, and for others only its BEST."""
    tuner.keys = [*dict.fromkeys([*tuner.keys, *KIND])]  # its own would give TMA what is best without
    every, timings, latest = tuner.prune_configs, {}, None

    def prune(call: dict[str, Any]) -> list[Any]:
        nonlocal latest
        if latest is not None and tuner.configs_timings:
            timings.setdefault(latest, tuner.configs_timings)
        tuner.configs_timings = None  # what it has at the next call is of this one
        latest = tuple(call[name] for name in KIND)
        known = timings.get(latest)
        return every(call) if known is None else sorted(known, key=known.get)[:BEST]

    tuner.prune_configs = prune


def _problem(masks: Masks, direction: str, dim: int, longest: int, device: torch.device) -> Problem:
    chance = torch.Generator().manual_seed(0)
    rows = ROWS[device.type][longest]
    lengths = torch.randint(1, longest + 1, (rows,), generator=chance)
    numbers = torch.randint(0, MOST_TARGETS + 1, (rows,), generator=chance).minimum(lengths)
    offsets = pad(lengths.cumsum(0), (1, 0)).to(device)
    targets = numbers.to(device) if masks.targets else None
    events, first = SEMI_LOCAL[device.type]
    features: dict[str, Any] = {"window": (events if masks.local else None, 0), "num_targets": targets}
    features |= {"prefix": first} if masks.local else {}
    total, backward = int(lengths.sum()), direction == "bwd"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, cotangent = (
        torch.randn(total, HEADS, dim, device=device, generator=generator).to(dtype) for _ in range(4)
    )
    inputs = [tensor.requires_grad_(backward) for tensor in (q, k, v)]
    scales = {"score_scale": dim**-0.5, "out_scale": 1 / longest}

    def prepare(backend: str) -> Runner:
        if backend in ("reference", "padded") and device.type == "cuda":
            raise UnsupportedError("keeps the scores of padded rows in memory")

        def attend() -> Tensor:
            sizes = {"max_q": longest, "max_k": longest}
            return gdpa(q, k, v, offsets, offsets, **sizes, **scales, **features, activation="silu", backend=backend)

        return runner_of(attend, inputs, cotangent, backward)

    def prepare_peer(tma: bool) -> Runner:
        if masks.local or device.type == "cpu":
            raise UnsupportedError("has no prefix beside a window" if masks.local else "needs a GPU")
        peer = load_peer()
        rest = {"num_targets": targets, "sort_by_length": True, "enable_tma": tma}

        def attend() -> Tensor:
            return peer(longest, dim**-0.5, q, k, v, offsets, **rest)

        return where_it_runs(lambda: runner_of(attend, inputs, cotangent, backward))

    def prepare_cutlass() -> Runner:
        if masks.local or device.type == "cpu":
            raise UnsupportedError("has no prefix beside a window" if masks.local else "needs a GPU")
        peer, edges = load_cutlass(), offsets.int()
        rest = {"num_contexts": None, "num_targets": None if targets is None else targets.int()}
        rest |= {"window_size": (-1, 0), "alpha": dim**-0.5}

        def attend() -> Tensor:
            return peer(q, k, v, edges, edges, longest, longest, **rest)

        return where_it_runs(lambda: runner_of(attend, inputs, cotangent, backward))

    mask = checked_mask(window=features["window"])
    structure = checked_structure(mask, offsets, offsets, targets, 0, features.get("prefix", 0), None, "start")
    pairs = attended_pairs(offsets, offsets, mask) if structure is None else structure.pairs(mask, offsets, offsets)
    peers = {f"generative-recommenders{', TMA' * tma}": partial(prepare_peer, tma) for tma in (False, True)}
    return Problem(
        contenders=backends_of("gdpa", prepare) | peers | {"FBGEMM HSTU": prepare_cutlass},
        check=check_relative_error(_expected(inputs, cotangent, lengths, numbers, features | scales, backward), LIMIT),
        flops=4 * HEADS * dim * pairs * (2.5 if backward else 1.0),
        bytes=(7 if backward else 4) * total * HEADS * dim * dtype.itemsize,
    )


def _expected(
    inputs: list[Tensor], cotangent: Tensor, lengths: Tensor, numbers: Tensor, call: dict[str, Any], backward: bool
) -> tuple[Tensor, ...]:
    """Output or gradients in float32 from the reference, as many rows at a time as SCRATCH_BYTES hold scores of."""
    step = max(1, int(SCRATCH_BYTES / (HEADS * int(lengths.max()) ** 2 * 4)))
    totals = [int(group.sum()) for group in lengths.split(step)]
    tensors = (x.detach().split(totals) for x in (*inputs, cotangent))
    results = []
    for *values, grad, group, number in zip(*tensors, lengths.split(step), numbers.split(step), strict=True):
        leaves = [tensor.float().requires_grad_(backward) for tensor in values]
        offsets = pad(group.cumsum(0), (1, 0)).to(grad.device)
        own = call if call["num_targets"] is None else call | {"num_targets": number.to(grad.device)}
        longest = int(group.max())
        sizes = {"max_q": longest, "max_k": longest, "activation": "silu", "backend": "reference"}
        out = gdpa(*leaves, offsets, offsets, **sizes, **own)
        results.append(torch.autograd.grad(out, leaves, grad.float()) if backward else (out.detach(),))
    return tuple(torch.cat(pieces) for pieces in zip(*results, strict=True))
