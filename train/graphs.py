"""Forward and backward of the architecture as CUDA graphs: `runtime.cuda_graphs=true`.

A step of a small model waits for the host, which launches a thousand kernels one by one. A graph holds them all and is
launched once. It works only for the shapes that it was captured with, so its use depends on the data: batches of one
size with histories of one total length (`data.pad_events` rounds it up) have few shapes.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from modules.batch import RequestBatch
from modules.embedding import Tokens
from modules.models.scoring import arch_inputs, scoring_inputs
from train.replay import MAX_GRAPHS, MAX_KINDS, WARMUP_STEPS, copy_all

log = logging.getLogger(__name__)


def use_graphs(arch: nn.Module) -> None:
    """Let training steps of `arch` replay CUDA graphs, captured when shapes recur.

    Evaluation, and steps with shapes that have not recurred, run as before. A capture records only the device's work:
    the architecture must not wait for the device, and its `aux_loss` has no gradient.
    """
    arch.forward = _Graphed(arch, arch.forward)


class _Graphed:
    """`forward(tokens, batch)` by shapes."""

    def __init__(self, arch: nn.Module, forward: Callable[[Tokens, RequestBatch], Tensor]) -> None:
        self._arch, self._forward = arch, forward
        self._seen: Counter[tuple[torch.Size, ...]] = Counter()
        self._graphs: dict[tuple[torch.Size, ...], _Graphs] = {}
        self._pool: Any = None

    def __call__(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        if not (self._arch.training and torch.is_grad_enabled()):
            return self._forward(tokens, batch)
        request, candidate, offsets, histories = scoring_inputs(tokens, batch.candidate_offsets)
        inputs = [request, candidate, offsets, *(part for parts in histories.values() for part in parts)]
        names = list(histories)
        shapes = tuple(tensor.shape for tensor in inputs)
        graphs = self._graphs.get(shapes)
        if graphs is None:
            if len(self._seen) > MAX_KINDS:
                self._seen.clear()
            self._seen[shapes] += 1
            if len(self._graphs) == MAX_GRAPHS:
                return self._forward(tokens, batch)
            if self._seen[shapes] <= WARMUP_STEPS:
                # On copies, as in the capture: compiled layers are specialised to how tensors lie in memory.
                return self._forward(*_arguments([tensor.clone() for tensor in inputs], names))
            events = [len(values) for values, *_ in histories.values()]
            log.info("captured: %s requests, %s candidates, %s events", len(request), len(candidate), events)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graphs = self._graphs[shapes] = _Graphs(self._arch, self._forward, inputs, names, self._pool)
        return cast(Tensor, _Replay.apply(graphs, *inputs, *graphs.parameters))


def _arguments(inputs: Sequence[Tensor], names: Sequence[str]) -> tuple[Tokens, RequestBatch]:
    """The architecture's arguments from a list of tensors, whose last ones are three for each event type in `names`."""
    request, candidate, offsets, *parts = inputs
    histories = {name: (parts[3 * i], parts[3 * i + 1], parts[3 * i + 2]) for i, name in enumerate(names)}
    return arch_inputs(request, candidate, offsets, histories)


class _Plain(nn.Module):
    """The architecture with its original forward, for `functional_call`."""

    def __init__(self, arch: nn.Module, forward: Callable[[Tokens, RequestBatch], Tensor]) -> None:
        super().__init__()
        self.arch = arch
        self._forward = forward

    def forward(self, tokens: Tokens, batch: RequestBatch) -> Tensor:
        return self._forward(tokens, batch)


class _Graphs:
    """Two graphs of one shape, with the tensors that they read and write."""

    def __init__(
        self,
        arch: nn.Module,
        forward: Callable[[Tokens, RequestBatch], Tensor],
        inputs: list[Tensor],
        names: list[str],
        pool: Any,
    ) -> None:
        self.parameters = [parameter for parameter in arch.parameters() if parameter.requires_grad]
        self.inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
        self._capture(_Plain(arch, forward), _arguments(self.inputs, names), pool)

    def _capture(self, plain: nn.Module, arguments: tuple[Tokens, RequestBatch], pool: Any) -> None:
        aliases = leaves_of(plain)
        leaves = (*self.inputs, *aliases.values())
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Other threads may allocate during the capture: loaders pin memory.
        with torch.cuda.graph(self._forward, pool=pool, capture_error_mode="thread_local"):
            output = torch.func.functional_call(plain, aliases, arguments)
        self.gradient = torch.empty_like(output)
        with torch.cuda.graph(self._backward, pool=pool, capture_error_mode="thread_local"):
            #: Gradients of each input and parameter; None for those without one.
            self.gradients = gradients(output, leaves, self.gradient)
        self.output = output.detach()

    def run_forward(self, inputs: tuple[Tensor, ...]) -> None:
        copy_all(self.inputs, inputs[: len(self.inputs)])  # what follows are the parameters
        self._forward.replay()

    def run_backward(self, gradient: Tensor) -> None:
        self.gradient.copy_(gradient)
        self._backward.replay()


def leaves_of(plain: nn.Module) -> dict[str, Tensor]:
    """New leaf tensors for a capture, by name, which share the memory of the trainable parameters of `plain`.

    The parameters themselves cannot be used: whatever waits for their gradients, as data parallelism does, has tied
    them to the stream of the steps, which a capture must not touch. And autocast may hold casts of them from an
    earlier step.
    """
    return {name: nn.Parameter(each.detach()) for name, each in plain.named_parameters() if each.requires_grad}


def gradients(output: Tensor, leaves: Sequence[Tensor], gradient: Tensor) -> list[Tensor | None]:
    """The gradient of each leaf; None for those without one.

    Called inside a forward, but outside of its autocast region, like the backward of a step: layers in float32 switch
    autocast off in their forward only.
    """
    wanted = [tensor for tensor in leaves if tensor.requires_grad]
    with torch.autocast(output.device.type, enabled=False):
        found = iter(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in leaves]


class _Replay(torch.autograd.Function):
    """Replays both graphs. Parameters are arguments, so that data parallelism gets their gradients."""

    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, *inputs: Tensor) -> Tensor:
        ctx.graphs = graphs
        graphs.run_forward(inputs)
        return graphs.output.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.graphs.run_backward(gradient)
        # Detached, so that `.grad` does not become the graph's own tensor object. It shares its memory, which the next
        # replay overwrites: a step must have used or copied it by then.
        return (None, *(None if g is None else g.detach() for g in ctx.graphs.gradients))
