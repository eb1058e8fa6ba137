"""How a command ends that fails: the error last on the console, and once; its traceback in a file.

Below a launcher that is `error.json`, where torchrun looks for what happened, and the launcher tells it when all
processes have ended. Without PyTorch, so that launchers use it too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from train.config.places import PREFIX, ROOT

PACKAGES = tuple(f"{ROOT / name}{os.sep}" for name in ("kernels", "launch", "modules", "train"))


def run(main: Callable[[list[str]], Any]) -> NoReturn:
    """End this process as `main(arguments)` ends: with the status that it returns, or 1 and its error on stderr."""
    with contextlib.suppress(OSError):  # of a stderr that is no file
        faulthandler.enable()
    try:
        result = main(sys.argv[1:])
    except Exception as error:
        _tell(error)
        sys.exit(1)
    sys.exit(result if isinstance(result, int) else 0)


def _tell(error: Exception) -> None:
    text = "".join(traceback.format_exception_only(error)).rstrip()
    whole = "".join(traceback.format_exception(error))
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    logs = [handler for handler in logging.getLogger().handlers if isinstance(handler, logging.FileHandler)]
    record = logging.LogRecord(f"{PREFIX}train", logging.ERROR, "", 0, "%s", (whole.rstrip(),), None)
    for handler in logs:
        handler.handle(record)
    if file:
        # torchrun prints "py_callstack".
        message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": {**message, "traceback": whole}}))
        if os.environ.get("TORCHELASTIC_RESTART_COUNT") == os.environ.get("TORCHELASTIC_MAX_RESTARTS"):
            return
    if logs:
        print(f"the traceback is in {Path(logs[0].baseFilename)}", file=sys.stderr)
    elif not file and not _is_of_user(error):
        text = whole.rstrip()
    print(text, file=sys.stderr, flush=True)


def _is_of_user(error: Exception) -> bool:
    """Whether it is one of the ValueErrors by which this project says what is wrong with what it was given."""
    *_, last = traceback.walk_tb(error.__traceback__)
    return isinstance(error, ValueError) and last[0].f_code.co_filename.startswith(PACKAGES)
