"""What kernel tests need: poisoned outputs, comparison with a float64 oracle, and compiling for a chip that is absent.

A tolerance is not a chosen number: it states the roundings between inputs and result and the length of the sums, from
which the allowed error follows. See `Tolerance`.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kernels.core import dispatch

E8M0_NAN = 255


def serving(op: str, name: str) -> tuple[dispatch.Backend, ...]:
    """The backends of `op` for `dispatch._registry`, of which `name` serves every call, e.g. in the interpreter."""
    return tuple(
        replace(backend, supports=dispatch.always) if backend.name == name else backend
        for backend in dispatch._registry[op]
    )


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Memory that Python code allocates without filling holds NaN inside this context.

    A kernel that leaves part of its output unwritten then always fails, instead of passing whenever the allocator
    returns zeros. Floating tensors get NaN and uint8 ones 255, which is NaN as an E8M0 scale.
    """

    # The first operator that is called imports this module, which then lists PyTorch's functions.
    import torch._dynamo

    def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.fill_(math.nan)
            elif tensor.dtype is torch.uint8:
                tensor.fill_(E8M0_NAN)
            return tensor

        return allocate_poisoned

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
            (torch.Tensor, "new_empty_strided"),
        ):
            stack.enter_context(mock.patch.object(owner, name, poisoned(getattr(owner, name))))
        yield


@dataclass(frozen=True)
class Tolerance:
    """The error that a correct implementation may have, from where it rounds.

    Rounding errors of random data add up like a random walk: `roundings` in the tensor's own dtype (the result's and
    those of intermediate values), and one per addition of a sum of `reduction` terms in `accumulate`. Their typical
    size is a fraction of the typical magnitude of the result, so an element may be off by

        6 * (sqrt(roundings) * eps(dtype) / 2 + sqrt(reduction) * eps(accumulate) / 2) * (|oracle| + rms(oracle))

    six standard deviations, because a tensor has many elements. `reason` says where the counts come from and is printed
    when a comparison fails. Raise the counts, not the six.
    """

    reason: str
    roundings: int = 1
    reduction: int = 1
    accumulate: torch.dtype = torch.float32

    def bound(self, oracle: Tensor, dtype: torch.dtype) -> Tensor:
        """Allowed absolute error of each element of the float64 `oracle` when the result has `dtype`."""
        own = math.sqrt(self.roundings) * torch.finfo(dtype).eps / 2
        # float64 results are accumulated in float64, whatever narrower dtypes use.
        accumulate = torch.promote_types(self.accumulate, dtype)
        sums = math.sqrt(self.reduction) * torch.finfo(accumulate).eps / 2
        rms = oracle.square().mean().sqrt() if oracle.numel() else 0.0
        return 6 * (own + sums) * (oracle.abs() + rms)


def assert_close_to_oracle(actual: Tensor, oracle: Tensor, tolerance: Tolerance, what: str = "output") -> None:
    """AssertionError naming the worst element unless every element of `actual` is within `tolerance` of `oracle`.

    `oracle` is float64, finite and computed from the same inputs; its rms makes the bound, so an oracle of nothing but
    zeros demands zeros.
    """
    assert oracle.dtype is torch.float64, oracle.dtype
    assert bool(oracle.isfinite().all()), "the oracle is not finite"
    if actual.shape != oracle.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(oracle.shape)}")
    if actual.numel() == 0:
        return
    oracle = oracle.to(actual.device)
    bound = tolerance.bound(oracle, actual.dtype)
    error = (actual.double() - oracle).abs()
    excess = torch.where(error.isnan(), math.inf, error - bound)
    if bool((excess <= 0).all()):
        return
    worst = tuple(int(i) for i in torch.unravel_index(excess.argmax(), excess.shape))
    relative = error / oracle.abs().clamp(min=torch.finfo(torch.float64).tiny)
    raise AssertionError(
        f"{what} ({actual.dtype}): {int((excess > 0).sum())} of {error.numel()} elements are off; worst at {worst}: "
        f"got {actual[worst].item():.9g}, expected {oracle[worst].item():.9g}, allowed {bound[worst].item():.3g}; "
        f"maximum absolute error {error.max().item():.3g}, relative {relative.max().item():.3g}; "
        f"tolerance: {tolerance.reason}"
    )


def sqnr_db(actual: Tensor, oracle: Tensor) -> float:
    """Signal to quantisation noise ratio in dB: 10 log10(sum oracle^2 / sum (actual - oracle)^2)."""
    oracle = oracle.double()
    noise = (actual.double() - oracle).square().sum().item()
    return 10 * math.log10(oracle.square().sum().item() / noise) if noise else math.inf


def check_gradients(
    function: Callable[..., Tensor],
    oracle: Callable[..., Tensor],
    inputs: Mapping[str, Any],
    tolerance: Tolerance,
    gradient_tolerance: Tolerance | None = None,
) -> None:
    """Compare the output and the gradient of every floating input of `function` with `oracle` run in float64.

    Both take `inputs` as keywords and return one tensor. The gradients are those of a random cotangent, the same for
    both. The oracle sees the inputs after their rounding to the tested dtype, so that only `function`'s own errors
    remain.
    """
    own = {name: _leaf(value) for name, value in inputs.items()}
    exact = {name: _leaf(value, torch.float64) for name, value in inputs.items()}
    actual, expected = function(**own), oracle(**exact)
    assert_close_to_oracle(actual, expected.detach(), tolerance)
    names = [name for name, value in own.items() if isinstance(value, Tensor) and value.requires_grad]
    generator = torch.Generator().manual_seed(0)
    cotangent = torch.randn(actual.shape, generator=generator).to(actual)
    gradients = torch.autograd.grad(actual, [own[name] for name in names], cotangent)
    # An oracle of few rows may not use an input at all: its gradient is then zero.
    expected = expected + sum(0.0 * exact[name].sum() for name in names)
    expected_gradients = torch.autograd.grad(expected, [exact[name] for name in names], cotangent.double())
    for name, gradient, expected_gradient in zip(names, gradients, expected_gradients, strict=True):
        if gradient.dtype is not own[name].dtype:
            raise AssertionError(f"gradient of {name} is {gradient.dtype}, the input is {own[name].dtype}")
        assert_close_to_oracle(gradient, expected_gradient, gradient_tolerance or tolerance, f"gradient of {name}")


def _leaf(value: Any, dtype: torch.dtype | None = None) -> Any:
    """A leaf with the value (and the strides, which a clone of a non-contiguous tensor would lose)."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(dtype or value.dtype).requires_grad_()


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for a chip that need not be here; `spill_bytes` are of a thread, `shared_bytes` of a block.

    `serialized`: ptxas lets each wgmma instruction wait for the one before, because their registers would be in use.
    """

    ttgir: str
    ptx: str
    cubin: bytes
    shared_bytes: int
    registers: int
    spill_bytes: int
    serialized: bool

    def contains(self, instruction: str) -> bool:
        """Whether the PTX has an instruction whose name starts with `instruction`, e.g. 'wgmma.mma_async'."""
        return re.search(rf"^[^/\n]*?(?<![\w.]){re.escape(instruction)}(?![\w])", self.ptx, re.MULTILINE) is not None


def compile_ahead(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    target: str,
    num_warps: int = 4,
    divisible_by_16: Sequence[str] = (),
    gluon: bool = False,
    **options: Any,
) -> Compiled:
    """Compile a @triton.jit (or, with `gluon`, a @gluon.jit) kernel for `target`, e.g. "sm_90", without a GPU.

    `signature` gives the type of each run-time argument ("*bf16", "i32", "tensordesc<...>"), `constexprs` the values of
    the others. Pointers are taken as 16-byte aligned, which PyTorch's allocations are, and so are the integers named in
    `divisible_by_16`; without that Triton does not vectorise. `options` go to the compiler, e.g. num_stages, maxnreg.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    if gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as Source
    else:
        from triton.compiler import ASTSource as Source

    names = list(kernel.arg_names)
    types = {name: signature.get(name, "constexpr") for name in names}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or name in divisible_by_16]
    source = Source(
        fn=kernel,
        signature=types,
        constexprs={(names.index(name),): value for name, value in constexprs.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    capability = int(target.removeprefix("sm_"))
    log = io.StringIO()
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        # The register report comes from the very ptxas run that made the binary, so there must be one.
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        built = triton.compile(
            source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps, **options}
        )
    registers = re.search(r"Used (\d+) registers", log.getvalue())
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
    assert registers is not None, f"no resource report from ptxas in: {log.getvalue()!r}"
    assert spills is not None, f"no spill report from ptxas in: {log.getvalue()!r}"
    return Compiled(
        ttgir=built.asm["ttgir"],
        ptx=built.asm["ptx"],
        cubin=built.asm["cubin"],
        shared_bytes=built.metadata.shared,
        registers=int(registers[1]),
        spill_bytes=max(int(spills[1]), int(spills[2])),
        serialized="wgmma.mma_async instructions are serialized" in log.getvalue(),
    )
