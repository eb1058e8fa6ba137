"""A run of two nodes that loses a rank, a loader worker or a node, or hangs: it ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.distributed.checkpoint.test_resume import training
from tests.distributed.parallel.test_dense_parallel import saved
from tests.distributed.process.kills import PLACES, marker
from tests.launching import ROOT, TINY_DLRM, environment, python, train_ranks
from train.record.tracking import read_metrics

OPTIONS = ("checkpoint.every=2", "checkpoint.async_save=false", "runtime.steps=8", "checkpoint.keep=9")


@contextlib.contextmanager
def node(address: str, endpoint: str, run_dir: Path, *, is_host: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A launcher with one rank, of a run of two; the host's holds the rendezvous."""
    launcher = ["--nnodes=2", "--nproc-per-node=1", f"--max-restarts={len(PLACES)}", "--rdzv-backend=c10d"]
    launcher += ["--rdzv-conf", f"is_host={is_host}".lower()]
    launcher += [f"--rdzv-endpoint={endpoint}", f"--local-addr={address}", "-m", "tests.distributed.process.kills"]
    command = python("-m", "launch.agent", *launcher, *TINY_DLRM, *OPTIONS, f"runtime.run_dir={run_dir}")
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(command, cwd=ROOT, env=environment(), text=True, stdout=output, stderr=output) as process,
    ):
        try:
            yield process
        except BaseException:
            output.seek(0)
            print(f"{address}:\n{output.read()[-8000:]}")
            raise
        finally:
            process.terminate()


@pytest.mark.reliability(
    "on two nodes: SIGKILL in forward, loader and backward, a hang, then a lost node in a checkpoint write, replaced",
    "each time all ranks restart from the newest whole checkpoint; final losses, weights and states are bitwise "
    "those of an undisturbed run",
)
@pytest.mark.parametrize(
    ("places", "steps"),
    [
        # Each failure is another start of all processes.
        (("backward", "write"), [4, 4]),
        pytest.param(tuple(PLACES), [2, 2, 4, 4, 4], marks=pytest.mark.nightly),
    ],
)
def test_a_run_survives_a_failure_in_every_part_of_a_step(
    places: tuple[str, ...], steps: list[int], tmp_path: Path
) -> None:
    whole, failing = tmp_path / "whole", tmp_path / "failing"
    for place in PLACES.keys() - places:  # as if the run had failed there already
        marker(failing, place).touch()
    train_ranks(2, whole, *OPTIONS, base=TINY_DLRM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    with node("127.0.0.2", endpoint, failing, is_host=True) as first:
        with node("127.0.0.3", endpoint, failing) as second:
            assert second.wait(600) == -signal.SIGKILL
        with node("127.0.0.1", endpoint, failing) as another:
            assert (first.wait(600), another.wait(100)) == (0, 0)
    assert all(marker(failing, place).exists() for place in PLACES)
    assert {r.step: r.values["loss"] for r in training(failing)} == {r.step: r.values["loss"] for r in training(whole)}
    final = [read_metrics(path / "metrics.jsonl")[-1].values for path in (whole, failing)]
    assert final[0] == final[1]
    expected, actual = (saved(path / "checkpoints" / "step_00000008") for path in (whole, failing))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())
    resumed = [
        line.split("(")[-1] for line in (failing / "train.log").read_text().splitlines() if "resumed from" in line
    ]
    assert resumed == [f"step {step}, epoch 0)" for step in steps]
