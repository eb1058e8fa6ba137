"""Running Triton kernels on the CPU."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import triton
import triton.experimental.gluon  # looks at the functions below while it is imported
import triton.language as tl
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import kernels
from kernels.core import partial_sums
from kernels.core.launch import Launcher
from tests.kernels.core.patched_language import patched


class Interpreted(InterpretedFunction):
    """Leaves the language as it found it also when a kernel calls it, so that later tests can compile."""

    def run(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            with patched():
                return super().run(*arguments, **keywords)
        except InterpreterError as error:
            # Triton 3.6 makes numbers of arrays of one element, which NumPy refuses from 2.5 on.
            if triton.__version__.startswith("3.6.") and "only 0-dimensional arrays" in str(error):
                pytest.skip(f"the interpreter of Triton {triton.__version__} does not run this kernel: {error}")
            raise

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        with patched():
            return self.rewrite()(*arguments, **keywords)


def interpret(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let the kernels and device functions that `modules` hold run in Triton's interpreter, on CPU tensors.

    Its products of half-precision operands are wrong, so what runs here is float32.
    """
    _import_kernels()
    for module in (tl, tl.standard, partial_sums, *modules):
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                monkeypatch.setattr(module, name, Interpreted(value.fn))
            elif isinstance(value, Launcher):
                monkeypatch.setattr(value, "kernel", Interpreted(value.kernel.fn))


@cache
def _import_kernels() -> None:
    """What is first imported while functions are replaced would keep the replacements."""
    for found in pkgutil.walk_packages(kernels.__path__, "kernels."):
        if ".triton" in found.name or ".hopper" in found.name:
            importlib.import_module(found.name)
