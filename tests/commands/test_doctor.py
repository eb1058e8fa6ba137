"""The doctor's diagnosis over made-up machines, and its reading of this one."""

from __future__ import annotations

import os
import subprocess
import venv
from dataclasses import replace
from pathlib import Path

import pytest

from train.commands import doctor
from train.commands.doctor import FAIL, OK, ROOT, WARN, Facts, Finding, Gpu, Package, diagnose, gather, report

H200 = Gpu("NVIDIA H200", "9.0", "143771 MiB")
CPU = Facts(
    python=(3, 11, 7),
    packages={
        "torch": Package("2.13.0+cpu"),
        "fbgemm": Package("1.8.0"),
        "torchrec": Package("1.8.0"),
        "triton": Package("3.7.1"),
        "torchmetrics": Package("1.0.3"),
        "hydra": Package("1.3.8"),
        "pyarrow": Package("26.0.1"),
        "matplotlib": Package("3.11.2"),
        "tensorboard": Package("2.21.0"),
        "wandb": Package("0.31.0"),
        "gemsmith": Package("0.1.0"),
    },
    fbgemm_builds=("fbgemm-gpu-cpu",),
    places=(f"{ROOT}/train", f"{ROOT}/kernels"),
    ptxas="12.8.93",
    ptxas_path="/site/ptxas",
)


def with_packages(facts: Facts, **packages: Package) -> Facts:
    return replace(facts, packages={**facts.packages, **packages})


CUDA = replace(
    with_packages(CPU, torch=Package("2.13.0+cu130")),
    torch_cuda="13.0",
    torch_devices=2,
    fbgemm_builds=("fbgemm-gpu",),
    gpus=(H200, H200),
    driver="580.95.05",
    ptxas="13.3.73",
)


def of(facts: Facts, subject: str) -> Finding:
    (finding,) = [finding for finding in diagnose(facts) if finding.subject == subject]
    return finding


@pytest.mark.parametrize("facts", [CPU, CUDA], ids=["cpu", "cuda"])
def test_a_matching_set_has_nothing_to_mend(facts: Facts) -> None:
    findings = diagnose(facts)
    assert [finding for finding in findings if finding.level != OK or finding.fixes] == []
    assert "\nready:" in report(facts, findings)


@pytest.mark.parametrize("row", doctor.RELEASES, ids=lambda row: row.torch)
def test_every_row_of_the_table_fits_itself(row: doctor.Release) -> None:
    facts = with_packages(
        CUDA,
        torch=Package(row.torch),
        fbgemm=Package(row.fbgemm),
        torchrec=Package(row.torchrec),
        triton=Package(row.triton),
    )
    assert {finding.level for finding in diagnose(facts)} == {OK}


def test_another_fbgemm_minor_fails_and_the_line_installs_the_right_one() -> None:
    finding = of(with_packages(CPU, fbgemm=Package("1.6.0", "OSError: could not load")), "fbgemm")
    assert finding.level == FAIL
    assert finding.fixes[0].endswith("pip install --no-deps --force-reinstall fbgemm-gpu-cpu==1.8.0")
    assert of(with_packages(CUDA, fbgemm=Package("1.9.0")), "fbgemm").fixes[0].endswith(" fbgemm-gpu==1.8.0")


@pytest.mark.parametrize(
    "builds", [("fbgemm-gpu",), ("fbgemm-gpu", "fbgemm-gpu-cpu")], ids=["the CUDA build on a CPU torch", "both builds"]
)
def test_a_wrong_fbgemm_build_is_uninstalled_first(builds: tuple[str, ...]) -> None:
    finding = of(replace(CPU, fbgemm_builds=builds), "fbgemm")
    assert finding.level == FAIL
    assert finding.fixes[0].endswith("uninstall -y " + " ".join(builds))
    assert finding.fixes[1].endswith("fbgemm-gpu-cpu==1.8.0")


def test_a_torch_without_fbgemm_fails_alone() -> None:
    facts = with_packages(CPU, torch=Package("2.15.0"))
    finding = of(facts, "torch")
    assert finding.level == FAIL
    assert "2.11, 2.12, 2.13, 2.14" in finding.message
    assert finding.fixes[0].endswith("pip install --no-deps -r " + f"{ROOT}/requirements/cpu.txt")
    assert [each.subject for each in diagnose(facts) if each.level == FAIL] == ["torch"]


@pytest.mark.parametrize("torch", [Package(None, "gone", installed=False), Package("2.13.0", "OSError: libcudart")])
def test_without_a_working_torch_nothing_else_repeats_its_error(torch: Package) -> None:
    facts = with_packages(CPU, torch=torch, fbgemm=Package("1.8.0", "no torch"), torchrec=Package("1.8.0", "no torch"))
    assert [each.subject for each in diagnose(facts) if each.level == FAIL] == ["torch"]


def test_a_cpu_torch_beside_gpus_fails() -> None:
    finding = of(replace(CPU, gpus=(H200,), driver="580.95.05"), "torch")
    assert finding.level == FAIL
    assert "CPU build" in finding.message
    assert finding.fixes[0].endswith("env DEVICE=cuda")


def test_an_old_driver_fails_and_names_the_series() -> None:
    finding = of(replace(CUDA, driver="550.54.15", torch_devices=0), "torch")
    assert finding.level == FAIL
    assert "580" in finding.message
    assert "550.54.15" in finding.message


def test_hidden_gpus_are_a_choice_but_unusable_ones_fail() -> None:
    assert of(replace(CUDA, torch_devices=1, visible="0"), "torch").level == OK
    assert of(replace(CUDA, torch_devices=0), "torch").level == FAIL


def test_an_old_ptxas_matters_on_hopper_only() -> None:
    finding = of(replace(CUDA, ptxas="12.8.93"), "ptxas")
    assert finding.level == WARN
    assert "nvidia-cuda-nvcc==" in finding.fixes[0]
    assert finding.fixes[1].startswith("export TRITON_PTXAS_PATH=")
    blackwell = replace(CUDA, ptxas="12.9.86", gpus=(Gpu("NVIDIA B200", "10.0", "183359 MiB"),), torch_devices=1)
    assert of(blackwell, "ptxas").level == OK
    assert of(CPU, "ptxas").level == OK


def test_a_neighbouring_torchrec_warns_but_a_broken_one_fails() -> None:
    assert of(with_packages(CPU, torchrec=Package("1.7.0")), "torchrec").level == WARN
    assert of(with_packages(CPU, torchrec=Package("1.8.0", "AttributeError: x")), "torchrec").level == FAIL
    missing = of(with_packages(CPU, torchrec=Package(None, "gone", installed=False)), "torchrec")
    assert "--no-deps torchrec==1.8.0" in missing.fixes[0]


def test_training_runs_without_triton_and_wandb() -> None:
    gone = Package(None, "gone", installed=False)
    findings = diagnose(with_packages(CPU, triton=gone, wandb=gone))
    assert {each.subject: each.level for each in findings if each.level != OK} == {"triton": WARN, "wandb": WARN}
    assert "\nready:" in report(CPU, findings)


def test_another_triton_than_torchs_warns() -> None:
    assert of(with_packages(CUDA, triton=Package("3.6.0")), "triton").fixes[0].endswith("triton==3.7.1")


def test_a_foreign_antlr_is_named() -> None:
    error = "Exception: Could not deserialize ATN with version 3 (expected 4)."
    assert "antlr4-python3-runtime==4.9.3" in of(with_packages(CPU, hydra=Package("1.3.8", error)), "hydra").fixes[0]


def test_a_package_that_hides_ours_is_named() -> None:
    finding = of(replace(CPU, places=(f"{ROOT}/train", "/site/kernels")), "gemsmith")
    assert finding.level == WARN
    assert "/site/kernels" in finding.message


def test_an_old_python_fails() -> None:
    assert of(replace(CPU, python=(3, 10, 12)), "python").level == FAIL


def test_a_failure_is_counted_and_every_fix_is_printed() -> None:
    facts = with_packages(CPU, fbgemm=Package(None, "gone", installed=False))
    text = report(facts, diagnose(facts))
    assert text.endswith("not ready: 1 to mend")
    assert "mend: " in text


def test_broken_crashing_and_missing_packages_are_read_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text("raise RuntimeError('half installed')")
    (tmp_path / "pyarrow.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '580.95.05, 9.0, 143771 MiB, NVIDIA H200'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "ptxas").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.3, V13.3.73'\n")
    (tmp_path / "ptxas").chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "ptxas"))
    # The others take seconds to import, which the README's line does in its test.
    for name in ("matplotlib", "fbgemm", "torchrec", "torchmetrics", "triton"):
        monkeypatch.setitem(doctor.PROBES, name, f"import no_such_package_{name}")
    monkeypatch.setitem(doctor.PROBES, "tensorboard", "import tensorboard_gone as m; extra = {}")
    facts = gather()
    assert facts.packages["wandb"].error == "RuntimeError: half installed"
    assert facts.packages["pyarrow"].error == "the import dies with signal 11"
    assert "no_such_package_matplotlib" in str(facts.packages["matplotlib"].error)
    assert facts.packages["torch"].error is None
    assert facts.gpus == (H200,)
    assert (facts.driver, facts.ptxas) == ("580.95.05", "13.3.73")
    assert of(facts, "pyarrow").level == FAIL


def test_a_package_without_a_trace_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_installed_version", lambda name: None)
    monkeypatch.setitem(doctor.PROBES, "wandb", "raise ModuleNotFoundError(\"No module named 'wandb'\")")
    monkeypatch.setitem(doctor.PROBES, "triton", "raise ModuleNotFoundError(\"No module named 'needed_by_triton'\")")
    assert not doctor._probe("wandb")[0].installed
    assert doctor._probe("triton")[0].installed


def test_the_command_diagnoses_an_empty_environment(tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", with_pip=False)
    command = [str(tmp_path / "empty/bin/python"), "-m", "train.commands.doctor"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 1
    assert "FAIL  torch         is not installed" in done.stdout
    assert "FAIL  pyarrow       is not installed" in done.stdout
