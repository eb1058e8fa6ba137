"""Which of PyTorch's layers an operator may replace by reading their weights."""

from __future__ import annotations

from typing import TypeGuard, TypeVar

from torch import nn

Layer = TypeVar("Layer", bound=nn.Module)


def is_vanilla(module: nn.Module, kind: type[Layer]) -> TypeGuard[Layer]:
    """Whether `module` is PyTorch's layer `kind` itself and need not be called for its effect.

    A layer with hooks or a forward of its own must be called, and so must one of another class: a precision recipe, a
    parametrization, a wrapper such as LoRA's.
    """
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return type(module) is kind and not any(hooks) and "forward" not in vars(module)
