"""Ranking models by name. Each takes (spec, dim, fields of its configuration) and maps tokens to logits [C, tasks]."""

from __future__ import annotations

from typing import Any

from torch import nn

from modules.batch import FeatureSpec
from modules.import_object import import_object
from modules.models.baselines import DIN, DLRM, DCNv2
from modules.models.interformer import InterFormer

MODELS: dict[str, type[nn.Module]] = {"interformer": InterFormer, "din": DIN, "dcnv2": DCNv2, "dlrm": DLRM}


def build(name: str, spec: FeatureSpec, **fields: Any) -> nn.Module:
    """The model called `name`, or the class `module.Class`, for the data of `spec`; `fields` are its other arguments.

    A model has `forward(tokens, batch) -> logits [C, tasks]`, `aux_loss() -> scalar tensor` and `flops_per_batch(
    num_requests, num_candidates, sum_lengths, sum_squared_lengths) -> float`. ValueError for one that lacks one.
    """
    if name not in MODELS and "." not in name:
        raise ValueError(
            f"unknown model {name!r}; choose one of {', '.join(MODELS)}, or a class of your own by model=custom "
            "model.name=my_models.TwoTower"
        )
    if not spec.num_candidate_tokens:
        raise ValueError("candidates have no feature; name at least one, e.g. data.candidate_categorical=[item_id]")
    if name in MODELS:
        return MODELS[name](spec, **fields)
    own = import_object(name, "model.name")
    model = own(spec, **fields) if callable(own) else own
    if not isinstance(model, nn.Module):
        raise ValueError(f"model.name={name} must make an nn.Module, such as my_models.TwoTower; it gives {model!r}")
    if lacking := [method for method in ("aux_loss", "flops_per_batch") if not hasattr(model, method)]:
        raise ValueError(
            f"model.name={name} lacks {' and '.join(lacking)}; `Architecture` in modules/models/ranking.py says what a "
            "model has"
        )
    return model
