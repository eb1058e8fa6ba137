"""When a run says that its device waits for the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from modules.models.baselines import DIN
from modules.models.interformer import InterFormer
from train.config.schema import DataConfig, OptimizerConfig, ParallelConfig
from train.process.distributed import World
from train.record.launching import LEAST_STEPS, LaunchWatch

RATES = {"data_wait_share": 0.01, "mean_history": 404.0}


class Event:
    idle = True

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.idle


@pytest.fixture(autouse=True)
def events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)


def watch(model: object = InterFormer.Config(), device: str = "cuda", cuda_graphs: bool = False) -> LaunchWatch:
    runtime, data = SimpleNamespace(cuda_graphs=cuda_graphs), DataConfig(batch_size=2048)
    world = SimpleNamespace(device=torch.device(device), is_first=True)
    return LaunchWatch(
        cast(
            Any,
            SimpleNamespace(
                runtime=runtime,
                data=data,
                model=model,
                optimizer=OptimizerConfig(),
                parallel=ParallelConfig(),
                tasks={},
            ),
        ),
        cast(World, world),
    )


def said(launches: LaunchWatch, caplog: pytest.LogCaptureFixture, steps: int = LEAST_STEPS, **rates: float) -> str:
    caplog.clear()
    for _ in range(steps):
        launches.launched()
        launches.accounted()
    launches.report(RATES | rates)
    return caplog.text


def test_an_idle_device_is_said_once_with_keys_that_help(caplog: pytest.LogCaptureFixture) -> None:
    launches = watch()
    assert "runtime.cuda_graphs=true data.pad_events=65536" in said(launches, caplog)
    assert not said(launches, caplog)


def test_nothing_is_said_where_it_would_not_help(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not said(watch(), caplog, steps=LEAST_STEPS - 1)
    assert not said(watch(), caplog, data_wait_share=0.5)
    for other in (watch(device="cpu"), watch(cuda_graphs=True), watch(model=DIN.Config())):
        assert not said(other, caplog)
    monkeypatch.setattr(Event, "idle", False)
    assert not said(watch(), caplog)
