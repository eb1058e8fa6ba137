"""Operators of `torch.library` that cost the host little to call.

`torch.compile`, `opcheck`, dispatch modes and function transforms see an operator as `torch.library.custom_op` would
make it. If none of these is active, a call goes straight to the function, or to an autograd function around it where a
gradient is needed, because PyTorch's dispatcher would pass through Python several times. Profilers then show the
kernels, but not the operator.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import Function, forward_ad
from torch.nn import Parameter

from kernels.core.caches import uncached

_libraries: dict[str, torch.library.Library] = {}
#: Operator, e.g. "gemsmith::jagged_concat" -> the module that defines it. Most modules are imported when first needed,
#: so a process that loads a program written by another one must import the modules of the operators that it calls.
defined_in: dict[str, str] = {}
# For each kind of argument in a schema: its Python type, and a conversion of other numbers to it.
_CONVERSIONS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "FloatType": (float, float),
    "IntType": (int, operator.index),
    "SymIntType": (int, operator.index),
}


class Operator:
    """Called with positional arguments, all of them. It changes none of them and returns none of them."""

    def __init__(self, name: str, schema: str | None, function: Callable[..., Any]) -> None:
        namespace, self._name = name.split("::")
        if namespace not in _libraries:
            _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
        self._library = _libraries[namespace]
        if schema is None:
            schema = torch.library.infer_schema(function, mutates_args=())
        defined_in[name] = function.__module__
        self._library.define(self._name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        # A compiler that gave up on a caller would compile the functions that it calls. Such code writes a tensor
        # over one that is no longer read, in the same Python object and without counting it.
        below = torch._disable_dynamo(uncached(on_its_device(function)))
        self._library.impl(self._name, below, "CompositeExplicitAutograd")
        #: What `torch.library.opcheck` takes.
        self.definition = getattr(getattr(torch.ops, namespace), self._name).default
        # PyTorch's dispatcher would convert them: Triton takes the integer 1 as a constant, and no NumPy numbers.
        self._numbers = [
            (place, _CONVERSIONS[kind])
            for place, argument in enumerate(self.definition._schema.arguments)
            if (kind := argument.real_type.kind()) in _CONVERSIONS
        ]
        self._function = function
        self._library.impl(self._name, self._autograd, "Autograd")
        self._run = torch._disable_dynamo(lambda arguments: self._run_direct(arguments))
        self.__doc__ = function.__doc__

        def refuse(ctx: Any, *gradients: Any) -> Any:
            raise RuntimeError(f"{name} has no gradient; give it one with register_autograd")

        self.register_autograd(refuse, setup_context=lambda ctx, inputs, output: None)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator for a function of the same arguments that makes empty results."""
        torch.library.register_fake(f"{self._library.ns}::{self._name}", fake, lib=self._library)
        return fake

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """`backward(ctx, *gradients)` and `setup_context(ctx, inputs, output)` as of `torch.library`."""
        # Without the check for functorch's wrappers, which such a call does not have.
        self._apply = super(Function, _differentiable(self._function, backward, setup_context)).apply
        self._watched_apply = _differentiable(self._below_autograd, backward, setup_context).apply

    def __call__(self, *arguments: Any) -> Any:
        if intercepted(arguments):
            return self.definition(*arguments)
        if get_eval_frame_callback() is None:  # so no compiler is at work
            return self._run_direct(arguments)
        return self._run(arguments)

    def _run_direct(self, arguments: tuple[Any, ...]) -> Any:
        for place, (kind, convert) in self._numbers:
            if type(arguments[place]) is not kind:
                arguments = (*arguments[:place], convert(arguments[place]), *arguments[place + 1 :])
        run = self._apply if _differentiates(arguments) else self._function
        return _run_on_its_device(run, arguments)

    def _autograd(self, *arguments: Any) -> Any:
        if _differentiates(arguments):
            return self._watched_apply(*arguments)
        return self._below_autograd(*arguments)

    def _below_autograd(self, *arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return self.definition(*arguments)


def custom_op(
    name: str, *, schema: str | None = None, like: str | Sequence[str] | None = None
) -> Callable[[Callable[..., Any]], Operator]:
    """Decorator that makes the function below it an operator, for every device.

    `schema` is needed where the annotations of the function do not say it. `like` names the argument whose shape and
    dtype the result has, contiguous, or one for each of several results; other operators `register_fake`.
    """

    def make(function: Callable[..., Any]) -> Operator:
        made = Operator(name, schema, function)
        if like is not None:
            made.register_fake(_empty_like(function, like))
        return made

    return make


def _empty_like(function: Callable[..., Any], like: str | Sequence[str]) -> Callable[..., Any]:
    names = list(signature(function).parameters)
    places = [names.index(name) for name in ([like] if isinstance(like, str) else like)]

    def fake(*arguments: Any) -> Any:
        results = [arguments[place].new_empty(arguments[place].shape) for place in places]
        return results[0] if isinstance(like, str) else tuple(results)

    return fake


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, called with the GPU of its first tensor as the current one, as PyTorch's operators are.

    Triton launches on the current GPU, wherever tensors are.
    """

    @wraps(function)
    def call(*arguments: Any) -> Any:
        return _run_on_its_device(function, arguments)

    return call


def _run_on_its_device(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    for argument in arguments:
        if isinstance(argument, Tensor):
            if argument.is_cuda and argument.get_device() != torch._C._cuda_getDevice():
                with torch.cuda.device(argument.device):
                    return function(*arguments)
            break
    return function(*arguments)


def _differentiable(
    function: Callable[..., Any], backward: Callable[..., Any], setup_context: Callable[..., None]
) -> type[Function]:
    class Differentiable(Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            output = function(*arguments)
            setup_context(ctx, arguments, output)
            return output

    Differentiable.backward = staticmethod(backward)  # type: ignore[method-assign]
    return Differentiable


def _differentiates(arguments: tuple[Any, ...]) -> bool:
    """Whether a derivative may be needed. Forward mode has none: autograd's function raises the error for it."""
    return (torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)) or forward_ad._current_level >= 0


def intercepted(arguments: tuple[Any, ...]) -> bool:
    """Whether PyTorch's dispatcher is needed: by a compiler, mode, trace, transform, subclass or lazy tensor."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._len_torch_dispatch_stack() or torch._C._is_tracing() or torch._C._are_functorch_transforms_active():
        return True
    for argument in arguments:
        kind = type(argument)
        if kind is Tensor or kind is Parameter:
            if argument.is_meta or argument.is_neg() or is_functorch_wrapped_tensor(argument):
                return True
        elif isinstance(argument, Tensor):
            return True
    return False
