"""Ranking models by name: every class in a module of this package that has a `Config`, a subclass of `ModelConfig`.

A model is made from (spec, config) and maps tokens to logits [C, tasks]. A file that is put here is found by itself; a
YAML file in configs/model whose defaults list names its schema, `<name>_schema`, makes it `model=<name>`.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from torch import nn

from modules.batch import FeatureSpec
from modules.config import ModelConfig, check_options, option
from modules.core.import_object import import_object


@dataclass(kw_only=True)
class CustomConfig(ModelConfig):
    """A class from outside this repository."""

    name: str = "custom"  # its dotted name, such as my_models.TwoTower
    arguments: dict[str, Any] = option({})  # fields of its Config, or of its constructor besides spec, dim and dropout


def _find() -> dict[str, type[nn.Module]]:
    found: dict[str, type[nn.Module]] = {}
    for info in pkgutil.iter_modules(__path__):
        module = import_module(f"{__name__}.{info.name}")
        for value in vars(module).values():
            if (config := config_class(value)) and value.__module__.startswith(module.__name__):
                name = vars(config)["name"]
                if name in found:
                    raise ValueError(f"two models are called {name}: {found[name]} and {value}")
                found[name] = value
    return found


def config_class(model: Any) -> type[ModelConfig] | None:
    """The `Config` of a class of models; None for anything else."""
    config = vars(model).get("Config") if isinstance(model, type) and issubclass(model, nn.Module) else None
    return config if isinstance(config, type) and issubclass(config, ModelConfig) else None


MODELS = _find()
CONFIGS = {name: config for name, model in MODELS.items() if (config := config_class(model))} | {"custom": CustomConfig}


def build(config: ModelConfig, spec: FeatureSpec) -> nn.Module:
    """The model that `config` describes, for the data of `spec`.

    A model has `forward(tokens, batch) -> logits [C, tasks]` and `aux_loss() -> scalar tensor`. ValueError for one that
    lacks the second, and for a value of `config` that is not allowed.
    """
    if config.name not in MODELS and "." not in config.name:
        raise ValueError(
            f"unknown model {config.name!r}; choose one of {', '.join(MODELS)}, or a class of your own by model=custom "
            "model.name=my_models.TwoTower"
        )
    if not spec.num_candidate_tokens:
        raise ValueError("candidates have no feature; name at least one, e.g. data.candidate_categorical=[item_id]")
    if config.dropout is None:  # which no run has settled
        config = replace(config, dropout=0.0)
    _check(config)
    if spec.num_vendor_tokens and not getattr(_class_of(config), "takes_vendors", False):
        able = ", ".join(name for name, model in MODELS.items() if getattr(model, "takes_vendors", False))
        raise ValueError(
            f"model.name={config.name} reads no features of vendors; choose {able}, or name those columns among "
            "data.candidate_categorical, data.candidate_list and data.candidate_numeric, without data.vendor (a model "
            "of your own that reads `Tokens.vendor` says takes_vendors = True)"
        )
    if config.name in MODELS:
        return MODELS[config.name](spec, config)
    assert isinstance(config, CustomConfig)
    model = _build_own(config, spec)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model.name={config.name} must make an nn.Module, such as my_models.TwoTower; it gives {model!r}"
        )
    if not hasattr(model, "aux_loss"):
        raise ValueError(
            f"model.name={config.name} lacks aux_loss; `Architecture` in modules/models/ranking.py says what a model "
            "has"
        )
    return model


def _class_of(config: ModelConfig) -> Any:
    return MODELS[config.name] if config.name in MODELS else import_object(config.name, "model.name")


def _build_own(config: CustomConfig, spec: FeatureSpec) -> Any:
    """What `config.name` makes of a `Config` of its own, or without one of the fields as arguments by name."""
    own = import_object(config.name, "model.name")
    if kind := config_class(own):
        common = {name: value for name, value in vars(config).items() if name != "arguments"}
        try:
            options = kind(**common | config.arguments)
        except TypeError as error:
            raise ValueError(
                f"model.arguments={config.arguments} must be fields of {config.name}.Config: {error}"
            ) from error
        _check(options)
        return own(spec, options)
    return own(spec, dim=config.dim, dropout=config.dropout, **config.arguments) if callable(own) else own


def _check(config: ModelConfig) -> None:
    check_options(config, "model")
    config.check()
