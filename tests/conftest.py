"""Commands that tests start (torchrun above all) are those of the interpreter that runs the tests; some are `slow`."""

from __future__ import annotations

import faulthandler
import inspect
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from train.process.imports import lasting

os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

SLOW_FOLDERS = {"distributed", "e2e"}
# Compiling kernels and layers, interpreting kernels, and processes that import PyTorch anew.
SLOW_CALLS = {"compile_ahead", "compile", "interpret", "run", "Popen", "run_ranks", "train_ranks", "train_here"}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting imports all that is tested."""
    with lasting():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks `slow` what `make quick` leaves out: tests of SLOW_FOLDERS, and those that call SLOW_CALLS."""
    for item in items:
        if SLOW_FOLDERS & {*item.path.parts} or (isinstance(item, pytest.Function) and calls_slow(item)):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    """A test on a GPU that does not end takes its process with it, and another worker (`-n`) goes on: nothing else ends
    a kernel that waits for ever.
    """
    if not item.get_closest_marker("gpu"):
        return None
    timer = threading.Timer(settings.timeout, give_up, (item, settings.timeout))
    timer.start()
    # Where a call into the driver does not let other threads run.
    faulthandler.dump_traceback_later(settings.timeout + 10, exit=True)

    def cancel() -> None:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()

    item.cancel_timeout = cancel
    return True


def give_up(item: Any, seconds: float) -> None:
    from kernels.core.launch import launched_last
    from tools.gpu_ledger import record

    why = f"took more than {seconds:g} s; launched last: {launched_last()}"
    record(item.nodeid, "hangs", why)
    item.config.pluginmanager.getplugin("capturemanager").suspend_global_capture(item)
    sys.stderr.write(f"\n{item.nodeid} {why}\n")
    faulthandler.dump_traceback()
    os._exit(1)


def calls_slow(item: pytest.Function) -> bool:
    """Whether a test, a fixture or a parameter of it names one of SLOW_CALLS, itself or by functions of the tests."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    waiting = [item.obj, *(each.func for given in fixtures for each in given), *filter(callable, parameters)]
    known = set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        function = getattr(function, "__func__", function)
        if not inspect.isfunction(function) or function in known:
            continue
        known.add(function)
        names = set(names_of(function.__code__))
        if names & SLOW_CALLS:
            return True
        waiting += [value for name in names if is_of_tests(value := function.__globals__.get(name))]
    return False


def names_of(code: CodeType) -> Iterator[str]:
    """Global names and attributes that a function uses, those of functions inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_of(constant)


def is_of_tests(value: Callable[..., Any] | None) -> bool:
    return callable(value) and getattr(value, "__module__", "").startswith("tests.")
