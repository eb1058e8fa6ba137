"""Forward and backward of the architecture as CUDA graphs: `runtime.cuda_graphs=true`.

A step of a small model waits for the host, which launches a thousand kernels one by one. A graph holds them all and is
launched once. It is good for the shapes that it was captured with, so what it brings depends on the data: batches
of one size with histories of one total length (`data.pad_events` rounds it up) have few shapes.
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
    """Let training steps of `arch` replay CUDA graphs, captured as soon as a shape comes back.

    Evaluation, and shapes that did not come back, run as before. What a capture records is the device's work alone:
    the architecture must not wait for the device, and its `aux_loss` is without gradient.
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
                # On copies, as in the capture: compiled layers tell tensors apart by how they lie in memory.
                return self._forward(*_arguments([tensor.clone() for tensor in inputs], names))
            events = [len(values) for values, *_ in histories.values()]
            log.info("captured: %s requests, %s candidates, %s events", len(request), len(candidate), events)
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            graphs = self._graphs[shapes] = _Graphs(self._arch, self._forward, inputs, names, self._pool)
        return cast(Tensor, _Replay.apply(graphs, *inputs, *graphs.parameters))


def _arguments(inputs: Sequence[Tensor], names: Sequence[str]) -> tuple[Tokens, RequestBatch]:
    """Of the architecture, from tensors of which the last are three for each event type in `names`."""
    request, candidate, offsets, *parts = inputs
    histories = {name: (parts[3 * i], parts[3 * i + 1], parts[3 * i + 2]) for i, name in enumerate(names)}
    return arch_inputs(request, candidate, offsets, histories)


class _Plain(nn.Module):
    """The architecture as it was, for `functional_call`."""

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
        # Other threads may allocate meanwhile: loaders pin memory.
        with torch.cuda.graph(self._forward, pool=pool, capture_error_mode="thread_local"):
            output = torch.func.functional_call(plain, aliases, arguments)
        self.gradient = torch.empty_like(output)
        with torch.cuda.graph(self._backward, pool=pool, capture_error_mode="thread_local"):
            #: Of each input and parameter; None for those without.
            self.gradients = gradients(output, leaves, self.gradient)
        self.output = output.detach()

    def run_forward(self, inputs: tuple[Tensor, ...]) -> None:
        copy_all(self.inputs, inputs[: len(self.inputs)])  # what follows are the parameters
        self._forward.replay()

    def run_backward(self, gradient: Tensor) -> None:
        self.gradient.copy_(gradient)
        self._backward.replay()


def leaves_of(plain: nn.Module) -> dict[str, Tensor]:
    """Parameters of a capture's own, by name, in the memory of those of `plain` that learn.

    Who waits for a parameter's gradient, as data parallelism does, has tied it to the stream of the steps, which a
    capture must not touch. And no cast of a parameter that autocast keeps from an earlier step is one of theirs.
    """
    return {name: nn.Parameter(each.detach()) for name, each in plain.named_parameters() if each.requires_grad}


def gradients(output: Tensor, leaves: Sequence[Tensor], gradient: Tensor) -> list[Tensor | None]:
    """Of each leaf; None for those without. Captured in the middle of a forward, but outside its autocast region, where
    the backward of a step runs: layers in float32 leave autocast in their forward alone.
    """
    wanted = [tensor for tensor in leaves if tensor.requires_grad]
    with torch.autocast(output.device.type, enabled=False):
        found = iter(torch.autograd.grad(output, wanted, gradient, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in leaves]


class _Replay(torch.autograd.Function):
    """Parameters are arguments, so that whoever waits for their gradients, as data parallelism does, gets them."""

    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, *inputs: Tensor) -> Tensor:
        ctx.graphs = graphs
        graphs.run_forward(inputs)
        return graphs.output.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.graphs.run_backward(gradient)
        # Detached, so that a gradient that is kept as it is does not keep the graph's own tensor object. It keeps its
        # memory: the next replay writes over it, so a step has to have used or copied it by then.
        return (None, *(None if g is None else g.detach() for g in ctx.graphs.gradients))
