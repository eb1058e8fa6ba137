"""Loss-free balancing of routed experts over all ranks: one step of the routers' biases for each dense step."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from modules.layers.moe import Router, update_router_biases
from train.process.distributed import World
from train.speedup.replay import Replay


class Balance:
    """The routers of a model that learn. Only `violation` and `counts` wait for the device."""

    def __init__(self, model: nn.Module, world: World, *, graphs: bool) -> None:
        """`graphs`: replay the update as a CUDA graph. Only on one rank: a graph holds no collectives."""
        self.world = world
        # Found once: a walk over all modules takes longer than the update.
        routers = [each for each in model.modules() if isinstance(each, Router) and each.gate.weight.requires_grad]
        self._routers, self._tokens = nn.ModuleList(routers), [router.tokens_per_expert for router in routers]
        self._violations: dict[str, Tensor] = {}  # of the last dense step, by router
        self._update = Replay(self._update_biases, graphs and world.size == 1 and bool(self._tokens))

    def step(self, skipped: Tensor) -> None:
        """Update the biases by the tokens routed since the last call, unless the dense step was `skipped` (1)."""
        self._violations = self._update(skipped)

    def violation(self) -> float | None:
        """The largest load violation of the last step, None without routers."""
        return torch.stack(list(self._violations.values())).max().item() if self._violations else None

    def counts(self) -> list[int]:
        """Tokens counted since the routers' last step, on all ranks; not zero in the middle of an accumulation."""
        return self._of_all_ranks(torch.cat(self._tokens)).tolist() if self._tokens else []

    def restore(self, counts: list[int]) -> None:
        """Give the first rank the counts of all ranks: only their sum is used."""
        if self.world.is_first and counts:
            parts = torch.tensor(counts, device=self.world.device).split([len(part) for part in self._tokens])
            torch._foreach_copy_(self._tokens, parts)

    def _update_biases(self, skipped: Tensor) -> dict[str, Tensor]:
        return update_router_biases(self._routers, partial(self._of_good_step, skipped))

    def _of_good_step(self, skipped: Tensor, counts: Tensor) -> Tensor:
        """Loads of all ranks, or zeros if the step was skipped, so that no bias moves."""
        return torch.where(skipped.bool(), 0, self._of_all_ranks(counts))

    def _of_all_ranks(self, counts: Tensor) -> Tensor:
        if self.world.size > 1:
            dist.all_reduce(counts)
        return counts
