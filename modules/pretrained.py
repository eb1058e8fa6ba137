"""A trained model as a folder: `PretrainedModel.from_pretrained(folder)` and `save_pretrained(folder)`.

The folder holds `config.json`, which describes the model and its features, and `model.safetensors`, its weights by the
names of the state dict. Neither can run code. Imports no TorchRec and no trainer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from modules.batch import FeatureSpec
from modules.config import ModelConfig, check_options, check_types, from_saved
from modules.layers.embedding.local import LocalEmbedding
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.models import CONFIGS, CustomConfig, build
from modules.models.ranking import RankingModel

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
FORMAT = 1


class PretrainedModel(RankingModel):
    """Logits [C, outputs] of a batch, in one process and plain PyTorch: for scoring, and for training on.

    Parameters have the names that they have in training, so that state dicts go from one to the other.
    """

    def __init__(self, config: ModelConfig, spec: FeatureSpec, device: torch.device | str = "cpu") -> None:
        """`device`: of the embedding tables; "meta" for weights that are loaded with `assign=True`."""
        embedding = LocalEmbedding.of(spec, config, device)
        super().__init__(cast(FeatureEmbedding, embedding), build(config, spec))  # which is called alike
        self.config, self.spec = config, spec

    @property
    def local_embedding(self) -> LocalEmbedding:
        return cast(LocalEmbedding, self.embedding)

    @classmethod
    def from_pretrained(cls, folder: Path | str, device: torch.device | str = "cpu") -> PretrainedModel:
        """The model of a folder, in eval mode. On a CPU its tables stay on the disk until their rows are read.

        A class of your own must be imported before: a folder names it, and does not decide what is imported. ValueError
        for a folder that holds no model, or another one's weights.
        """
        folder = Path(folder)
        config, spec = read_description(folder)
        if not is_importable(config):
            raise ValueError(
                f"{folder / CONFIG} is of a model of your own, {config.name}, and no folder decides what is imported: "
                f"import {config.name.rpartition('.')[0]} first, if you trust it"
            )
        with _understood(folder):
            model = cls(config, spec, "meta")
        _assign(model, folder, "")
        return model.eval().to(device)

    def save_pretrained(self, folder: Path | str) -> None:
        """Write the folder, which need not exist; each file is replaced when it is whole."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        about = {"format": FORMAT, "model": dataclasses.asdict(self.config), "spec": dataclasses.asdict(self.spec)}
        aside = folder / f"{WEIGHTS}.partial"
        save_tensors(_separate(self.state_dict()), aside)
        os.replace(aside, folder / WEIGHTS)
        aside = folder / f"{CONFIG}.partial"
        aside.write_text(json.dumps(about, indent=1))
        os.replace(aside, folder / CONFIG)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """A safetensors file with the rights of other new files: its own writer gives it to its owner alone."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, {"format": "pt"})
    path.chmod(mode)


def load_embedding(folder: Path) -> LocalEmbedding:
    """The embedding of a folder's model alone: it takes no code of the model."""
    config, spec = read_description(folder)
    with _understood(folder):
        embedding = LocalEmbedding.of(spec, config, "meta")
    _assign(embedding, folder, "embedding.")
    return embedding.eval()


@contextmanager
def _understood(folder: Path) -> Iterator[None]:
    """Sizes that no tensor has are ValueErrors, which name the file."""
    try:
        yield
    except (RuntimeError, TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{folder / CONFIG} describes no model that can be built: {error}") from error


def _assign(module: nn.Module, folder: Path, prefix: str) -> None:
    """Give a module the weights of a folder whose names start with a prefix."""
    try:
        saved = load_file(folder / WEIGHTS)
        state = {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}
        module.load_state_dict(state, assign=True)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    except RuntimeError as error:
        raise ValueError(f"{folder / WEIGHTS} is not of the model in {CONFIG}: {error}") from error


def read_description(folder: Path) -> tuple[ModelConfig, FeatureSpec]:
    """What `config.json` of a folder says. ValueError if it is none of `save_pretrained`."""
    path = folder / CONFIG
    try:
        about = json.loads(path.read_text())
        version, model, spec = about["format"], dict(about["model"]), FeatureSpec.from_dict(about["spec"])
        kind = CONFIGS.get(model.get("name", ""), CustomConfig)
    except OSError as error:
        raise ValueError(
            f"{folder} holds no exported model ({error}); write one with train.commands.export, or save_pretrained"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not what save_pretrained writes ({error!r}); export the model anew") from error
    if version != FORMAT:
        raise ValueError(f"{path} has format {version}, this version reads {FORMAT}; export the model anew")
    try:
        config = from_saved(kind, model, "model")
        for part, name in ((config, "model"), (spec, "spec")):
            check_types(part, name)
        check_options(config, "model")
    except ValueError as error:
        raise ValueError(f"{path}: {error}; export the model anew") from error
    return config, spec


def is_importable(config: ModelConfig) -> bool:
    """Whether the class of a model is one of this project, or has been imported."""
    return "." not in config.name or config.name.rpartition(".")[0] in sys.modules


def _separate(state: dict[str, Any]) -> dict[str, Tensor]:
    """Contiguous tensors on the host, none of which shares memory with another: what safetensors can write."""
    seen: set[int] = set()
    tensors = {}
    for name, value in state.items():
        tensor = value.detach().cpu().contiguous()
        whole = tensor.untyped_storage()
        if whole.data_ptr() in seen or whole.nbytes() != tensor.nbytes:
            tensor = tensor.clone()
        seen.add(tensor.untyped_storage().data_ptr())
        tensors[name] = tensor
    return tensors
