"""One optimiser object for the pipeline: AdamW on the dense part, the learning rate of the fused table optimiser.

`zero_grad` and `step` are called once a micro-batch. The dense part steps once in `accumulate` micro-batches, on
gradients averaged over the candidates of all of them except those that the finite guard rejected. The tables, whose
update is fused into each backward, step every time.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.optimizers import in_backward_optimizer_filter

from train.config.schema import OptimizerConfig
from train.optim.average import Average
from train.optim.guards import FiniteGuard, verdict
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
        """`graphs`: replay the dense step as a CUDA graph (without `accumulate`)."""
        self.config, self.total_steps, self.guard = config, total_steps, guard
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        self.params = {name: parameter for name, parameter in dense.items() if parameter.requires_grad}
        self.fused = model.fused_optimizer
        self._tables = [group for group in self.fused.param_groups if group["lr"]]  # at a rate of 0 they are frozen
        matrices = [p for p in self.params.values() if p.ndim > 1]
        vectors = [p for p in self.params.values() if p.ndim <= 1]  # norms, biases: no weight decay
        self.adam = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=torch.tensor(config.lr, device=guard.world.device) if graphs else config.lr,  # read by every replay
            betas=(config.betas[0], config.betas[1]),
            fused=True,
        )
        for param in self.params.values():  # so that a checkpoint's keys do not depend on whether a step was taken
            self.adam.state[param] = {
                "step": torch.zeros((), device=param.device),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }
        device = guard.world.device
        self.average = Average(self.params, config.ema_decay, device) if config.ema_decay else None
        self._graphs = graphs
        self._update = Replay(self._conclude_and_step, graphs)
        self._stepped: list[Tensor] = []  # parameters with a gradient
        self.micro_step = 0
        self.rows = torch.empty(0, dtype=torch.int64)  # of the current batch, to name it when it is bad
        self.count = torch.ones(())  # its candidates, over all ranks
        self.skipped = torch.zeros((), device=guard.world.device)  # verdict of the last dense step, 1 = not taken
        self._sum: dict[str, Tensor] = {}  # candidates times gradients of the micro-batches so far
        if config.accumulate > 1:
            self._sum = {name: torch.zeros_like(param) for name, param in self.params.items()}
        self._count = torch.zeros((), device=guard.world.device)  # candidates of the micro-batches so far
        self._set_learning_rates()

    @property
    def step_index(self) -> int:
        return self.micro_step // self.config.accumulate

    def factor(self, step: int) -> float:
        """Warm-up then cosine, as a fraction of the peak learning rate."""
        warmup = self.config.warmup_steps
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, self.total_steps - warmup))
        floor = self.config.min_lr
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    def _set_learning_rates(self) -> None:
        factor = self.factor(self.step_index)
        for group in self.adam.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.config.lr * factor)
            else:
                group["lr"] = self.config.lr * factor
        for group in self._tables:
            group["lr"] = self.config.sparse_lr * factor
        self.fused.step()  # hands the rate to the fused kernels; the tables themselves step in the backward

    def zero_grad(self) -> None:
        self.adam.zero_grad(set_to_none=True)

    def step(self) -> None:
        stepped = {name: param for name, param in self.params.items() if param.grad is not None}
        gradients = {name: param.grad for name, param in stepped.items() if param.grad is not None}
        self.micro_step += 1
        if self.config.accumulate == 1:
            self._stepped = list(stepped.values())
            self.skipped = self._update(self.guard.finite, *gradients.values(), kind=tuple(stepped))
            self.guard.conclude(self.micro_step, self.rows, self.skipped)
        else:
            norm = nn.utils.get_total_norm(gradients.values())
            self.skipped = verdict(self.guard.finite, norm)
            self.guard.conclude(self.micro_step, self.rows, self.skipped)
            self._accumulate(gradients)
            if self.micro_step % self.config.accumulate:
                return
            norm = nn.utils.get_total_norm(gradients.values())
            self.skipped = 1 - torch.isfinite(norm).to(norm.dtype)
            self._clip_and_step(norm)
        self._set_learning_rates()

    def _conclude_and_step(self, finite: Tensor, *gradients: Tensor) -> Tensor:
        """Step the parameters `_stepped` by these gradients, unless the verdict, which is returned, is to skip."""
        for param, gradient in zip(self._stepped, gradients, strict=True):
            param.grad = gradient
        norm = nn.utils.get_total_norm(gradients)
        self.skipped = verdict(finite, norm)
        self._clip_and_step(norm)
        return self.skipped

    def _clip_and_step(self, norm: Tensor) -> None:
        if self.config.clip_norm:
            nn.utils.clip_grads_with_norm_(self.params.values(), self.config.clip_norm, norm)
        self.adam.found_inf = self.skipped  # type: ignore[attr-defined]
        for group in self.adam.param_groups:  # AdamW requires it in a capture, and warns about it outside one
            group["capturable"] = self._graphs and torch.cuda.is_current_stream_capturing()
        self.adam.step()
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
        """Moments, sums and averages by parameter name, so that checkpoints do not depend on their order."""
        state = self.moments()
        if self.average is not None:
            for name, value in self.average.values.items():
                state[name]["average"] = value
            state["average"] = {"steps": self.average.steps}
        return state

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """The part of the state that another run can go on with."""
        state = {name: dict(self.adam.state[param]) for name, param in self.params.items()}
        if self._sum:
            for name, total in self._sum.items():
                state[name]["accumulated"] = total
            state["accumulated"] = {"candidates": self._count}
        return state

    def restore(self, micro_step: int, total_steps: int) -> None:
        """Continue at a step after a checkpoint's tensors have been read into `state_dict`'s in place."""
        self.micro_step, self.total_steps = micro_step, total_steps
        self._set_learning_rates()
