"""Forward and backward of the architecture as CUDA graphs: `runtime.cuda_graphs=true`.

A step of a small model waits for the host, which launches a thousand kernels one by one. A graph holds them all and is
launched once. It works only for the shapes that it was captured with, so its use depends on the data: batches of one
size with histories of one total length (`data.pad_events` rounds it up) have few shapes. If the total length differs in
every batch, the layers that do not read histories have graphs of their own.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from modules.batch import RequestBatch
from modules.layers.embedding.tokens import Tokens
from modules.models.scoring import arch_inputs, scoring_inputs, vendor_inputs
from train.speedup.arguments import Apart, take_apart
from train.speedup.casts import CastForward
from train.speedup.regions import regions
from train.speedup.replay import MAX_GRAPHS, MAX_KINDS, WARMUP_STEPS, copy_all

log = logging.getLogger(__name__)
MAX_GRAPHS_OF_LAYER = 4
"""Further shapes run without a graph, because each graph keeps what its backward needs."""
MARGIN = 1.25
"""Memory of a step without a graph, in that of a graph: its gradients are new tensors, and memory is in pieces."""
PATIENCE = 2 * MAX_GRAPHS
"""Shapes that a module may show before one of them must have recurred; otherwise its parts get graphs instead."""


def use_graphs(arch: nn.Module) -> None:
    """Let training steps of `arch` replay CUDA graphs, captured when shapes recur.

    If the shapes of whole batches do not recur, layers whose own shapes do are captured, such as those that see only
    candidates, and parts of the other layers. Evaluation, and shapes that do not recur, run as before. A capture
    records only the device's work: the architecture must not wait for the device, and its `aux_loss` has no gradient.
    """
    arch.forward = _Graphed(arch, arch.forward, _inputs_of_arch, StepMemory(), MAX_GRAPHS)


class StepMemory:
    """Called for the memory of a new graph, it gives all of them the same: a step uses one graph.

    Steps without a graph cannot use it. So a new kind of shapes, whose first steps have none, would need the memory of
    a step twice.
    """

    _handle: Any = None

    def __init__(self) -> None:
        self.renew()

    def __call__(self) -> Any:
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def renew(self) -> None:
        """Give new graphs memory of their own; those of before have been dropped."""
        self._handle = None
        self.size = 0
        """Input elements of the largest graph."""
        self._bytes = 0

    @contextmanager
    def grows(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """A context in which a graph of these inputs is captured."""
        torch.cuda.empty_cache()  # as a capture does, which therefore frees nothing more
        before = torch.cuda.memory_reserved()
        yield
        self._bytes += torch.cuda.memory_reserved() - before
        self.size = max(self.size, _elements(inputs))

    def crowds(self, inputs: Sequence[Tensor]) -> bool:
        """Whether a step of these inputs may lack memory because graphs hold theirs."""
        if not self._bytes:
            return False
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return free - self._bytes < MARGIN * self._bytes * _elements(inputs) / self.size


def _elements(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


class _Graphed:
    """Stands in for a module's forward and replays a graph for each set of shapes of the tensors `apart` finds.

    If the module returns anything but one tensor, or if its shapes do not recur, its own forward is restored and its
    parts get graphs instead.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Tensor],
        apart: Callable[..., Apart],
        pool: Callable[[], Any],
        most: int,
    ) -> None:
        self._module, self._forward, self._apart, self._pool, self._most = module, forward, apart, pool, most
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graphs] = {}

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        if not (self._module.training and torch.is_grad_enabled()):
            return self._forward(*arguments, **named)
        inputs, kind, together = self._apart(*arguments, **named)
        if not inputs or (inputs[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            return self._forward(*arguments, **named)  # a module around this one may be being captured
        key = kind, tuple([(x.shape, x.dtype, x.requires_grad) for x in inputs])
        graphs = self._graphs.get(key)
        if graphs is None:
            if len(self._seen) > MAX_KINDS:
                self._seen.clear()
            self._seen[key] += 1
            if len(self._graphs) == self._most:
                self._make_room(inputs)
                return self._forward(*arguments, **named)
            if self._seen[key] <= WARMUP_STEPS:
                self._make_room(inputs)
                # On copies, as in the capture: compiled layers tell tensors apart by how they lie in memory.
                arguments, named = together([x.clone() for x in inputs])
                result = self._forward(*arguments, **named)
                fits = isinstance(result, Tensor) and result.requires_grad
                if not fits or (len(self._seen) == PATIENCE and not self._graphs):
                    self._leave_to_parts()
                return result
            log.info("captured: %s of %s", type(self._module).__name__, [list(x.shape) for x in inputs])
            graphs = self._graphs[key] = self._capture(inputs, together)
        if graphs.waits_for_backward():
            return self._forward(*arguments, **named)
        return cast(Tensor, _Replay.apply(graphs, *inputs, *graphs.parameters))

    def _capture(self, inputs: list[Tensor], together: Callable[[Sequence[Tensor]], Any]) -> _Graphs:
        memory = self._pool
        if not isinstance(memory, StepMemory):
            return _Graphs(self._module, self._forward, inputs, together, memory())
        if _elements(inputs) > memory.size:
            # Tensors of a larger step do not fit where those of a smaller one were, and would be put beside them. The
            # graphs of smaller steps are captured again when these come, into the memory of this one.
            self._drop(memory)
        with memory.grows(inputs):
            return _Graphs(self._module, self._forward, inputs, together, memory())

    def _make_room(self, inputs: Sequence[Tensor]) -> None:
        """For a step without a graph: drop graphs whose memory it needs. They are captured again when needed."""
        if isinstance(self._pool, StepMemory) and self._pool.crowds(inputs):
            self._drop(self._pool)

    def _drop(self, memory: StepMemory) -> None:
        if self._graphs:
            log.info("%d graphs make room for a step of other shapes", len(self._graphs))
        self._graphs.clear()
        memory.renew()

    def _leave_to_parts(self) -> None:
        self._module.forward = self._forward
        casts = self._forward if isinstance(self._forward, CastForward) else None
        own = self._forward if casts is None else casts.forward
        if getattr(own, "__func__", None) is not type(self._module).forward:
            return  # it is compiled
        self._module.forward = own
        for part in regions(self._module):
            if not isinstance(part.forward, _Graphed):  # as one that two modules share is by now
                forward = part.forward if casts is None else casts.of_part(part)
                # Each graph has memory of its own: a step replays all forwards before the first backward.
                pool = torch.cuda.graph_pool_handle
                part.forward = _Graphed(part, forward, take_apart, pool, MAX_GRAPHS_OF_LAYER)


def _inputs_of_arch(tokens: Tokens, batch: RequestBatch) -> Apart:
    """What an architecture reads, which is less than a batch holds."""
    request, candidate, offsets, histories = scoring_inputs(tokens, batch.candidate_offsets)
    names = list(histories)
    inputs = [request, candidate, offsets, *(part for parts in histories.values() for part in parts)]
    inputs += (part for parts in vendor_inputs(tokens, batch) for part in parts)
    return Apart(inputs, tuple(names), lambda tensors: (_arguments(tensors, names), {}))


def _arguments(inputs: Sequence[Tensor], names: Sequence[str]) -> tuple[Tokens, RequestBatch]:
    """The architecture's arguments from a list of tensors: the last ones are three for each event type in `names`, then
    those of vendors if there are any."""
    request, candidate, offsets, *parts = inputs
    histories = {name: (parts[3 * i], parts[3 * i + 1], parts[3 * i + 2]) for i, name in enumerate(names)}
    return arch_inputs(request, candidate, offsets, histories, tuple(parts[3 * len(names) :]) or None)


class _Plain(nn.Module):
    """The module as it was, for `functional_call`."""

    def __init__(self, module: nn.Module, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module = module
        self._forward = forward

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        return self._forward(*arguments, **named)


class _Graphs:
    """Two graphs of one shape, with the tensors that they read and write."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Tensor],
        inputs: list[Tensor],
        together: Callable[[Sequence[Tensor]], Any],
        pool: Any,
    ) -> None:
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.inputs = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]
        self._step: Callable[[], object | None] = lambda: None
        self._capture(_Plain(module, forward), together(self.inputs), pool)

    def begin(self, step: object) -> None:
        """Note the step that now needs what its forward wrote until its backward, if one comes."""
        self._step = weakref.ref(step)

    def end(self) -> None:
        self._step = lambda: None

    def waits_for_backward(self) -> bool:
        """Whether a forward was replayed whose backward may still come."""
        return self._step() is not None

    def _capture(self, plain: nn.Module, arguments: Any, pool: Any) -> None:
        aliases = leaves_of(plain)
        leaves = (*self.inputs, *aliases.values())
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Other threads may allocate during the capture: loaders pin memory.
        with torch.cuda.graph(self._forward, pool=pool, capture_error_mode="thread_local"):
            output = torch.func.functional_call(plain, aliases, *arguments)
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
        graphs.begin(ctx)
        graphs.run_forward(inputs)
        return graphs.output.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.graphs.run_backward(gradient)
        ctx.graphs.end()
        # Detached, so that a gradient that is kept as it is does not keep the graph's own tensor object. It keeps its
        # memory: the next replay writes over it, so a step has to have used or copied it by then.
        return (None, *(None if g is None else g.detach() for g in ctx.graphs.gradients))
