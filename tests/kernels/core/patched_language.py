"""Triton's interpreter without what takes two thirds of its time to no effect; importing this file changes it.

It replaces the functions of the language when a kernel is started, and again at each call of a device function, for
which it goes through all that the language holds to find that nothing is left. And it computes once more in 64 bits
each sum, difference and product of integers, whose overflow it would report with the option `debug` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

search = interpreter._patch_lang


class Nothing:
    def restore(self) -> None:
        pass


def patch(function: Any) -> interpreter._LangPatchScope | Nothing:
    """Replaces what `function` sees of the language, if that has not been done."""
    seen = [value for value in function.__globals__.values() if value is tl or value is tl.core]
    return Nothing() if seen and all(each.static_print is print for each in seen) else search(function)


interpreter._patch_lang = patch
options = interpreter.interpreter_builder.options
assert not options.debug
interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


@contextmanager
def patched() -> Iterator[None]:
    """The whole language is replaced in this block: Triton's own device functions see it as `core`."""
    scope = patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        yield
    finally:
        scope.restore()
