"""One optimiser object for the pipeline: that of the dense part, and learning rates of the fused table optimiser.

`zero_grad` and `step` are called once a micro-batch. The dense part steps once in `accumulate` micro-batches, on
gradients averaged over the candidates of all of them except those that the finite guard rejected. The tables, whose
update is fused into each backward, step every time.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.optim.optimizers import in_backward_optimizer_filter

from train.config.schema import OptimizerConfig
from train.optim import guarded, schedule
from train.optim.average import Average
from train.optim.groups import grouped
from train.optim.guards import FiniteGuard, verdict
from train.parallel.exchange import while_gradients_travel
from train.parallel.gradient_mean import GradientMean
from train.parallel.layout import TotalNorm, layouts, part_of
from train.speedup.replay import Replay


class Optimizer:
    def __init__(
        self,
        model: DistributedModelParallel,
        config: OptimizerConfig,
        total_steps: int,
        guard: FiniteGuard,
        *,
        graphs: bool = False,
    ) -> None:
        """`graphs`: replay the dense step as a CUDA graph (without `accumulate`).

        Each batch: `zero_grad`, one backward, `step`. A `GradientMean` without `accumulate` lets the backward take the
        dense step.
        """
        self.config, self.total_steps, self.guard = config, total_steps, guard
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        self.params = {name: parameter for name, parameter in dense.items() if parameter.requires_grad}
        self.layouts = layouts(get_unwrapped_module(model))
        self._norm = TotalNorm(self.layouts, guard.world.device)
        # What this rank holds of each parameter, which is the parameter itself unless it is sharded.
        self._parts = {name: _part(parameter) for name, parameter in self.params.items()}
        self.fused = model.fused_optimizer
        self._tables = [(group, group["lr"]) for group in self.fused.param_groups if group["lr"]]  # others are frozen
        adam, others = self._param_groups(list(dict(model.named_parameters())))
        for group in adam if graphs else ():
            group["lr"] = torch.tensor(group["lr"], device=guard.world.device)  # read by every replay
        self.adam = torch.optim.AdamW(adam, lr=config.lr, betas=(config.betas[0], config.betas[1]), fused=True)
        self.guarded = guarded.build(config, others) if others else None  # of what AdamW does not step
        for param in (param for group in adam for param in group["params"]):
            # So that a checkpoint's keys do not depend on whether a step was taken.
            self.adam.state[param] = {
                "step": torch.zeros((), device=param.device),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }
        device = guard.world.device
        self.average = Average(self._parts, config.ema_decay, device) if config.ema_decay else None
        self._graphs = graphs
        self._update = Replay(self._conclude_and_step, graphs, in_place=True)
        self._stepped: list[str] = []  # parameters with a gradient
        self._mean: GradientMean | None = getattr(model, "gradient_mean", None)
        self._stepped_early = False  # in the backward, before `step`
        averaged = set() if self._mean is None else {*self._mean.parameters}
        if config.accumulate == 1 and averaged.issuperset(self.params.values()):
            while_gradients_travel(model, self._step_in_backward)
        self.micro_step = 0
        self.rows = torch.empty(0, dtype=torch.int64)  # of the current batch, to name it when it is bad
        self.count = torch.ones(())  # its candidates, over all ranks
        self.skipped = torch.zeros((), device=guard.world.device)  # verdict of the last dense step, 1 = not taken
        self._sum: dict[str, Tensor] = {}  # candidates times gradients of the micro-batches so far
        if config.accumulate > 1:
            self._sum = {name: torch.zeros_like(part) for name, part in self._parts.items()}
        self._count = torch.zeros((), device=guard.world.device)  # candidates of the micro-batches so far
        self._set_learning_rates()

    @property
    def step_index(self) -> int:
        return self.micro_step // self.config.accumulate

    @property
    def lr(self) -> float:
        """The present rate of dense parameters that are in no group."""
        return self.config.lr * self.factor(self.step_index)

    def factor(self, step: int) -> float:
        """The learning rate as a fraction of its peak."""
        return schedule.factor(self.config, self.total_steps, step)

    def _param_groups(self, names: list[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Parameters of AdamW and of another optimiser by their peak rate and weight decay; `names` are those of all
        parameters.

        By default norms and biases have no decay.
        """
        config, of = self.config, grouped(names, self.config.groups)
        adam: dict[tuple[float, float], list[Tensor]] = {}
        others: dict[tuple[float, float], list[Tensor]] = {}
        for name, param in self._parts.items():
            group = of[name]
            is_table = ".embeddings." in name  # of a data-parallel one
            default = config.weight_decay if param.ndim > 1 and not is_table else 0.0
            decay = default if group.weight_decay is None else group.weight_decay
            peak = config.lr if group.lr is None else group.lr
            (adam if config.dense == "adamw" else others).setdefault((peak, decay), []).append(param)

        def dicts(groups: dict[tuple[float, float], list[Tensor]]) -> list[dict[str, Any]]:
            return [
                {"params": params, "lr": peak, "peak": peak, "weight_decay": decay}
                for (peak, decay), params in groups.items()
            ]

        return dicts(adam) or [{"params": [], "lr": config.lr, "peak": config.lr}], dicts(others)

    def _set_learning_rates(self) -> None:
        factor = self.factor(self.step_index)
        for group in self._dense_groups():
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(group["peak"] * factor)
            else:
                group["lr"] = group["peak"] * factor
        for group, peak in self._tables:
            group["lr"] = peak * factor
        self.fused.step()  # hands the rate to the fused kernels; the tables themselves step in the backward

    def _dense_groups(self) -> list[dict[str, Any]]:
        return self.adam.param_groups + (self.guarded.param_groups if self.guarded else [])

    def zero_grad(self) -> None:
        for tensor in (*self.params.values(), *self._parts.values()):
            tensor.grad = None
        self._stepped_early = False

    def step(self) -> None:
        self.micro_step += 1
        if self.config.accumulate == 1:
            if not self._stepped_early:
                self._step_by(self._gradients())
            self._stepped_early = False
            self.guard.conclude(self.micro_step, self.rows, self.skipped)
        else:
            gradients = self._gradients()
            norm = self._norm(gradients)
            self.skipped = verdict(self.guard.finite, norm)
            self.guard.conclude(self.micro_step, self.rows, self.skipped)
            self._accumulate(gradients)
            if self.micro_step % self.config.accumulate:
                return
            for name, gradient in gradients.items():
                self._parts[name].grad = gradient
            norm = self._norm(gradients)
            self.skipped = 1 - torch.isfinite(norm).to(norm.dtype)
            self._clip_and_step(norm)
        self._set_learning_rates()

    def _step_in_backward(self) -> None:
        """Take the dense step if all gradients are there. The verdict is: no gradient of a row leaves before it."""
        if self._mean is not None and self._mean.settle():
            if self._stepped_early:
                raise RuntimeError(
                    "a second backward since the last step: without accumulation the first one has taken it already; "
                    "call step() after each backward, or set optimizer.accumulate=2"
                )
            self._stepped_early = True
            self._step_by(self._gradients())

    def _gradients(self) -> dict[str, Tensor]:
        return {name: part_of(param.grad) for name, param in self.params.items() if param.grad is not None}

    def _step_by(self, gradients: dict[str, Tensor]) -> None:
        self._stepped = list(gradients)
        self.skipped = self._update(self.guard.finite, *gradients.values(), kind=tuple(gradients))

    def _conclude_and_step(self, finite: Tensor, *gradients: Tensor) -> Tensor:
        """Step the parameters `_stepped` by these gradients, unless the verdict, which is returned, is to skip."""
        named = dict(zip(self._stepped, gradients, strict=True))
        for name, gradient in named.items():
            self._parts[name].grad = gradient
        norm = self._norm(named)
        self.skipped = verdict(finite, norm)
        self._clip_and_step(norm)
        return self.skipped

    def _clip_and_step(self, norm: Tensor) -> None:
        if self.config.clip_norm and self.guarded is not None:
            nn.utils.clip_grads_with_norm_(self._parts.values(), self.config.clip_norm, norm)
        elif self.config.clip_norm:  # AdamW divides the gradients where it reads them, by 1 if they are short enough
            self.adam.grad_scale = ((norm + 1e-6) / self.config.clip_norm).clamp(min=1).float()  # type: ignore[attr-defined]
        self.adam.found_inf = self.skipped  # type: ignore[attr-defined]
        for group in self.adam.param_groups:  # AdamW requires it in a capture, and warns about it outside one
            group["capturable"] = self._graphs and torch.cuda.is_current_stream_capturing()
        self.adam.step()
        if self.guarded is not None:
            self.guarded.guarded_step(self.skipped)
        if self.average is not None:
            self.average.update(self.skipped)

    def averaged(self) -> AbstractContextManager[None]:
        """Within it the weights are what is evaluated: their average, if there is one."""
        return nullcontext() if self.average is None else self.average.applied()

    def _accumulate(self, gradients: dict[str, Tensor]) -> None:
        """Candidate-weighted mean of the good micro-batches so far, left in `.grad` when the last one is in.

        If none was good, that is 0 / 0, and the dense step is skipped.
        """
        count = torch.where(self.skipped.bool(), 0, self.count)
        for name, gradient in gradients.items():
            self._sum[name] += torch.where(self.skipped.bool(), 0, gradient) * count
        self._count += count
        if self.micro_step % self.config.accumulate == 0:
            for name, gradient in gradients.items():
                torch.div(self._sum[name], self._count, out=gradient)
                self._sum[name].zero_()
            self._count.zero_()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Moments, sums and averages by parameter name, so that checkpoints do not depend on their order.

        Those of sharded parameters are DTensors in the memory of this rank's parts.
        """
        state = self.moments()
        if self.average is not None:
            for name, value in self.average.values.items():
                state[name]["average"] = self._described(name, value)
            state["average"] = {"steps": self.average.steps}
        return state

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """The part of the state that another run can go on with."""
        state = {
            name: {key: self._described(name, value) for key, value in self._state(part).items()}
            for name, part in self._parts.items()
        }
        if self._sum:
            for name, total in self._sum.items():
                state[name]["accumulated"] = self._described(name, total)
            state["accumulated"] = {"candidates": self._count}
        return state

    def _described(self, name: str, value: Tensor) -> Tensor:
        whole = name not in self.layouts or value.shape != self._parts[name].shape
        return value if whole else self.layouts[name].describe(value)

    def _state(self, param: Tensor) -> dict[str, Tensor]:
        if self.guarded is not None and param in self.guarded.state:
            return self.guarded.state[param]
        return self.adam.state[param]

    def restore(self, micro_step: int, total_steps: int) -> None:
        """Continue at a step after a checkpoint's tensors have been read into `state_dict`'s in place."""
        self.micro_step, self.total_steps = micro_step, total_steps
        self._set_learning_rates()


def _part(parameter: nn.Parameter) -> Tensor:
    part = part_of(parameter)
    return part if part is parameter else part.detach()
