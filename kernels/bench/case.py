"""Cases, problems and contenders, as a family's bench.py defines them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.core import dispatch

Check = Callable[[tuple[Tensor, ...]], "str | None"]


@dataclass(frozen=True)
class Runner:
    """`step` is timed; `outputs` turns its result into the tensors that are checked, outside the timing.

    `inputs` are tensors whose memory counts as the contender's, where contenders differ in their inputs.
    """

    step: Callable[[], Any]
    outputs: Callable[[Any], tuple[Tensor, ...]] = lambda result: (result,)
    inputs: Sequence[Tensor] = ()


@dataclass(frozen=True)
class Problem:
    """A set of inputs, with contenders and what is needed to judge them.

    A contender is a function that does the untimed preparation and returns a Runner, or raises
    `kernels.core.dispatch.UnsupportedError` with the reason why it is not available here. The first available one is
    "ours". `flops` and `bytes` are the minimum that the problem needs, whatever a contender executes.
    """

    contenders: dict[str, Callable[[], Runner]]
    check: Check
    flops: float
    bytes: float


@dataclass(frozen=True)
class Case:
    """A name that --case matches, and a function that makes the problem on a device."""

    name: str
    problem: Callable[[torch.device], Problem]


def runner_of(function: Callable[[], Tensor], inputs: Sequence[Tensor], cotangent: Tensor, backward: bool) -> Runner:
    """A Runner of `function`, or with `backward` of only the gradients of `inputs` in a call that is made here."""
    if not backward:
        return Runner(function)
    out = function()
    return Runner(lambda: torch.autograd.grad(out, inputs, cotangent, retain_graph=True), tuple)


def backends_of(op: str, prepare: Callable[[str], Runner]) -> dict[str, Callable[[], Runner]]:
    """A contender per registered backend of `op`, the preferred one first, those of other authors behind ours.

    `prepare` gets the backend's name.
    """
    names = sorted(dispatch.operators()[op], key=lambda name: name in ("flash_attention_4", "quack"))
    return {name: lambda name=name: prepare(name) for name in names}


def check_relative_error(expected: tuple[Tensor, ...], limit: float) -> Check:
    """||output - expected|| / ||expected|| <= limit for every output (a NaN fails); `expected` is float32 or wider."""

    def check(outputs: tuple[Tensor, ...]) -> str | None:
        for index, (output, reference) in enumerate(zip(outputs, expected, strict=True)):
            error = ((output.to(reference) - reference).norm() / reference.norm()).item()
            if not error <= limit:
                return f"output {index}: relative error {error:.3g}, allowed {limit:.3g}"
        return None

    return check


def check_equal(expected: tuple[Tensor, ...]) -> Check:
    """Every byte of every output equals `expected`'s."""

    def check(outputs: tuple[Tensor, ...]) -> str | None:
        for index, (output, reference) in enumerate(zip(outputs, expected, strict=True)):
            different = (output.view(torch.uint8) != reference.view(torch.uint8)).sum().item()
            if different:
                return f"output {index}: {different} of {reference.nbytes} bytes differ"
        return None

    return check
