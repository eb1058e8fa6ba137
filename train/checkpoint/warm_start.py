"""What a new run takes from the checkpoint of another one: `checkpoint.load`."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torchrec.distributed.model_parallel import DistributedModelParallel

from train.checkpoint import load as checkpoint
from train.checkpoint import manifest
from train.checkpoint.read import Planner, read_metadata
from train.checkpoint.state import model_state, optimizer_state
from train.config.schema import CheckpointConfig, OptimizerConfig
from train.data.source import Source
from train.optim.dense import Optimizer
from train.process.distributed import World

log = logging.getLogger(__name__)


def load(
    start: CheckpointConfig, model: DistributedModelParallel, optimizer: Optimizer, world: World, source: Source
) -> None:
    """Read the weights of `start.load` into a new run: a checkpoint, or the best one of a run directory.

    If `source` extends the checkpoint's vocabulary, its tables have further rows, which keep their fresh weights.
    Raises ValueError when the data, the model or, with `load_what=optimizer`, the optimiser is another one; with
    `partial` only when nothing fits.
    """
    assert start.load is not None
    path = Path(start.load)
    if (path / "checkpoints").is_dir():
        path = checkpoint.resolve(str(path), "")
    manifest.verify(path, world)
    meta, saved, state = checkpoint.read_meta(path), read_metadata(path), model_state(model)
    extends = source.extends is not None and source.extends == meta["data_fingerprint"]
    if start.load_what == "partial":
        same_data = extends or source.fingerprint == meta["data_fingerprint"]
        state["model"] = _fitting(path, state["model"], saved, extends, same_data)
    else:
        if not extends:
            checkpoint.check_data(path, source.fingerprint)
        checkpoint.check_keys(path, state, saved, longer_tables=extends)
    if start.load_what == "optimizer":
        _check_moments(path, meta["config"]["optimizer"], optimizer.config)
        state |= optimizer_state(model, optimizer.moments())
    checkpoint.take(path, state, model, world, _Prefixes() if extends else None)
    if start.load_what == "optimizer":
        optimizer.restore(0, optimizer.total_steps)  # the learning rate's schedule begins anew
    if optimizer.average is not None:
        optimizer.average.restart()
    log.info("started from the weights of %s", path)


def _fitting(
    path: Path, weights: dict[str, Any], saved: Metadata, longer_tables: bool, same_data: bool
) -> dict[str, Any]:
    """The weights that a checkpoint has in these sizes; on other data, where ids and numbers mean something else, only
    those of the architecture. What is left out is logged."""
    left_out = checkpoint.differences(weights, saved, longer_tables)
    if not same_data:
        fresh = {name: f"model.{name} is of other data" for name in weights if name.startswith("embedding.")}
        left_out = fresh | left_out
    taken = {name: weight for name, weight in weights.items() if name not in left_out}
    if not taken:
        raise ValueError(
            f"checkpoint.load_what=partial: nothing in {path} fits, e.g. {next(iter(left_out.values()))}; use the "
            "model options that are in its meta.json"
        )
    log.info("%s of %s tensors are taken from %s", len(taken), len(weights), path)
    if left_out:
        log.warning("not taken:\n%s", "\n".join(left_out.values()))
    return taken


def _check_moments(path: Path, theirs: dict[str, Any], ours: OptimizerConfig) -> None:
    """ValueError unless an optimiser with the configuration `theirs` has the moments that this one needs."""
    for key in ("dense", "sparse", "accumulate", "frozen"):
        before, now = theirs.get(key), getattr(ours, key)
        if before and before != now:  # if nothing was frozen, all moments exist
            raise ValueError(
                f"checkpoint.load_what=optimizer: {path} has the moments of optimizer.{key}={before}, this run has "
                f"{now}; use the same value or checkpoint.load_what=weights"
            )


class _Prefixes(Planner):
    """Reads a saved tensor into the first rows of a longer one, whose other rows stay as they are."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        entries = {
            # The chunks that were saved decide which rows are read. Sizes are set equal to pass a check.
            name: dataclasses.replace(entry, size=self.state_dict[name].size())
            if isinstance(entry, TensorStorageMetadata) and name in self.state_dict
            else entry
            for name, entry in metadata.state_dict_metadata.items()
        }
        self.metadata = dataclasses.replace(metadata, state_dict_metadata=entries)
