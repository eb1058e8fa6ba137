"""Dense gradients averaged over ranks by one all-reduce, where a CUDA graph makes nearly all of them at once.

DDP reduces the gradients of some layers while the backward of others runs, and copies each gradient to where it is
reduced by a launch of its own. Behind a graph there is no other backward, and the GPU waits for these launches. Here
all gradients are copied together. Every number is that of DDP for two ranks; more may add up in another order.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable


class GradientMean:
    """Averages the gradients of `parameters`, which get them in the backward, over the ranks of a group.

    The all-reduce begins in the backward, once as many gradients are there as in the backward before, and the rest of
    the backward runs beside it. As in DDP's static graph, a parameter should have a gradient on all ranks or on none.
    A backward that fails leaves nothing behind.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group = group
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        sizes: dict[tuple[torch.device, torch.dtype], int] = {}
        for parameter in self.parameters:
            kind = parameter.device, parameter.dtype
            sizes[kind] = sizes.get(kind, 0) + parameter.numel()
        # Always in the same places: graphs read gradients where they are.
        self._wholes = {kind: torch.zeros(size, device=kind[0], dtype=kind[1]) for kind, size in sizes.items()}
        self._means: dict[nn.Parameter, Tensor] = {}
        begins = dict.fromkeys(sizes, 0)
        for parameter in self.parameters:
            kind = parameter.device, parameter.dtype
            begin, begins[kind] = begins[kind], begins[kind] + parameter.numel()
            self._means[parameter] = self._wholes[kind][begin : begins[kind]].view_as(parameter)
            parameter.register_post_accumulate_grad_hook(self._arrived)
        self._expected = 0  # how many gradients there were in the backward before
        self._backward = -1  # the number of this one
        self._reset()

    def _reset(self) -> None:
        self._there: list[nn.Parameter] = []  # those whose gradients of this backward are there
        self._begun: list[nn.Parameter] = []  # those that the all-reduce has
        self._works: list[dist.Work] = []
        self._settled = False

    def _arrived(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if self._backward != (number := torch._C._current_graph_task_id()):
            self._backward = number
            self._reset()
            Variable._execution_engine.queue_callback(self._end)
        self._there.append(parameter)
        if len(self._there) == self._expected:
            self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        self._begun = list(self._there)
        there = set(self._begun)
        # One that has a gradient of an earlier backward keeps it, which is its mean.
        absent = [self._means[each] for each in self.parameters if each not in there and each.grad is None]
        if absent:
            torch._foreach_zero_(absent)
        gradients = [gradient for parameter in self._begun if (gradient := parameter.grad) is not None]
        torch._foreach_copy_([self._means[parameter] for parameter in self._begun], gradients)
        for whole in self._wholes.values():
            whole.mul_(1 / self._group.size())
            work = dist.all_reduce(whole, group=self._group, async_op=True)
            assert work is not None
            self._works.append(work)

    @torch.no_grad()
    def settle(self) -> bool:
        """Average the gradients before the backward ends, if as many are there as in the backward before.

        Whether it has done so; not a second time. The current stream waits for the all-reduce, on a GPU the host does
        not.
        """
        if self._settled or not self._begun or len(self._begun) < len(self._there):
            return False
        self._settled = True
        self._take()
        return True

    def _take(self) -> None:
        for work in self._works:
            work.wait()
        for parameter in self._begun:
            parameter.grad = self._means[parameter]
        self._works = []

    @torch.no_grad()
    def _end(self) -> None:
        """At the end of a backward."""
        self._expected, self._backward = len(self._there), -1
        late = self._there[len(self._begun) :] if self._begun else []  # more than in the backward before
        if late and self._settled:
            raise RuntimeError("a gradient came after those of the step had been averaged and used")
        if not self._begun:
            self._begin()
        self._take()
        for parameter in late:
            assert parameter.grad is not None
            mean = self._means[parameter].copy_(parameter.grad).mul_(1 / self._group.size())
            dist.all_reduce(mean, group=self._group)
            parameter.grad = mean
        self._reset()
