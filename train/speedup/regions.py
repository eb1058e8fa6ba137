"""The layers of an architecture compiled one by one: `runtime.compile=true`.

Compiled as a whole, the architecture would have every layer traced and compiled separately, which takes minutes. Here
all layers of one class and shape share their compiled code, however many there are.
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
"""How often one forward may be compiled, for layers of a class with different shapes. PyTorch's own limit is 8."""


def compile_regions(arch: nn.Module) -> None:
    """Let training steps run the layers of `arch` through `torch.compile`; what is between them runs as before.

    The layers are the outermost modules below `arch` with a forward of their own, so not containers and PyTorch's
    layers. The first size of each input belongs to the batch and may differ from call to call; all others are constants
    of the compiled code. Evaluation runs as before. No name in a state dict changes.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, CODE_LIMIT)
    # Layers are smaller than the buckets that data parallelism reduces, so it must not split their graphs.
    config.optimize_ddp = False
    found = Counter(type(region) for region in regions(arch))
    # Inductor's analysis of memory access does not support dynamic sizes: on GPUs its assertions fail for some.
    analysis = "triton.coalesce_tiling_analysis"
    compiled = {kind: torch.compile(kind.forward, options={analysis: False}) for kind in found}
    for region in regions(arch):
        region.forward = _Compiled(region, compiled[type(region)])
    if found:
        kinds = ", ".join(f"{count} {kind.__name__}" for kind, count in found.items())
        log.info("the first steps compile the layers for all further ones: %s", kinds)
    else:
        log.warning(
            "runtime.compile=true compiles nothing: below %s there is no module with a forward of its own, only "
            "PyTorch's; group its layers into modules of your own",
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
    """A layer's forward: the compiled one of its class in training, where gradients may be needed."""

    def __init__(self, region: nn.Module, compiled: Callable[..., Any]) -> None:
        self._region, self._compiled = region, compiled

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return type(self._region).forward(self._region, *inputs, **named)
        _mark((*inputs, named))
        return self._compiled(self._region, *inputs, **named)


def _mark(inputs: Iterable[Any]) -> None:
    """Mark the first size of all input tensors as dynamic: otherwise a second batch would be compiled again."""
    for each in inputs:
        if isinstance(each, Tensor):
            torch._dynamo.maybe_mark_dynamic(each, 0)
        elif isinstance(each, dict):
            _mark(each.values())
        elif isinstance(each, tuple | list):
            _mark(each)
        elif dataclasses.is_dataclass(each):
            _mark(getattr(each, field.name) for field in dataclasses.fields(each))
