"""Throughput on a clock that the test turns."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.modules.factories import random_batch, random_spec
from train.metrics import Throughput, history_lengths, history_sums, peak_flops, throughput

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 100.0

        def perf_counter(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    return clock


def run_steps(meter, clock, batches):
    for batch in batches:
        with meter.data_wait():
            clock.now += 0.5
        clock.now += 1.5
        meter.step(batch, history_sums(history_lengths(batch)))


def test_rates_and_waiting(clock):
    spec = random_spec(num_events=2)
    meter = Throughput(CPU)
    batches = [
        random_batch(spec, candidates=[2, 0, 3], lengths=[1, 4, 0]),
        random_batch(spec, candidates=[1], lengths=[5]),
    ]
    run_steps(meter, clock, batches)
    assert meter.compute() == pytest.approx(
        {
            "examples_per_s": 6 / 4,
            "requests_per_s": 4 / 4,
            "steps_per_s": 2 / 4,
            "data_wait_share": 0.25,
            "mean_history": 2 * (1 + 4 + 0 + 5) / 4,
        }
    )


def test_warmup_and_pauses_are_not_counted(clock):
    spec = random_spec()
    batch = random_batch(spec, candidates=[1, 1])
    meter = Throughput(CPU, warmup_steps=2)
    clock.now += 60
    run_steps(meter, clock, [batch] * 2)
    assert meter.compute() == {}
    run_steps(meter, clock, [batch] * 2)
    with meter.paused():
        clock.now += 1000
    run_steps(meter, clock, [batch] * 2)
    values = meter.compute()
    assert values["examples_per_s"] == pytest.approx(8 / 8)
    assert values["data_wait_share"] == pytest.approx(0.25)


def test_reset_starts_a_new_window(clock):
    batch = random_batch(random_spec(), candidates=[1, 1])
    meter = Throughput(CPU)
    run_steps(meter, clock, [batch] * 3)
    meter.reset()
    assert meter.compute() == {}
    run_steps(meter, clock, [batch])
    assert meter.compute()["steps_per_s"] == pytest.approx(0.5)


def test_flops_come_from_true_lengths(clock):
    spec = random_spec(num_events=2)
    batches = [
        random_batch(spec, candidates=[2, 0, 3], lengths=[1, 4, 0]),
        random_batch(spec, candidates=[1], lengths=[5]),
    ]

    def forward_flops(requests, candidates, sum_lengths, sum_squared_lengths):
        return 1e3 * requests + 1e6 * candidates + 1e9 * sum_lengths + 1e12 * sum_squared_lengths

    meter = Throughput(CPU, peak=1e15)
    run_steps(meter, clock, batches)
    values = meter.compute(forward_flops)
    # Events of both types together make a request's length: 2, 8, 0 and 10.
    forward = 1e3 * 4 + 1e6 * 6 + 1e9 * 20 + 1e12 * (4 + 64 + 0 + 100)
    assert values["tflops_per_s"] == pytest.approx(3 * forward / 4 / 1e12)
    assert values["mfu"] == pytest.approx(3 * forward / 4 / 1e15)
    assert "mfu" not in Throughput(CPU).compute(forward_flops)


def test_steps_do_not_sync_with_the_host():
    batch = random_batch(random_spec())
    # Fake tensors have no data: whatever would read one on the host raises.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        meter = Throughput(CPU)
        batch.history_times = type(batch.history_times)(
            keys=batch.history_times.keys(),
            values=mode.from_tensor(batch.history_times.values()),
            lengths=mode.from_tensor(batch.history_times.lengths()),
            stride=batch.num_requests,
        )
        meter.step(batch, history_sums(history_lengths(batch)))


def test_peaks_by_device_name(monkeypatch):
    assert peak_flops(CPU, torch.bfloat16) is None
    cuda = torch.device("cuda", 0)
    for name, expected in {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA B200": 2250e12}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert peak_flops(cuda, torch.bfloat16) == expected
        assert peak_flops(cuda, torch.int8) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GeForce 256")
    assert peak_flops(cuda, torch.bfloat16) is None
