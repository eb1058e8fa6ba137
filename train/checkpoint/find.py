"""Which checkpoints a run has, which of them are whole, and what their `meta.json` says."""

from __future__ import annotations

import json
import logging
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from train.checkpoint import manifest
from train.checkpoint.manifest import DamagedError
from train.checkpoint.progress import META, Progress
from train.process.distributed import World
from train.process.files import fault_of

log = logging.getLogger(__name__)


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints of a run's checkpoint folder, oldest first."""
    return sorted(path for path in folder.glob("step_????????") if (path / META).exists())


def newest_intact(folder: Path, world: World) -> Path | None:
    """The newest checkpoint whose files are as they were written, None if there is no checkpoint.

    Newer ones that are damaged are warned of and renamed, so that they count as checkpoints no more. Raises
    `DamagedError` if all are.
    """
    damaged: dict[Path, DamagedError] = {}
    # A node of a shared file system may see a new folder later. A folder is renamed when it is whole: one without its
    # meta.json has lost it.
    whole = world.by_first(lambda: sorted(path for path in folder.glob("step_????????") if path.is_dir()))
    for path in reversed(whole):
        try:
            manifest.verify(path, world)
        except DamagedError as error:
            damaged[path] = error
            continue
        for newer, fault in damaged.items():
            aside = world.by_first(partial(_set_aside, newer))
            log.warning("%s. The run goes on from %s; the damaged one is now %s", fault, path.name, aside.name)
        return path
    for fault in damaged.values():
        raise fault
    return None


def intact_best(folder: Path, progress: Progress, world: World) -> Path | None:
    """The best checkpoint, None where the newest one or none is best.

    One that is damaged or lost is warned of and set aside, and the best of the validations whose checkpoints are whole
    takes its place in `progress`.
    """
    while progress.best_step not in (0, progress.step):
        path = folder / f"step_{progress.best_step:08d}"
        try:
            if not world.by_first(path.is_dir):
                raise DamagedError(path, "it is lost")
            manifest.verify(path, world)
        except DamagedError as error:
            fault = error
        else:
            return path
        progress.forget_best(world.by_first(partial(_steps_without, path)))
        best = f"step {progress.best_step} is best now" if progress.best_step else "none of the others was validated"
        log.warning("%s. It was the best in validation, and %s", fault, best)
    return None


def _steps_without(path: Path) -> set[int]:
    """Those of the checkpoints that are left when this one is set aside."""
    if path.is_dir():
        _set_aside(path)
    return {int(each.name.removeprefix("step_")) for each in checkpoints(path.parent)}


def _set_aside(path: Path) -> Path:
    aside = path.with_suffix(".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that the newest one (whose `meta.json` can be read) names as best on validation, None without."""
    for newest in reversed(checkpoints(folder)):
        try:
            best = folder / f"step_{read_meta(newest)['progress']['best_step']:08d}"
        except DamagedError as error:
            log.warning("%s", error)
            continue
        if best.exists():
            return best
        if best.name != "step_00000000":
            log.warning("%s, the best in validation, is lost", best)
        return None
    return None


def resolve(run_dir: str, path: str) -> Path:
    """What a command's `checkpoint=` names, or the best checkpoint of its `run_dir=`, the newest if none was validated.

    Raises ValueError unless one of the two is named, the other empty, and when the run has no whole checkpoint.
    """
    if bool(run_dir) == bool(path):
        other = ", not both" if path else ""
        raise ValueError(f"name a run or one of its checkpoints: run_dir=RUN_DIR or checkpoint=PATH{other}")
    if path:
        return Path(path)
    folder = Path(run_dir) / "checkpoints"
    newest = checkpoints(folder)[-1:]
    if not newest:
        raise ValueError(f"{folder} holds no whole checkpoint; name a run that saved one, or checkpoint=PATH")
    return best_checkpoint(folder) or newest[0]


def read_meta(path: Path) -> dict[str, Any]:
    """`meta.json` of a checkpoint. ValueError when `path` is no checkpoint, `DamagedError` when it is a damaged one."""
    try:
        text = (path / META).read_text()
    except OSError as error:
        raise ValueError(
            f"{path} is not a readable checkpoint ({error}); expected one such as RUN_DIR/checkpoints/step_00000100"
        ) from error
    expected = manifest.read(path).get(META)
    if expected is not None and (fault := fault_of(path / META, expected)):
        raise DamagedError(path, fault)
    try:
        meta = json.loads(text)
    except ValueError as error:
        raise DamagedError(path, f"{META}: {error}") from error
    kinds = {"config": dict, "progress": dict, "data_fingerprint": str}
    for key, kind in kinds.items():
        if not isinstance(meta, dict) or not isinstance(meta.get(key), kind):
            raise DamagedError(path, f"{META} has no {key!r}")
    return meta
