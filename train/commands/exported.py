"""A checkpoint's model as exporting and scoring take it: whole, unsharded, in eval mode."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from modules.embedding import FeatureEmbedding
from modules.models import build as build_arch
from modules.models.ranking import RankingModel
from train.checkpoint import save as checkpoint
from train.config.schema import Config
from train.data.source import Source


def load_model(path: Path, config: Config, source: Source, max_candidates: int, device: torch.device) -> RankingModel:
    """The checkpoint's model in eval mode, whole and unsharded, for requests of up to `max_candidates` candidates."""
    checkpoint.check_data(path, source.fingerprint)
    spec = dataclasses.replace(source.spec, max_candidates=max_candidates)
    arch = build_arch(config.model, spec)
    model = RankingModel(FeatureEmbedding(spec, config.model.dim, "cpu", config.model.table_dims), arch)
    checkpoint.load_weights(path, model)
    return model.eval().to(device)
