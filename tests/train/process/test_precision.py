"""`precision=auto`: what the hardware multiplies decides, once for a run."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.launching import TINY_DLRM, train_here
from tests.processes import run_ranks
from train.config.schema import PrecisionConfig, RuntimeConfig
from train.process import distributed, precision


def hardware(multiplies: bool) -> mock._patch[mock.Mock]:
    return mock.patch.object(precision, "multiplies_bf16", return_value=multiplies)


@pytest.mark.parametrize(("multiplies", "name"), [(True, "bf16"), (False, "fp32")])
def test_the_hardware_decides_and_other_hardware_resumes_with_the_same(
    multiplies: bool, name: str, tmp_path: Path
) -> None:
    for here, steps in ((multiplies, 1), (not multiplies, 2)):
        with hardware(here):
            train_here(tmp_path / "run", f"runtime.steps={steps}", base=TINY_DLRM)
        assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["precision"]["name"] == name
    first, again = (
        line for line in (tmp_path / "run" / "train.log").read_text().splitlines() if "precision=auto is" in line
    )
    assert f"precision=auto is {name}: the hardware" in first
    assert f"precision=auto is {name}: as this run began" in again


def settle_on_unlike_ranks() -> None:
    world = distributed.start(RuntimeConfig(device="cpu"))
    auto = PrecisionConfig("auto")
    with hardware(world.rank == 0):
        precision.settle(auto, world)
    assert auto.name == "fp32"
    distributed.stop()


def test_ranks_agree() -> None:
    run_ranks(settle_on_unlike_ranks, 2)


@pytest.mark.parametrize(
    ("capabilities", "multiplies"), [({"avx512_bf16": True}, True), ({"amx_bf16": True}, True), ({"avx2": True}, False)]
)
def test_a_cpu_that_only_widens_is_told_from_one_that_multiplies(
    capabilities: dict[str, bool], multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(precision.FORCED, raising=False)
    with mock.patch("torch.cpu.get_capabilities", return_value=capabilities):
        assert precision.multiplies_bf16(torch.device("cpu")) == multiplies
        dtype = torch.bfloat16 if multiplies else torch.float32
        assert precision.compute_dtype("auto", torch.device("cpu")) == dtype
        for forced in (True, False):
            monkeypatch.setenv(precision.FORCED, str(int(forced)))
            assert precision.multiplies_bf16(torch.device("cpu")) == forced


@pytest.mark.parametrize(("capability", "multiplies"), [((7, 5), False), ((8, 0), True), ((10, 0), True)])
def test_a_gpu_from_sm_80_on_multiplies(capability: tuple[int, int], multiplies: bool) -> None:
    with mock.patch("torch.cuda.get_device_capability", return_value=capability):
        assert precision.multiplies_bf16(torch.device("cuda")) == multiplies
