"""Which of PyTorch's layers an operator may stand in for, reading their weights."""

from __future__ import annotations

from typing import TypeGuard, TypeVar

from torch import nn

Layer = TypeVar("Layer", bound=nn.Module)


def is_plain(module: nn.Module, kind: type[Layer]) -> TypeGuard[Layer]:
    """Whether `module` is a layer of PyTorch's `kind` that nobody sees when it is not called itself.

    One with hooks or a forward of its own has to be called, and so has one of another class: a precision recipe, a
    parametrization, a wrapper such as LoRA's.
    """
    hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
    return type(module) is kind and not any(hooks) and "forward" not in vars(module)
