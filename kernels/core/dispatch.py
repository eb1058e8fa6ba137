"""Which backend serves an operator: the choice by device, capability, dtype and shape, and its explanation.

A family declares the backends of each operator once, beside its public function, the preferred one first. A backend's
verifier gets the facts of a call (device type, compute capability, dtype, and what the operator adds, e.g. a head
dimension) as keywords and returns None when it can serve them or one sentence saying why not. The first backend that
can serve is chosen; those behind the specification, which serves everything, are chosen by name only.

A backend can be asked for by name in three ways; the first one that names the operator, or all operators, wins:

1. the `backend` argument of a public function;
2. the environment variable GEMSMITH_KERNELS, which is read before the first call of a kind;
3. `force(spec)`, which the trainer calls with the config key `runtime.kernels`.

A spec is a comma-separated list: `reference` asks for that backend everywhere, `jagged_attention=torch` for one
operator; the narrower entry wins. A request by name that cannot be served is a ValueError, never a silent fallback.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from kernels.core.usual import HANDED_ON, usual_facts

ENVIRONMENT_VARIABLE = "GEMSMITH_KERNELS"
# What tensor cores multiply, for `needs_dtype`.
HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32)
# What a kernel can move whatever it means.
MOVED = (*FLOATS, torch.int32, torch.int64)

Verifier = Callable[..., "str | None"]

_log = logging.getLogger(__name__)


class UnsupportedError(ValueError):
    """A backend that was asked for by name cannot serve the call; the message says why and which ones can."""


def always(**facts: Hashable) -> None:
    """The verifier of a backend that serves every call: the specification of each operator."""


@dataclass(eq=False)  # a frozen one stops a compiler
class Backend:
    """One implementation of an operator.

    `implementation` is a function, or "module:function", a module that is imported when it first serves: kernels need
    Triton, their declaration does not. With `checks_lengths` it asserts by itself that no row is longer than its bound.
    """

    name: str
    implementation: Callable[..., Any] | str
    supports: Verifier = always
    checks_lengths: bool = False
    imported: Callable[..., Any] | None = None

    @property
    def function(self) -> Callable[..., Any]:
        if not isinstance(self.implementation, str):
            return self.implementation
        # A compiler imports first and reads then: what it has read once it takes for unchanged.
        if torch.compiler.is_compiling() or self.imported is None:
            _import(self.implementation)
        assert self.imported is not None
        return self.imported


Formula = Callable[..., float]
Observer = Callable[[str, Tensor, dict[str, Hashable]], Backend]

_registry: dict[str, tuple[Backend, ...]] = {}
_forced: dict[str | None, str] = {}  # operator, or None for every operator -> backend
_chosen: dict[tuple[Hashable, ...], Backend] = {}
_reported: set[tuple[str, str, str]] = set()
_formulas: dict[str, Formula] = {}
_observer: Observer | None = None
_absent: dict[str, Hashable] = {}


def _import(implementation: str) -> bool:
    module, _, function = implementation.partition(":")
    for backend in (backend for backends in _registry.values() for backend in backends):
        if backend.implementation == implementation:
            backend.imported = getattr(importlib.import_module(module), function)
    return True


# As `torch.compiler.assume_constant_result` does, which would first import the compiler, for over a second: a compiler
# runs the function instead of tracing an import.
_import._dynamo_marked_constant = True  # type: ignore[attr-defined]


def declare(op: str, *backends: Backend) -> None:
    """Say which backends `op` has, the preferred one first. ValueError for an operator that is declared already."""
    if op in _registry:
        raise ValueError(f"{op} is declared already; put a further backend in front of its own with dispatch.prefer")
    _registry[op] = ()
    for backend in reversed(backends):
        prefer(op, backend)


def prefer(op: str, backend: Backend) -> None:
    """Put a backend in front of those that `op` has. ValueError for a name that it has already."""
    if backend.name in (names := [other.name for other in _backends(op)]):
        raise ValueError(f"{op} already has a backend {backend.name!r}; choose a name other than {', '.join(names)}")
    _registry[op] = (backend, *_registry[op])
    _chosen.clear()


def operators() -> dict[str, list[str]]:
    """Every operator with the names of its backends, the preferred one first."""
    return {op: [backend.name for backend in _registry[op]] for op in sorted(_registry)}


def flops(*ops: str) -> Callable[[Formula], Formula]:
    """Decorator: the function below it gives the forward FLOPs of the matrix products of `ops`, from the arguments
    that their backends take. What is masked, or beyond the end of a row, does not count."""

    def add(formula: Formula) -> Formula:
        _formulas.update(dict.fromkeys(ops, formula))
        return formula

    return add


def formula(op: str) -> Formula | None:
    """What `flops` was given for `op`; None for an operator without matrix products."""
    return _formulas.get(op)


def reference(op: str) -> Callable[..., Any]:
    """The specification of `op`, which serves any tensors."""
    return next(backend for backend in _backends(op) if backend.name == "reference").function


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """A context in which `observer(op, like, facts)` gives the backend of each call of an operator."""
    global _observer
    outer, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = outer


def force(spec: str) -> None:
    """Ask for backends by name (see the module docstring); an empty spec cancels earlier requests."""
    requests = _parse(spec)
    _forced.clear()
    _forced.update(requests)
    _chosen.clear()


def choose(op: str, backend: str | None, like: Tensor, **facts: Hashable) -> Callable[..., Any]:
    """The function that serves `op` on tensors like `like`; see `choose_backend`."""
    return choose_backend(op, backend, like, **facts).function


def choose_backend(op: str, backend: str | None, like: Tensor, **facts: Hashable) -> Backend:
    """The backend that serves `op` on tensors like `like`.

    `facts` are the properties of this call that verifiers look at. They are part of the cache's key, so they must be
    few and configuration-like (a head dimension, a maximum length), not the row counts of a batch.
    """
    if torch.compiler.is_compiling():
        # A trace must not have side effects: neither the cache nor the log.
        return _select(op, backend, facts_of(like) | facts)[0]
    if _observer is not None:
        return _observer(op, like, facts)
    key = (op, backend, like.device, like.dtype, *facts.items())
    try:
        chosen = _chosen.get(key)
    except TypeError:  # a symbolic size, traced below Dynamo, has no hash
        if not any(isinstance(fact, torch.SymInt) for fact in facts.values()):
            raise
        fixed = {name: int(fact) if isinstance(fact, torch.SymInt) else fact for name, fact in facts.items()}
        return choose_backend(op, backend, like, **fixed)
    if chosen is None:
        chosen, refusals = _select(op, backend, facts_of(like) | facts)
        _report(op, chosen, refusals)
        _chosen[key] = chosen
    return chosen


def choose_in_eager(op: str, backend: str | None, like: Tensor, **facts: Hashable) -> Callable[..., Any]:
    """Like `choose`, but in compiled code the reference unless another backend is asked for: for operators of one pass,
    which a compiler can fuse with their neighbours."""
    if torch.compiler.is_compiling() and requested(op, backend) is None:
        backend = "reference"
    return choose(op, backend, like, **facts)


def serving(op: str, like: Tensor, **facts: Hashable) -> str:
    """The name of the backend that `choose` takes for calls on tensors like `like`, or would on the chip `asked_of`."""
    return _select(op, None, chip_of(like) | facts)[0].name


@contextmanager
def asked_of(capability: tuple[int, int] | None) -> Iterator[None]:
    """A context in which `serving` and `chip_of` answer for a GPU of this capability, which need not be there; None
    changes nothing. What is called in it is still served for the tensors' own device."""
    before = dict(_absent)
    if capability is not None:
        _absent.update(device="cuda", capability=capability)
    try:
        yield
    finally:
        _absent.clear()
        _absent.update(before)


def chip_of(like: Tensor) -> dict[str, Hashable]:
    """`facts_of` a tensor, with the chip `asked_of`."""
    return facts_of(like) | _absent


def selection(op: str, **facts: Hashable) -> tuple[str, dict[str, str]]:
    """(the name of the backend that serves `op` for these facts, why each one before it cannot); the facts are those
    of `explain`, all of them."""
    chosen, refusals = _select(op, None, facts)
    return chosen.name, refusals


def explain(op: str, backend: str | None = None, *, like: Tensor | None = None, **facts: Hashable) -> str:
    """Text that says which backend serves `op` for these facts and why each other one does not.

    Give a tensor as `like`, or `device`, `capability` (None on the CPU) and `dtype` as facts, also of a machine that
    you do not have: `explain("grouped_mm", device="cuda", capability=(9, 0), ...)`. What is not given is taken to be
    as usual (`kernels.core.usual`), which the text says. ValueError for an unknown operator, and for facts of
    backends from elsewhere that have no usual value.
    """
    if like is not None:
        facts = facts_of(like) | facts
    if "device" in facts:
        facts["device"] = str(facts["device"]).partition(":")[0]
    asked = [parameter for backend in _backends(op) for parameter in signature(backend.supports).parameters.values()]
    needed = [each.name for each in asked if each.kind is each.KEYWORD_ONLY and each.default is each.empty]
    given = dict(facts)
    names = dict.fromkeys(("device", "capability", "dtype", *needed, *HANDED_ON.get(op, ())))
    missing = [name for name in names if name not in facts]
    facts |= (assumed := usual_facts(facts, missing))
    if missing := [name for name in missing if name not in facts]:
        raise ValueError(
            f"the backends of {op} also need {', '.join(missing)}: "
            f"explain({op!r}, like=tensor, {', '.join(f'{name}=...' for name in missing)})"
        )
    lines = [f"{op} with " + _listed(given)]
    if assumed:
        lines.append(f"  taken as usual: {_listed(assumed)}")
    try:
        chosen = _select(op, backend, facts)[0].name
    except ValueError as error:
        if op not in _registry:
            raise
        lines.append(f"  refused: {error}")
        chosen = None
    for candidate in _backends(op):
        reason = candidate.supports(**facts)
        verdict = f"no: {reason}" if reason else "chosen" if candidate.name == chosen else "can serve"
        lines.append(f"  {candidate.name:<13} {verdict}")
    return "\n".join(lines)


def _listed(facts: dict[str, Hashable]) -> str:
    return ", ".join(f"{name}={value}" for name, value in facts.items())


def needs_capability(device: str, capability: Hashable, *allowed: tuple[int, int]) -> str | None:
    """A reason unless the call is on a CUDA device whose compute capability is one of `allowed`.

    The list is exact: a later chip need not run an earlier chip's instructions (sm_100 has no wgmma).
    """
    names = ", ".join(f"sm_{major}{minor}" for major, minor in allowed)
    if device != "cuda":
        return f"needs a CUDA device ({names}), the tensors are on {device}"
    if capability not in allowed:
        return f"needs {names}, the device has capability {capability}"
    return None


def needs_triton(device: str, capability: Hashable, *allowed: tuple[int, int]) -> str | None:
    """As `needs_capability`, for a kernel in Triton or Gluon; with nothing `allowed` any chip from sm_80 on is."""
    if allowed:
        if reason := needs_capability(device, capability, *allowed):
            return reason
    elif device != "cuda":
        return f"needs a CUDA device, the tensors are on {device}"
    elif not isinstance(capability, tuple) or capability < (8, 0):
        return f"needs sm_80 or newer, the device has capability {capability}"
    # Code compiled for a GPU needs Triton anyway, and the check would break the compiler's graph.
    found = torch.compiler.is_compiling() or importlib.util.find_spec("triton")
    return None if found else "needs Triton, which is not installed"


def needs_dtype(dtype: torch.dtype, *allowed: torch.dtype) -> str | None:
    """A reason unless the dtype is one of `allowed`."""
    if dtype in allowed:
        return None
    *names, last = (str(one).removeprefix("torch.") for one in allowed)
    return f"takes {', '.join(names)} and {last}, not {dtype}" if names else f"takes {last}, not {dtype}"


def triton_floats(*, device: str, capability: Hashable, dtype: torch.dtype, **facts: Hashable) -> str | None:
    """The verifier of a Triton kernel for every shape and chip, in the dtypes of FLOATS."""
    return needs_triton(device, capability) or needs_dtype(dtype, *FLOATS)


def triton_moves(*, device: str, capability: Hashable, dtype: torch.dtype, **facts: Hashable) -> str | None:
    """As `triton_floats`, for a kernel that moves values without computing with them: integers too."""
    return needs_triton(device, capability) or needs_dtype(dtype, *MOVED)


def facts_of(tensor: Tensor) -> dict[str, Hashable]:
    """The facts of a call that its tensors tell: device type, capability (None on the CPU) and dtype."""
    device = tensor.device
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return {"device": device.type, "capability": capability, "dtype": tensor.dtype}


def _backends(op: str) -> tuple[Backend, ...]:
    if op not in _registry:
        raise ValueError(f"unknown operator {op!r}; known: {', '.join(sorted(_registry))}")
    return _registry[op]


def _parse(spec: str) -> dict[str | None, str]:
    requests: dict[str | None, str] = {}
    for entry in filter(None, (part.strip() for part in spec.split(","))):
        op, _, name = entry.rpartition("=")
        known = {backend.name for backends in _registry.values() for backend in backends}
        if op:
            known = {backend.name for backend in _backends(op)}
        if name not in known:
            where = f"operator {op!r}" if op else "any operator"
            raise ValueError(f"{entry!r}: no backend {name!r} of {where}; known: {', '.join(sorted(known))}")
        requests[op or None] = name
    return requests


def requested(op: str, argument: str | None) -> tuple[str, str] | None:
    """(backend, who asked for it) when somebody asked by name."""
    if argument is not None:
        return argument, "the backend argument"
    for requests, who in (
        (_parse(os.environ.get(ENVIRONMENT_VARIABLE, "")), f"the environment variable {ENVIRONMENT_VARIABLE}"),
        (_forced, "the configuration (runtime.kernels)"),
    ):
        name = requests.get(op, requests.get(None))
        if name is not None:
            return name, who
    return None


def _select(op: str, argument: str | None, facts: dict[str, Hashable]) -> tuple[Backend, dict[str, str]]:
    """(the backend that serves, why each backend that would be preferred to it cannot)."""
    backends = _backends(op)
    refusals = {backend.name: backend.supports(**facts) for backend in backends}
    able = [backend for backend in backends if refusals[backend.name] is None]
    request = requested(op, argument)
    if request is not None:
        name, who = request
        if name not in refusals:
            raise ValueError(f"{op} has no backend {name!r}, asked for by {who}; it has: {', '.join(refusals)}")
        if refusals[name] is not None:
            raise UnsupportedError(
                f"backend {name!r} of {op}, asked for by {who}, cannot serve this call: {refusals[name]}. "
                f"Can serve: {', '.join(backend.name for backend in able)}"
            )
        return next(backend for backend in backends if backend.name == name), {}
    if not able:
        raise UnsupportedError(f"no backend of {op} can serve this call: {refusals}")
    preferred = backends[: backends.index(able[0])]
    return able[0], {backend.name: str(refusals[backend.name]) for backend in preferred}


def _report(op: str, chosen: Backend, refusals: dict[str, str]) -> None:
    """Log once why each preferred backend of `refusals` cannot serve."""
    for name, reason in refusals.items():
        if (op, name, reason) not in _reported:
            _reported.add((op, name, reason))
            level = logging.DEBUG if "are on cpu" in reason else logging.INFO  # nobody looks for kernels there
            _log.log(level, "%s: %s serves, not %s: %s", op, chosen.name, name, reason)


def autocast_dtype(operand: Tensor) -> torch.dtype:
    """The dtype in which autocast would hand the operand to PyTorch's own matrix products: its own outside regions."""
    device = operand.device.type
    # Meta tensors have no autocast; `is_autocast_available` would say so but stops torch.compile in its trace.
    if operand.dtype is torch.float64 or device == "meta" or not torch.is_autocast_enabled(device):
        return operand.dtype
    return torch.get_autocast_dtype(device)


def autocast_operands(**operands: Tensor | None) -> tuple[Any, ...]:
    """The operands as autocast would hand them to PyTorch's own matrix products: unchanged outside its regions.

    Custom operators and autograd functions are not on autocast's list, so public functions call this themselves. None
    stays None. ValueError unless all others then have one dtype: a backend is chosen by the dtype of one of them, and a
    kernel that copies bytes would misread another dtype.
    """
    given = [operand for operand in operands.values() if operand is not None]
    dtype = autocast_dtype(given[0])
    if {operand.dtype for operand in given} == {dtype}:
        return tuple(operands.values())
    dtypes = {name: autocast_dtype(operand) for name, operand in operands.items() if operand is not None}
    if len(set(dtypes.values())) > 1:
        different = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ValueError(f"operands must have one dtype, got {different}")
    return tuple([x if x is None or x.dtype is dtype else x.to(dtype) for x in operands.values()])
