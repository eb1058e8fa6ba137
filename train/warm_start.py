"""What a new run takes from the checkpoint of another one: `checkpoint.load`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torchrec.distributed.model_parallel import DistributedModelParallel

from train import checkpoint
from train.data.source import Source
from train.distributed import World
from train.optim import Optimizer


def start_of(path: Path) -> Path:
    """The checkpoint that `checkpoint.load` names: itself, or the best one of a run directory."""
    return checkpoint.named(str(path), "") if (path / "checkpoints").is_dir() else path


def load(
    path: Path, model: DistributedModelParallel, optimizer: Optimizer | None, world: World, source: Source
) -> None:
    """What a new run takes from a checkpoint: weights, and with `optimizer` its moments.

    Tables of a `source` that extends the checkpoint's vocabulary have further rows, which stay as they are. Raises
    ValueError when the data, the model or the optimiser is another one.
    """
    extends = source.extends is not None and source.extends == checkpoint.read_meta(path)["data_fingerprint"]
    if not extends:
        checkpoint.check_data(path, source.fingerprint)
    state = checkpoint.model_state(model)
    if optimizer is not None:
        saved = checkpoint.read_meta(path)["config"]["optimizer"]
        for key in ("sparse", "accumulate"):
            if saved[key] != getattr(optimizer.config, key):
                raise ValueError(
                    f"checkpoint.load_optimizer=true: {path} has the moments of optimizer.{key}={saved[key]}, this run "
                    f"has {getattr(optimizer.config, key)}; use the same value or checkpoint.load_optimizer=false"
                )
        if saved.get("frozen") and saved["frozen"] != optimizer.config.frozen:
            raise ValueError(
                f"checkpoint.load_optimizer=true: {path} has no moments of what was frozen there (optimizer.frozen="
                f"{saved['frozen']}), this run has {optimizer.config.frozen}; use the same value or "
                "checkpoint.load_optimizer=false"
            )
        state |= checkpoint.optimizer_state(model, optimizer)
    checkpoint.check_keys(path, state, checkpoint.read_metadata(path), longer_tables=extends)
    checkpoint.read(path, state, model, world, _Prefixes() if extends else None)
    if optimizer is not None:
        optimizer.restore(0, optimizer.total_steps)  # the learning rate's schedule begins anew


class _Prefixes(DefaultLoadPlanner):
    """Reads a saved tensor into the first rows of one with more of them, whose others it leaves alone."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        entries = {
            # Which rows are read is decided by the chunks that were saved; equal sizes are a check.
            name: dataclasses.replace(entry, size=self.state_dict[name].size())
            if isinstance(entry, TensorStorageMetadata) and name in self.state_dict
            else entry
            for name, entry in metadata.state_dict_metadata.items()
        }
        self.metadata = dataclasses.replace(metadata, state_dict_metadata=entries)
