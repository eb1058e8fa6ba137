"""Optimisers and schedules by their dotted names: torch's own numbers, skipped steps, saved state, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.checkpoint.test_resume import training
from tests.launching import TINY_DLRM, train_here
from train.config.schema import OptimizerConfig
from train.optim import guarded, schedule

SKIP, TAKE = torch.ones(()), torch.zeros(())


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((4, 3), (3,), ())]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    return [torch.randn(param.shape, generator=generator) for param in parameters()]


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": params[:1], "lr": 0.1, "peak": 0.1, "weight_decay": 0.2},
        {"params": params[1:], "lr": 0.05, "peak": 0.05, "weight_decay": 0.0},
    ]


def take(step: int, params: list[nn.Parameter]) -> None:
    for param, gradient in zip(params, gradients(step), strict=True):
        param.grad = gradient


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("NAdam", {"decoupled_weight_decay": True}),
        ("RAdam", {}),
        ("Adagrad", {"initial_accumulator_value": 0.5}),
        ("RMSprop", {"centered": True, "momentum": 0.5}),
        ("Adamax", {}),
        ("Adadelta", {}),
        ("ASGD", {}),
        ("Adam", {"amsgrad": True}),
        ("Adafactor", {}),
    ],
)
def test_a_class_of_torch_steps_as_it_does_alone(name: str, arguments: dict[str, Any]) -> None:
    plain, ours = parameters(), parameters()
    betas = {"betas": (0.9, 0.999)} if name in ("NAdam", "RAdam", "Adamax", "Adam") else {}
    alone = getattr(torch.optim, name)(groups(plain), lr=0.3, **betas, **arguments)
    made = guarded.build(OptimizerConfig(dense=f"torch.optim.{name}", lr=0.3, arguments=arguments), groups(ours))
    keys = [set(made.state[param]) for param in ours]
    for step in range(4):
        take(step, plain)
        alone.step()
        poisoned = [nn.Parameter(param.detach().clone()) for param in ours]
        state = [{key: value.clone() for key, value in made.state[param].items()} for param in ours]
        for param in ours:
            param.grad = torch.full_like(param, torch.nan)
        made.guarded_step(SKIP)
        for param, before, values in zip(ours, poisoned, state, strict=True):
            assert torch.equal(param, before)
            assert all(torch.equal(made.state[param][key], value) for key, value in values.items())
        take(step, ours)
        made.guarded_step(TAKE)
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
        if step == 1:  # as a checkpoint is read, in place, into one that has taken no step
            fresh = [nn.Parameter(param.detach().clone()) for param in ours]
            resumed = guarded.build(made_of(name, arguments), groups(fresh))
            for param, other in zip(ours, fresh, strict=True):
                for key, value in made.state[param].items():
                    resumed.state[other][key].copy_(value)
            ours, made = fresh, resumed
    assert [set(made.state[param]) for param in ours] == keys


def made_of(name: str, arguments: dict[str, Any]) -> OptimizerConfig:
    return OptimizerConfig(dense=f"torch.optim.{name}", lr=0.3, arguments=arguments)


class BeginsEarly(torch.optim.SGD):
    """Has its state before the first step, as some of PyTorch's did up to 2.11."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["longest"] = torch.ones_like(param)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                longest = self.state[param]["longest"]
                longest.copy_(torch.maximum(longest, param.grad.abs()))
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(param.grad / longest, alpha=group["lr"])


def test_a_state_that_is_there_before_the_first_step_is_kept() -> None:
    ours = parameters()
    made = guarded.build(OptimizerConfig(dense=f"{__name__}.BeginsEarly"), groups(ours))
    assert all(torch.equal(made.state[param]["longest"], torch.ones_like(param)) for param in ours)
    before = [param.detach().clone() for param in ours]
    for param in ours:
        param.grad = torch.full_like(param, 2.0)
    made.guarded_step(TAKE)
    first, second = made.param_groups
    for param, old, group in zip(ours, before, (first, second, second), strict=True):
        kept = 1 - group["lr"] * group["weight_decay"]
        torch.testing.assert_close(param.detach(), old * kept - group["lr"])
        assert (made.state[param]["longest"] == 2).all()


class CountsInPython(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("taken", 0)
                self.state[param]["taken"] = self.state[param]["taken"] + 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dense": "torch.optim.LBFGS", "weight_decay": 0.0}, "optimizer.dense=torch.optim.LBFGS cannot train here"),
        ({"dense": "torch.optim.SparseAdam", "weight_decay": 0.0}, "SparseAdam cannot train here"),
        ({"dense": "torch.optim.Muon"}, "takes matrices only"),
        ({"dense": "torch.optim.Rprop"}, "optimizer.weight_decay=0.01: torch.optim.Rprop has none; use 0"),
        ({"dense": "torch.optim.SGD", "betas": [0.8, 0.9]}, r"optimizer.betas=\[0.8, 0.9\]: torch.optim.SGD has none"),
        ({"dense": "torch.optim.SGD", "arguments": {"momentun": 0.9}}, "momentun is no argument .* there are momentum"),
        ({"dense": "torch.optim.SGD", "arguments": {"lr": 0.9}}, "arguments.lr has a key of its own, optimizer.lr"),
        ({"dense": "torch.optim.SGD", "arguments": {"momentum": -1}}, "Invalid momentum value"),
        ({"dense": "torch.optim.Sgd"}, "optimizer.dense=torch.optim.Sgd cannot be imported"),
        ({"dense": "torch.nn.Linear"}, "is no torch.optim.Optimizer"),
        ({"dense": f"{__name__}.CountsInPython"}, "keeps taken as int and not as a tensor"),
        ({"arguments": {"momentum": 0.9}}, "goes with the dotted name of a class"),
    ],
)
def test_what_cannot_train_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        guarded.check(OptimizerConfig(**settings))


def test_a_scheduler_of_torch_behind_the_warm_up() -> None:
    name = "torch.optim.lr_scheduler."
    config = OptimizerConfig(
        warmup_steps=2, schedule=name + "PolynomialLR", schedule_arguments={"power": 2, "total_iters": "steps"}
    )
    found = [schedule.factor(config, 10, step) for step in range(12)]
    assert found == pytest.approx([0.5, 1.0, *[(1 - min(step, 7) / 8) ** 2 for step in range(10)]])
    config.schedule, config.schedule_arguments = name + "MultiStepLR", {"milestones": [1, 3], "gamma": 0.5}
    assert [schedule.factor(config, 10, step) for step in range(2, 7)] == pytest.approx([1, 0.5, 0.5, 0.25, 0.25])
    arguments = {"max_lr": 1, "total_steps": "steps", "cycle_momentum": False}
    config.schedule, config.schedule_arguments = name + "OneCycleLR", arguments
    schedule.check(config)
    assert schedule.factor(config, 10, 10) == schedule.factor(config, 10, 9) < 0.01


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("ReduceLROnPlateau", {}, "does not follow from the step alone"),
        ("OneCycleLR", {"max_lr": 1, "total_steps": "steps"}, "changes more than the rate.*cycle_momentum=false"),
        ("CosineAnnealingLR", {}, "missing 1 required positional argument: 'T_max'; see optimizer.schedule_arguments"),
        ("StepLR", {"step": 3}, "schedule_arguments.step is no argument of .*; there are step_size, gamma"),
        ("ExponentialLR", {"gamma": float("nan")}, "gives a rate of nan"),
        ("SGD", {}, "cannot be imported"),
        ("Counter", {}, "is no scheduler of torch; name a subclass of LRScheduler"),
    ],
)
def test_a_scheduler_that_cannot_be_followed_is_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    config = OptimizerConfig(schedule=f"torch.optim.lr_scheduler.{name}", schedule_arguments=arguments)
    with pytest.raises(ValueError, match=message):
        schedule.check(config)


def test_arguments_without_a_dotted_name_are_refused() -> None:
    with pytest.raises(ValueError, match="goes with the dotted name of a scheduler"):
        schedule.check(OptimizerConfig(schedule_arguments={"gamma": 0.5}))


def test_a_run_by_dotted_names_resumes_where_it_stopped(tmp_path: Path) -> None:
    keys = (
        "optimizer.dense=torch.optim.NAdam", "+optimizer.arguments.decoupled_weight_decay=true",
        "optimizer.schedule=torch.optim.lr_scheduler.PolynomialLR", "+optimizer.schedule_arguments.total_iters=steps",
        "optimizer.warmup_steps=1", "optimizer.groups=[{match: [arch], lr: 0.01}]", "runtime.steps=4",
        "checkpoint.every=2", "checkpoint.keep=9",
    )  # fmt: skip
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train_here(whole, *keys, base=TINY_DLRM)
    (resumed / "checkpoints").mkdir(parents=True)
    (whole / "checkpoints" / "step_00000002").rename(resumed / "checkpoints" / "step_00000002")
    train_here(resumed, *keys, base=TINY_DLRM)
    losses = [[record.values["loss"] for record in training(run)] for run in (whole, resumed)]
    assert losses[0][2:] == losses[1]
    rates = [record.values["lr"] for record in training(whole)]
    assert rates == pytest.approx([0.001, 0.001 * 2 / 3, 0.001 / 3, 0.001 / 3])
