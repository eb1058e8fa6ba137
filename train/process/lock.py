"""The directory of a run, and one run at a time in it.

The lock is a record lock of the operating system. It belongs to the process: the kernel lets go of it when that ends,
however it ends, and workers that were forked do not hold it on.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from train.process.files import new_folder

if TYPE_CHECKING:  # they import PyTorch
    from train.config.schema import Config
    from train.process.distributed import World

log = logging.getLogger(__name__)
LOCK = "run.lock"
_held: dict[Path, TextIO] = {}


def claim(config: Config, world: World) -> Path:
    """`runtime.run_dir`, or a new one named by rank 0, since processes that start a second apart must agree; locked.

    ValueError when another run is in it, or nothing can be written there.
    """

    def make() -> Path:
        if not config.runtime.run_dir:
            return new_folder(Path(f"runs/{config.model.name}-{config.data.name}-{time.strftime('%Y%m%d-%H%M%S')}"))
        path = Path(config.runtime.run_dir)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def claimed() -> Path:
        try:
            path = make().absolute()
            take(path)
        except OSError as error:
            raise ValueError(
                f"runtime.run_dir={config.runtime.run_dir or 'runs'} cannot be written: {error}; name a folder that "
                "can be, e.g. runtime.run_dir=/tmp/run"
            ) from error
        return path

    return world.by_first(claimed)


def take(run_dir: Path) -> None:
    """Lock a run directory for this process. ValueError that names the process that has it."""
    path = (run_dir / LOCK).resolve()
    if path in _held:  # by an earlier run of this process
        return
    file = path.open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ValueError(
            f"{run_dir} is in use by {holder}: two runs in one folder would overwrite each other's checkpoints and "
            "results. Wait for it, end it, or choose another runtime.run_dir"
        ) from error
    except OSError as error:
        log.warning("%s cannot be locked (%s); see to it that no other run uses this folder", path, error)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    _held[path] = file


def release(run_dir: Path) -> None:
    """Let go of a run directory, where this process has it."""
    file = _held.pop((run_dir / LOCK).resolve(), None)
    if file is not None:
        file.truncate(0)
        file.close()
