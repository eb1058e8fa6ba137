"""Work of every step as CUDA graphs: the same as without them, on tensors that change from call to call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from train.config.schema import OptimizerConfig
from train.optim import dense
from train.optim.dense import Optimizer
from train.speedup import replay
from train.speedup.replay import LARGE, PATIENCE, WARMUP_STEPS, Replay

CPU = pytest.param("cpu", False)
GPU = pytest.param(
    "cuda", True, marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU")]
)


@pytest.mark.parametrize(("device", "graphs"), [CPU, GPU])
def test_calls_of_each_kind_do_their_own(device: str, graphs: bool) -> None:
    total, calls = torch.zeros((), device=device), []

    def add(first: Tensor, second: Tensor) -> Tensor:
        calls.append(1)
        total.add_(first.sum() * second)
        return total * 2

    add_again = Replay(add, graphs)
    expected = 0
    for step in range(6):
        for rows, kind in ((3, None), (4, None), (4, "other")):
            values = torch.arange(rows, device=device) + step
            expected += int(values.sum()) * step
            result = add_again(values, torch.tensor(float(step), device=device), kind=kind)
            assert (total.item(), result.item()) == (expected, 2 * expected)
    assert len(calls) == (3 * (WARMUP_STEPS + 1) if graphs else 18)


class StandIn:
    """For a CUDA graph."""

    def __init__(self, function: object, tensors: tuple[Tensor, ...], in_place: bool) -> None:
        self.result = "replayed in place" if in_place else "replayed"

    def replay(self, tensors: tuple[Tensor, ...]) -> str:
        return self.result


def test_kinds_that_come_back_are_captured_but_not_more_than_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_Graph", StandIn)
    monkeypatch.setattr(replay, "MAX_GRAPHS", 2)
    monkeypatch.setattr(replay, "MAX_KINDS", 4)
    calls = Replay(lambda x: "called", enabled=True)

    def outcomes(rows: int, times: int) -> list[str]:
        return [calls(torch.zeros(rows)) for _ in range(times)]

    first = ["called"] * WARMUP_STEPS + ["replayed"]
    assert outcomes(1, WARMUP_STEPS) == ["called"] * WARMUP_STEPS
    assert [outcomes(rows, 1) for rows in (2, 3, 4, 5, 6)] == [["called"]] * 5  # the last one starts the counts anew
    assert outcomes(1, WARMUP_STEPS + 1) == first
    assert outcomes(2, WARMUP_STEPS + 1) == first
    assert outcomes(3, WARMUP_STEPS + 1) == ["called"] * (WARMUP_STEPS + 1)
    assert outcomes(1, 1) == ["replayed"]


def test_large_tensors_are_read_where_they_recur(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_Graph", StandIn)
    calls = Replay(lambda *_: "called", enabled=True, in_place=True)
    one, other, small = torch.zeros(LARGE), torch.zeros(LARGE), torch.zeros(1)
    first = ["called"] * WARMUP_STEPS + ["replayed in place"]
    assert [calls(one, small) for _ in range(WARMUP_STEPS + 1)] == first
    assert [calls(other, small.clone()) for _ in range(WARMUP_STEPS + 1)] == first
    assert calls(one, small) == "replayed in place"
    kept = [torch.zeros(LARGE) for _ in range(PATIENCE)]  # each in a place of its own
    results = [calls(each, small) for each in kept]
    assert results == ["called"] * (PATIENCE - 2 * WARMUP_STEPS) + ["replayed"] * 2 * WARMUP_STEPS
    assert calls(other, small) == "replayed in place"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU")
def test_a_graph_changes_large_tensors_where_they_are() -> None:
    total = torch.zeros((), device="cuda")

    def scale(values: Tensor, factor: Tensor) -> Tensor:
        values.mul_(factor)
        total.add_(values.sum())
        return total.clone()

    scaled, expected = Replay(scale, True, in_place=True), 0.0
    place, moving = torch.empty(LARGE, device="cuda"), []
    for step in range(20):
        moving.append(torch.empty(LARGE, device="cuda"))
        for values in (place, moving[-1]):
            values.fill_(step / LARGE)
            result = scaled(values, torch.tensor(2.0, device="cuda"))
            expected += 2 * step
            assert result.item() == pytest.approx(expected, rel=1e-4)
        assert torch.equal(place, torch.full_like(place, step / LARGE).mul_(2.0))
    assert len(scaled._graphs) == 2


@pytest.mark.parametrize(("device", "graphs"), [CPU, GPU])
def test_an_optimizer_replays_its_steps(device: str, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "in_backward_optimizer_filter", dict)
    plain, graphed = stepped(torch.device(device), graphs=False), stepped(torch.device(device), graphs)
    for a, b in zip(plain, graphed, strict=True):
        # A learning rate is rounded to float32 where a graph reads it.
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_an_optimizer_clips_as_pytorch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "in_backward_optimizer_filter", dict)
    torch.manual_seed(0)
    model, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(model.state_dict())
    config = OptimizerConfig(lr=0.1, clip_norm=2.0, weight_decay=0.0)
    optimizer = optimizer_of(model, config, [])
    adam = torch.optim.AdamW(theirs.parameters(), betas=tuple(config.betas), weight_decay=0.0)
    for factor in (0.01, 1.0, 0.1, 100.0):
        x = torch.randn(5, 4)
        for parameters, net in ((None, model), (theirs.parameters(), theirs)):
            net.zero_grad()
            (net(x).square().sum() * factor).backward()
            if parameters is not None:
                nn.utils.clip_grad_norm_(parameters, config.clip_norm)
        adam.param_groups[0]["lr"] = optimizer.lr
        adam.step()
        optimizer.step()
        for ours, expected in zip(model.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(ours, expected)


def optimizer_of(model: nn.Module, config: OptimizerConfig, verdicts: list[Tensor], graphs: bool = False) -> Optimizer:
    device = next(model.parameters()).device
    model.fused_optimizer = SimpleNamespace(param_groups=[], step=lambda: None)  # type: ignore[assignment]
    guard = SimpleNamespace(world=SimpleNamespace(device=device), finite=torch.ones((), device=device))
    guard.conclude = lambda step, rows, found_inf: verdicts.append(found_inf.clone())
    return Optimizer(cast(Any, model), config, 8, cast(Any, guard), graphs=graphs)


def stepped(device: torch.device, graphs: bool) -> list[Tensor]:
    """Parameters and their averages after eight steps; of the sixth a gradient is not finite."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(device)
    verdicts: list[Tensor] = []
    config = OptimizerConfig(lr=0.1, clip_norm=0.5, warmup_steps=3, ema_decay=0.9)
    optimizer = optimizer_of(model, config, verdicts, graphs)
    for step in range(8):
        optimizer.zero_grad()
        (model(torch.randn(5, 4, device=device)).square().sum() * (float("inf") if step == 5 else 1)).backward()
        optimizer.step()
    assert [verdict.item() for verdict in verdicts] == [0, 0, 0, 0, 0, 1, 0, 0]
    assert optimizer.average is not None
    return [*(parameter.detach() for parameter in model.parameters()), *optimizer.average.values.values()]
