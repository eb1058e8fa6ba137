"""Activation checkpointing: modules that keep their inputs and run again in the backward: `parallel.recompute`."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from modules.models.ranking import RankingModel
from train.speedup.casts import kept, places
from train.speedup.regions import regions

log = logging.getLogger(__name__)


def recompute(model: RankingModel, globs: Sequence[str], *, compiled: bool) -> None:
    """Let the outermost modules of the architecture whose names match a glob run again in the backward.

    With `compiled`, only layers that are compiled as a whole can: compiled code keeps what it likes. Evaluation runs as
    before, and no name in a state dict changes. ValueError for a glob that matches nothing that can run again.
    """
    modules = {f"arch.{name}": module for name, module in model.arch.named_modules() if name}
    layers = set(regions(model.arch))
    chosen: dict[str, nn.Module] = {}
    for glob in globs:
        named = {name: module for name, module in modules.items() if any(fnmatchcase(p, glob) for p in _path(name))}
        found = _outermost({name: module for name, module in named.items() if _runs(module)})
        if not found:
            closest = ", ".join(difflib.get_close_matches(glob, modules, n=3, cutoff=0.0))
            raise ValueError(f"parallel.recompute: {glob!r} matches no module with a forward; closest are {closest}")
        chosen |= found
    chosen = _outermost(chosen)
    inner = next((name for name, module in chosen.items() if module not in layers), None)
    if compiled and inner is not None:
        layer = next(name for name, module in modules.items() if module in layers)
        raise ValueError(
            f"parallel.recompute={list(globs)} matches {inner}, which runtime.compile=true compiles together with what "
            f"is around it; name whole layers, such as {layer}, or use runtime.compile=false"
        )
    for module in chosen.values():
        module.forward = Recomputed(module, module.forward)
    if chosen:
        log.info("run again in the backward: %s", ", ".join(chosen))


def _path(name: str) -> list[str]:
    """The names of a module and of those around it."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _outermost(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    return {name: module for name, module in modules.items() if not set(_path(name)[1:]) & set(modules)}


def _runs(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


class Recomputed:
    """A forward that in training keeps its arguments instead of what its backward reads."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._places, self._forward = places(module), forward

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*inputs, **named)
        return checkpoint(kept(self._places, self._forward), *inputs, use_reentrant=False, **named)
