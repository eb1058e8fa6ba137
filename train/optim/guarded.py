"""Optimisers of torch.optim, or of one's own, in a training loop that saves their state and may leave a step out."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from modules.core.import_object import import_object
from train.config.schema import OptimizerConfig


class Guarded:
    """An optimiser whose steps may be skipped by a verdict on the device, and whose state is there from the start."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """ValueError for one that keeps what a checkpoint cannot hold."""
        self.optimizer = optimizer
        self._begin()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def state(self) -> Mapping[Tensor, dict[str, Tensor]]:
        return self.optimizer.state

    @torch.no_grad()
    def guarded_step(self, skipped: Tensor) -> None:
        """A step that changes neither parameters nor state if `skipped` is 1. Does not wait for the device."""
        params = [param for group in self.param_groups for param in group["params"]]
        before = [param.clone() for param in params]
        states = [{key: value.clone() for key, value in self.state[param].items()} for param in params]
        self.optimizer.step()
        for param, weight, state in zip(params, before, states, strict=True):
            torch.where(skipped.bool(), weight, param, out=param)
            for key, old in state.items():
                value = self.state[param][key]
                torch.where(skipped.bool(), old, value, out=value)

    @torch.no_grad()
    def _begin(self) -> None:
        """Give each parameter the state that it has before its first step, so that a checkpoint's keys do not depend
        on whether one was taken: what a step with gradients of zero has set first, before it moved it."""
        params = [param for group in self.param_groups for param in group["params"]]
        decays = [group.get("weight_decay") for group in self.param_groups]
        for group in self.param_groups:  # some put the decay into the gradient
            group |= {"weight_decay": 0.0} if "weight_decay" in group else {}
        options = [_options(group) for group in self.param_groups]
        weights = [param.clone() for param in params]
        for param in params:
            param.grad = torch.zeros_like(param)
            made = self.optimizer.state.get(param, {})  # some begin where they are built
            self.optimizer.state[param] = state = _FirstValues()
            for key, value in made.items():
                state[key] = value
        self.optimizer.step()
        if [_options(group) for group in self.param_groups] != options:
            raise ValueError("it keeps numbers in its groups, which checkpoints do not hold")
        for group, decay in zip(self.param_groups, decays, strict=True):
            group |= {"weight_decay": decay} if "weight_decay" in group else {}
        for param, weight in zip(params, weights, strict=True):
            param.grad = None
            param.copy_(weight)
            state = self.optimizer.state[param]
            assert isinstance(state, _FirstValues)
            for key, value in state.first.items():
                if not isinstance(value, Tensor):
                    raise ValueError(
                        f"it keeps {key} as {type(value).__name__} and not as a tensor, which checkpoints hold"
                    )
            self.optimizer.state[param] = dict(state.first)


class _FirstValues(dict[str, Any]):
    """Remembers what each key was first set to, also if that is changed in place later."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self.first.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
        super().__setitem__(key, value)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return deepcopy({key: value for key, value in group.items() if key != "params"})


def build(config: OptimizerConfig, groups: list[dict[str, Any]]) -> Guarded:
    """The class `optimizer.dense` of these groups, with `optimizer.arguments`. ValueError that names the key which it
    does not take, or says why it cannot train here."""
    name = config.dense
    made = import_object(name, "optimizer.dense")
    if not (isinstance(made, type) and issubclass(made, torch.optim.Optimizer)):
        raise ValueError(f"optimizer.dense={name} is no torch.optim.Optimizer; name a class, e.g. torch.optim.NAdam")
    if issubclass(made, torch.optim.Muon):
        raise ValueError(f"optimizer.dense={name} takes matrices only; e.g. torch.optim.NAdam takes biases, too")
    known = inspect.signature(made).parameters
    arguments = dict(config.arguments)
    if reserved := sorted({"params", "lr", "betas", "weight_decay"} & arguments.keys()):
        raise ValueError(f"optimizer.arguments.{reserved[0]} has a key of its own, optimizer.{reserved[0]}")
    if unknown := sorted(arguments.keys() - known):
        raise ValueError(
            f"optimizer.arguments.{unknown[0]} is no argument of {name}; there are "
            f"{', '.join(each for each in known if each not in ('params', 'lr', 'betas', 'weight_decay'))}"
        )
    if "betas" in known:
        arguments["betas"] = tuple(config.betas)
    elif config.betas != OptimizerConfig().betas:
        raise ValueError(f"optimizer.betas={config.betas}: {name} has none; leave the key out")
    if "weight_decay" not in known:
        if any(group["weight_decay"] for group in groups):
            raise ValueError(f"optimizer.weight_decay={config.weight_decay}: {name} has none; use 0")
        groups = [{key: value for key, value in group.items() if key != "weight_decay"} for group in groups]
    try:
        make: Any = made  # whose arguments are its own
        return Guarded(make(groups, lr=config.lr, **arguments))
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"optimizer.dense={name} cannot train here: {error}; e.g. torch.optim.NAdam does") from error


def check(config: OptimizerConfig) -> None:
    """ValueError, before anything is built, for an optimiser by its dotted name that `named` refuses."""
    if "." in config.dense:
        params = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
        if config.lr is None:  # the run has yet to choose it
            config = replace(config, lr=1e-3)
        build(config, [{"params": params, "lr": config.lr, "peak": config.lr, "weight_decay": config.weight_decay}])
    elif config.arguments:
        raise ValueError(
            f"optimizer.arguments={config.arguments} goes with the dotted name of a class, e.g. "
            f"optimizer.dense=torch.optim.NAdam; {config.dense} has keys of its own"
        )
