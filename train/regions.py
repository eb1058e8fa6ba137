"""The layers of an architecture compiled one by one: `runtime.compile=true`.

Compiled as a whole, each layer would be traced and made code of again, which takes minutes. Here what one was compiled
to serves every other of its class and shapes, however many layers there are.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)
CODE_LIMIT = 64
"""Kinds of call that one forward is compiled for: shapes that layers of a class differ in. PyTorch's own limit is 8."""


def compile_regions(arch: nn.Module) -> None:
    """Let training steps run the layers of `arch` through `torch.compile`; what is between them runs as before.

    The layers are the outermost modules below `arch` with a forward of their own, so not containers and PyTorch's
    layers. First sizes of what they take are sizes of the batch and may differ from call to call, all others are
    compiled in. Evaluation runs as before. No name in a state dict changes.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, CODE_LIMIT)
    # Layers are smaller than what data parallelism reduces at once: their graphs are not to be cut for it.
    config.optimize_ddp = False
    found = Counter(type(region) for region in regions(arch))
    # Inductor's analysis of memory access does not cover dynamic sizes, and on GPUs its assertions fail on some.
    analysis = "triton.coalesce_tiling_analysis"
    compiled = {kind: torch.compile(kind.forward, options={analysis: False}) for kind in found}
    for region in regions(arch):
        region.forward = _Compiled(region, compiled[type(region)])
    if found:
        kinds = ", ".join(f"{count} {kind.__name__}" for kind, count in found.items())
        log.info("the first steps compile what all further ones run: %s", kinds)
    else:
        log.warning(
            "runtime.compile=true compiles nothing: below %s there is no module with a forward of its own, only "
            "PyTorch's; put what belongs together into modules",
            type(arch).__name__,
        )


def regions(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules below this one that have a forward which is not PyTorch's."""
    for child in module.children():
        if type(child).forward.__module__.startswith("torch."):
            yield from regions(child)
        else:
            yield child


class _Compiled:
    """The forward of a layer, by what its class's was compiled to where a gradient may be asked for."""

    def __init__(self, region: nn.Module, compiled: Callable[..., Any]) -> None:
        self._region, self._compiled = region, compiled

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return type(self._region).forward(self._region, *inputs, **named)
        _mark((*inputs, named))
        return self._compiled(self._region, *inputs, **named)


def _mark(inputs: Iterable[Any]) -> None:
    """Say of all tensors among the inputs that their first size may change: else a second batch would compile anew."""
    for each in inputs:
        if isinstance(each, Tensor):
            torch._dynamo.maybe_mark_dynamic(each, 0)
        elif isinstance(each, dict):
            _mark(each.values())
        elif isinstance(each, tuple | list):
            _mark(each)
        elif dataclasses.is_dataclass(each):
            _mark(getattr(each, field.name) for field in dataclasses.fields(each))
