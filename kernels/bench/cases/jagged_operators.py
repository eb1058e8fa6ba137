"""Benchmark cases of the jagged operators other than attention, at the shape of the jagged flash attention paper.

A backward case times only the backward of a forward that ran once. The peers are FBGEMM, where it is installed (its
Triton kernels for products and softmax, its C++ operators for these and conversions), and PyTorch on padded tensors.
For comparison there is PyTorch's negation of a tensor, which reads half as many bytes as the operator must move and
writes the other half: what the chip's memory allows in so short a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import jagged
from kernels.bench import Case, Problem, Runner, backends_of, check_relative_error
from kernels.bench.cases import jagged_padded
from kernels.core import dispatch

# Rows, maximum length, width, and the narrow width of products and softmax.
GPU_SHAPE = (1024, 200, 256, 8)
CPU_SHAPE = (8, 10, 16, 4)

# Relative errors that a correct result stays below: one rounding of the result, or tf32 products.
LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
LIMIT_TF32 = 2e-3


@dataclass(frozen=True)
class Sizes:
    rows: int
    maximum: int
    width: int
    narrow: int
    total: int
    total_squared: int


@dataclass(frozen=True)
class Operator:
    """`inputs` are the differentiable tensors that `ours(backend, *inputs)` and the peers take."""

    inputs: Sequence[Tensor]
    ours: Callable[..., Tensor]
    peers: dict[str, Callable[..., Tensor]] = field(default_factory=dict)
    forward_peers: dict[str, Callable[..., Tensor]] = field(default_factory=dict)  # whose backward does not work
    op: str = ""  # name in `kernels.core.dispatch`, if it is not that of the case
    flops: float = 0.0
    kept: float = 0.0  # elements that the forward keeps for the backward besides inputs and output
    saved: Sequence[int] = ()  # indices of the inputs that the backward needs, -1 for the output


def cases(device: torch.device) -> list[Case]:
    on_gpu = device.type == "cuda"
    return [
        Case(
            f"{name}_{direction}_{precision}",
            partial(_problem, name, direction, precision, GPU_SHAPE if on_gpu else CPU_SHAPE),
        )
        for name, product in OPERATORS.items()
        for direction in ("fwd", "bwd")
        for precision in ("bf16", "tf32", "fp32")
        if precision == "fp32" or (on_gpu and (product or precision == "bf16"))
    ]


def _halves(size: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two tensors of `size` bytes together."""
    source = torch.arange(int(size) // 8, device=device).float()
    return source, torch.empty_like(source)


# Operator -> whether it has products of matrices, whose float32 operands may be rounded to tf32.
OPERATORS = {
    "jagged_dense_bmm": True,
    "jagged_jagged_bmm": True,
    "jagged_softmax": False,
    "jagged_jagged_bmm_jagged_out": True,
    "array_jagged_bmm_jagged_out": True,
    "jagged2_softmax": False,
    "jagged_linear": True,
    "jagged_dense_elementwise": False,
    "jagged_elementwise": False,
    "segment_sum": False,
    "segment_mean": False,
    "segment_max": False,
    "jagged_to_padded": False,
    "padded_to_jagged": False,
    "jagged_last": False,
    "jagged_concat": False,
    "jagged_index_select": False,
    "jagged_flip": False,
    "jagged_slice": False,
}


def _sll() -> Any:
    if not torch.cuda.is_available():
        raise dispatch.UnsupportedError("FBGEMM's Triton kernels need a GPU")
    try:
        from fbgemm_gpu.sll import triton as sll
    except ImportError as error:
        raise dispatch.UnsupportedError(f"FBGEMM's Triton kernels are not installed: {error}") from error
    return sll


def _fbgemm() -> Any:
    try:
        import fbgemm_gpu  # noqa: F401  registers the operators
    except ImportError as error:
        raise dispatch.UnsupportedError(f"FBGEMM is not installed: {error}") from error
    return torch.ops.fbgemm


def _operator(name: str, precision: str, sizes: Sizes, offsets: Tensor, random: Callable[..., Tensor]) -> Operator:
    rows, maximum, width, narrow = sizes.rows, sizes.maximum, sizes.width, sizes.narrow
    total, total_squared = sizes.total, sizes.total_squared
    lengths, squares = offsets.diff(), jagged.squared_offsets(offsets)
    tf32 = precision == "tf32"
    triton, plain = "FBGEMM Triton", "FBGEMM C++"
    if name == "jagged_dense_bmm":
        return Operator(
            [random(total, width), random(rows, width, narrow)],
            lambda backend, x, y: jagged.jagged_dense_bmm(x, offsets, y, maximum, backend=backend),
            {
                triton: lambda x, y: _sll().jagged_dense_bmm(x, y, offsets, maximum, tf32, False),
                plain: lambda x, y: _fbgemm().jagged_dense_bmm(x, offsets, y, maximum)[0],
            },
            flops=2.0 * total * width * narrow,
            saved=(0, 1),
        )
    if name == "jagged_jagged_bmm":
        return Operator(
            [random(total, width), random(total, narrow)],
            lambda backend, x, y: jagged.jagged_jagged_bmm(x, y, offsets, maximum, backend=backend),
            {
                triton: lambda x, y: _sll().jagged_jagged_bmm(x, y, offsets, maximum, tf32, False),
                plain: lambda x, y: _fbgemm().jagged_jagged_bmm(x, y, offsets, maximum),
            },
            flops=2.0 * total * width * narrow,
            saved=(0, 1),
        )
    if name == "jagged_softmax":
        return Operator(
            [random(total, narrow)],
            lambda backend, x: jagged.jagged_softmax(x, offsets, backend=backend),
            {
                triton: lambda x: _sll().jagged_softmax(x, offsets, maximum, False),
                plain: lambda x: _fbgemm().jagged_softmax(x, offsets, maximum)[0],
            },
            saved=(-1,),
        )
    if name == "jagged_jagged_bmm_jagged_out":
        return Operator(
            [random(total, width), random(total, width)],
            lambda backend, x, y: jagged.jagged_jagged_bmm_jagged_out(
                x, y, offsets, squares, total_squared, maximum, backend=backend
            ),
            {
                triton: lambda x, y: _sll().jagged_jagged_bmm_jagged_out(
                    x, y, lengths, offsets, lengths, offsets, lengths * lengths, squares, maximum, tf32
                )
            },
            flops=2.0 * total_squared * width,
            saved=(0, 1),
        )
    if name == "array_jagged_bmm_jagged_out":
        return Operator(
            [random(total_squared), random(total, width)],
            lambda backend, a, y: jagged.array_jagged_bmm_jagged_out(a, y, offsets, squares, maximum, backend=backend),
            # Its backward reads beyond the squares and returns a gradient of another shape.
            forward_peers={
                triton: lambda a, y: _sll().array_jagged_bmm_jagged_out(
                    a, y, lengths, squares, lengths, offsets, lengths, offsets, maximum, tf32
                )
            },
            flops=2.0 * total_squared * width,
            saved=(0, 1),
        )
    if name == "jagged2_softmax":
        return Operator(
            [random(total_squared)],
            lambda backend, a: jagged.jagged2_softmax(a, offsets, squares, total, backend=backend),
            {triton: lambda a: _sll().jagged2_softmax(a, offsets, squares, maximum, False)},
            saved=(-1,),
        )
    if name == "jagged_linear":
        return Operator(
            [random(total, width), random(width, width), random(width), random(rows, width)],
            lambda backend, x, weight, bias, row_bias: jagged.jagged_linear(
                x, offsets, weight, bias, row_bias, "gelu", backend=backend
            ),
            flops=2.0 * total * width * width,
            saved=(0, 1),
            kept=1.0 * total * width,
        )
    if name == "jagged_dense_elementwise":
        return Operator(
            [random(total, width), random(rows, width)],
            lambda backend, x, y: jagged.jagged_dense_elementwise(x, offsets, y, "mul", "silu", backend=backend),
            op="jagged_elementwise",
            saved=(0, 1),
        )
    if name == "jagged_elementwise":
        return Operator(
            [random(total, width), random(total, width)],
            lambda backend, x, y: jagged.jagged_elementwise(x, y, "mul", "silu", backend=backend),
            saved=(0, 1),
        )
    if name.startswith("segment"):
        return Operator(
            [random(total, width)],
            lambda backend, x: getattr(jagged, name)(x, offsets, backend=backend),
            saved=(0,) if name == "segment_max" else (),
        )
    return _move(name, sizes, offsets, random)


def _move(name: str, sizes: Sizes, offsets: Tensor, random: Callable[..., Tensor]) -> Operator:
    rows, maximum, width, total = sizes.rows, sizes.maximum, sizes.width, sizes.total
    plain = "FBGEMM C++"
    if name == "jagged_to_padded":
        return Operator(
            [random(total, width)],
            lambda backend, x: jagged.jagged_to_padded(x, offsets, maximum, backend=backend),
            {plain: lambda x: _fbgemm().jagged_to_padded_dense(x, [offsets], [maximum], 0.0)},
        )
    if name == "padded_to_jagged":
        return Operator(
            [random(rows, maximum, width)],
            lambda backend, x: jagged.padded_to_jagged(x, offsets, total, backend=backend),
            {plain: lambda x: _fbgemm().dense_to_jagged(x, [offsets], total)[0]},
        )
    if name == "jagged_last":
        count = max(maximum // 4, 1)
        return Operator(
            [random(total, width)],
            lambda backend, x: jagged.jagged_last(x, offsets, count, backend=backend),
        )
    if name == "jagged_concat":
        other = torch.arange(rows + 1, device=offsets.device) * 4
        return Operator(
            [random(rows * 4, width), random(total, width)],
            lambda backend, a, b: jagged.jagged_concat(a, other, b, offsets, backend=backend)[0],
        )
    if name == "jagged_index_select":
        selection = torch.arange(rows, device=offsets.device) // 2
        selected = int(offsets.diff()[selection].sum())
        lengths = offsets.diff()
        return Operator(
            [random(total, width)],
            lambda backend, x: jagged.jagged_index_select(x, offsets, selection, selected, backend=backend)[0],
            {plain: lambda x: _fbgemm().jagged_index_select(x, lengths, selection, selected)[0]},
        )
    if name == "jagged_flip":
        return Operator(
            [random(total, width)],
            lambda backend, x: jagged.jagged_flip(x, offsets, backend=backend),
        )
    start, length = offsets.diff() // 4, offsets.diff() // 2
    kept = int(length.sum())
    return Operator(
        [random(total, width)],
        lambda backend, x: jagged.jagged_slice(x, offsets, start, length, kept, backend=backend)[0],
    )


def _problem(name: str, direction: str, precision: str, shape: tuple[int, ...], device: torch.device) -> Problem:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    rows, maximum, width, narrow = shape
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, maximum + 1, (rows,), generator=generator)
    sizes = Sizes(rows, maximum, width, narrow, int(lengths.sum()), int(lengths.square().sum()))
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device)
    values = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=values).to(dtype)

    operator = _operator(name, precision, sizes, offsets, random)
    backward = direction == "bwd"
    inputs = [tensor.requires_grad_(backward) for tensor in operator.inputs]

    with torch.no_grad():
        shape_of_out = operator.ours(None, *inputs)
    cotangent = random(*shape_of_out.shape)

    def in_precision(step: Callable[[], Any]) -> Any:
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        try:
            return step()
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    def step_of(function: Callable[..., Tensor], inputs: Sequence[Tensor], cotangent: Tensor) -> Callable[[], Any]:
        if not backward:
            return lambda: in_precision(lambda: function(*inputs))
        out = in_precision(lambda: function(*inputs))
        return lambda: in_precision(lambda: torch.autograd.grad(out, inputs, cotangent, retain_graph=True))

    def runner(function: Callable[..., Tensor]) -> Runner:
        return Runner(step_of(function, inputs, cotangent), tuple if backward else lambda out: (out,))

    def padded_runner() -> Runner:
        peer = jagged_padded.PEERS[name]
        layouts = jagged_padded.Layouts(offsets, maximum, sizes.total, sizes.total_squared)
        tensors = zip(peer.inputs, inputs, strict=True)
        padded = [
            layouts.pad(layout, tensor.detach(), peer.fill).requires_grad_(backward) for layout, tensor in tensors
        ]
        results = peer.inputs if backward else (peer.out,)
        return Runner(
            step_of(peer.function, padded, layouts.pad(peer.out, cotangent)),
            lambda made: tuple(
                layouts.cut(layout, tensor)
                for layout, tensor in zip(results, made if backward else (made,), strict=True)
            ),
        )

    peers = operator.peers if backward else operator.peers | operator.forward_peers
    exact = [tensor.detach().double().requires_grad_(backward) for tensor in inputs]
    out = operator.ours("reference", *exact)
    expected: tuple[Tensor, ...] = (out,)
    if backward:
        expected = torch.autograd.grad(out, exact, cotangent.double())

    def negation() -> Runner:
        source, target = _halves(elements * dtype.itemsize, device)
        return Runner(lambda: torch.neg(source, out=target), lambda _: expected)

    read = out.numel() + sum(out.numel() if i < 0 else inputs[i].numel() for i in operator.saved)
    elements = sum(tensor.numel() for tensor in inputs) + (read + operator.kept if backward else out.numel())
    return Problem(
        contenders=backends_of(operator.op or name, lambda backend: runner(partial(operator.ours, backend)))
        | {peer: partial(runner, function) for peer, function in peers.items()}
        | ({"torch padded": padded_runner} if name in jagged_padded.PEERS else {})
        | {"negation of as many bytes": negation},
        check=check_relative_error(expected, LIMIT_TF32 if precision == "tf32" else LIMITS[dtype]),
        flops=operator.flops * (2.0 if backward else 1.0),
        bytes=elements * dtype.itemsize,
    )
