"""The weights that autocast rounds, all rounded at once: a few launches for a step in place of two for each layer.

Autocast casts the float32 weight of each layer where it is read, and its gradient back: two launches that take longer
to begin than to run. Here a forward begins with one cast of them all, and the layers find the results in place of their
parameters; one cast of all gradients ends the backward. Every number stays the same: weights and gradients are rounded
as by autocast, and the gradients of a weight with several readers are added up in autocast's dtype, as those of the
cast that autocast keeps are.

Which weights these are is seen in the first step: those that are cast to autocast's dtype, once, and not read in
another way. So weights stay out that are read in float32, or by a kernel that rounds or quantises them itself. In that
step some operators on a GPU take the way that PyTorch can look into, which adds up gradients in another order.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from train.speedup.regions import regions

log = logging.getLogger(__name__)
LEAST = 3
"""Weights of a layer from which on they are cast together where layers do it for themselves. A layer of fewer gains
little, and may be one whose weights others read as long as its forward is its own."""

aten = torch.ops.aten
MOVES = {
    *(aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten._unsafe_view.default),
    *(aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.select.int, aten.split.Tensor),
    *(aten.split_with_sizes.default, aten.unbind.int, aten.detach.default, aten.alias.default),
    *(aten.clone.default, aten.cat.default, aten.stack.default),
}
"""Operators that give an element at most once and as it was: rounding before them is rounding after them."""

Place = tuple[dict[str, Any], str]
"""A module's parameters by name, and the name of one."""


def cast_together(arch: nn.Module, *, by_layer: bool) -> None:
    """Let training steps of `arch` cast the weights together that autocast would cast one by one.

    With `by_layer`, the layers do so for themselves: a layer's gradients are there when its own backward ends, and data
    parallelism can reduce them during the rest of the backward. Evaluation runs as before. No name in a state dict
    changes.
    """
    arch.forward = CastForward(arch, arch.forward, by_layer=by_layer)


class CastForward:
    """Stands in for a module's forward, which in training runs on casts of `weights`, by default those that the first
    such call shows."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        weights: frozenset[nn.Parameter] | None = None,
        *,
        by_layer: bool = False,
    ) -> None:
        self.forward = forward
        self._module, self._by_layer = module, by_layer
        self._take(weights)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not (self._module.training and torch.is_grad_enabled()):
            return self.forward(*inputs, **named)
        if self._weights is None:
            return self._watched(*inputs, **named)
        dtype = _autocast_dtype(held[name] for held, name in self._places)
        if dtype is None:
            return self.forward(*inputs, **named)
        found = {id(weight := held[name]): weight for held, name in self._places}
        casts = dict(zip(found, _Cast.apply(dtype, *found.values()), strict=True))
        with _replaced(self._places, [casts[id(held[name])] for held, name in self._places]):
            return self.forward(*inputs, **named)

    def of_part(self, part: nn.Module) -> CastForward:
        """What stands in for the forward of a part of the module if that is captured, or called, by itself."""
        return CastForward(part, part.forward, self._weights)

    def _take(self, weights: frozenset[nn.Parameter] | None) -> None:
        self._weights = weights
        self._places = [(held, name) for held, name in places(self._module) if held[name] in (weights or ())]

    def _watched(self, *inputs: Any, **named: Any) -> Any:
        parameters = dict.fromkeys(held[name] for held, name in places(self._module))
        dtype = _autocast_dtype(parameters)
        if dtype is None:
            return self.forward(*inputs, **named)
        with _uncompiled(), Reads(parameters, dtype) as reads:
            result = self.forward(*inputs, **named)
        self._take(weights := reads.only_cast())
        log.debug("%d of %d parameters are cast together", len(weights), len(parameters))
        if self._by_layer:
            self._take(frozenset())
            self._give_to_layers(weights)
        return result

    def _give_to_layers(self, weights: frozenset[nn.Parameter]) -> None:
        layers = list(dict.fromkeys(regions(self._module)))
        holders = Counter(weight for layer in layers for weight in layer.parameters())
        for layer in layers:
            own = frozenset(weight for weight in layer.parameters() if weight in weights and holders[weight] == 1)
            if len(own) >= LEAST:
                layer.forward = CastForward(layer, layer.forward, own)


class Reads(TorchDispatchMode):
    """A context that notes how operators read `parameters`, for `only_cast`."""

    def __init__(self, parameters: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        #: The parameters in each memory, as often as they are there: their own, and of what operators only moved.
        self._within = {_memory(p): [p] for p in parameters if p.dtype is torch.float32 and p.numel()}
        self._kept: list[Tensor] = []  # so that no other tensor gets their memory
        self._casts: Counter[nn.Parameter] = Counter()
        self._other: set[nn.Parameter] = set()

    def only_cast(self) -> frozenset[nn.Parameter]:
        """Parameters that were only cast, once if they have a gradient.

        The gradients of several casts are added up in float32.
        """
        casts = self._casts.items()
        return frozenset(p for p, n in casts if p not in self._other and (n == 1 or not p.requires_grad))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        read = [parameter for each in inputs for parameter in self._within.get(_memory(each), ())]
        if not read:
            return result
        results = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        # Autograd functions read in no-grad mode, and give a gradient in the dtype of what they were given.
        recorded = torch.is_grad_enabled()
        if recorded and func is aten._to_copy.default and result.dtype is self._dtype:
            self._casts.update(read)
        elif recorded and func in MOVES:
            self._within |= {_memory(each): read for each in results}
            self._kept += results
        else:
            self._other.update(read)
        return result


class _Cast(torch.autograd.Function):
    """(dtype, *weights) -> the weights in that dtype. Gradients are those of the casts one by one."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        casts = _cast(weights, dtype)
        ctx.mark_non_differentiable(*[y for x, y in zip(weights, casts, strict=True) if not x.requires_grad])
        return tuple(casts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        arrived = iter(_cast([gradient for gradient in gradients if gradient is not None], torch.float32))
        return None, *[None if gradient is None else next(arrived) for gradient in gradients]


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    casts = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    # A tensor that its cast does not lie like in memory would have all of them copied one by one.
    alike = [cast.stride() == tensor.stride() for cast, tensor in zip(casts, tensors, strict=True)]
    if any(alike):
        torch._foreach_copy_(list(compress(casts, alike)), list(compress(tensors, alike)))
    for cast, tensor, same in zip(casts, tensors, alike, strict=True):
        if not same:
            cast.copy_(tensor)
    return casts


def places(module: nn.Module) -> list[Place]:
    """Where modules hold their parameters."""
    parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    return [(part._parameters, name) for part in parts for name, held in part._parameters.items() if held is not None]


def kept(where: Sequence[Place], forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, which whenever it is called finds the casts that are in place of parameters now."""
    within = [(held, name) for held, name in where if type(held[name]) is Tensor]
    if not within:
        return forward
    casts = [held[name] for held, name in within]

    def run(*inputs: Any, **named: Any) -> Any:
        with _replaced(within, casts):
            return forward(*inputs, **named)

    return run


@contextmanager
def _replaced(where: Sequence[Place], tensors: Sequence[Tensor]) -> Iterator[None]:
    before = [held[name] for held, name in where]
    try:
        for (held, name), tensor in zip(where, tensors, strict=True):
            held[name] = tensor
        yield
    finally:
        for (held, name), tensor in zip(where, before, strict=True):
            held[name] = tensor


def _uncompiled() -> AbstractContextManager[object]:
    """A context in which compiled functions run as they were: a mode would keep them from ever being compiled."""
    loaded = "torch._dynamo" in sys.modules  # importing it takes a second
    return torch.compiler.set_stance("force_eager") if loaded else nullcontext()


def _autocast_dtype(tensors: Iterable[Tensor]) -> torch.dtype | None:
    """The dtype to which autocast casts such tensors; None if it is off or there are none."""
    for tensor in tensors:
        device = tensor.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return None


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
