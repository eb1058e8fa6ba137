"""The launchers: ranks meet, one run directory, restarts, log files, and the variables that each scheduler sets."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from train.commands.doctor import ROOT
from train.process.files import new_folder
from train.process.interface import address_of

LAUNCHER = ROOT / "launch/torchrun.sh"

LOOPBACK = "0100007F"  # 127.0.0.1, as /proc/net/tcp has it

# Ranks sum their numbers over gloo; the first attempt fails on rank 1 when told to.
FAKE_JOB = """
import contextlib, os, sys
from pathlib import Path
from types import SimpleNamespace
import torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from train.process import distributed

def listening(process):
    sockets = set()
    for descriptor in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(FileNotFoundError):  # the launcher closes files meanwhile
            sockets.add(os.readlink(f"/proc/{process}/fd/{descriptor}"))
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}

@record
def main():
    # As RuntimeConfig, which would import all models in every process.
    distributed.start(SimpleNamespace(device="cpu", threads=1, deterministic=False, collective_timeout=600))
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if "fail=once" in sys.argv and attempt == 0 and rank == 1:
        raise ValueError("rank 1 broke")
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    print(f"rank {rank} speaks")
    heard = [*listening(os.getpid()), *listening(os.getppid())]
    (Path(os.environ["RUN_DIR"]) / f"listens{rank}.txt").write_text(" ".join(heard))
    line = f"{rank} of {dist.get_world_size()}: {total.item():.0f}, attempt {attempt}, {sys.argv[1:]}"
    (Path(os.environ["RUN_DIR"]) / f"rank{rank}.txt").write_text(line)
    dist.destroy_process_group()

main()
"""


def listens(run_dir: Path) -> set[str]:
    """The addresses on which both ranks and their launchers listened: gloo and stores."""
    found = [set((run_dir / f"listens{rank}.txt").read_text().split()) for rank in (0, 1)]
    assert all(found)
    return set.union(*found)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "fake_job.py").write_text(FAKE_JOB)
    (tmp_path / "elsewhere").mkdir()
    return {**os.environ, "PYTHONPATH": str(tmp_path), "MODULE": "fake_job", "CUDA_VISIBLE_DEVICES": ""}


def launch(environment: dict[str, str], *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [str(LAUNCHER), *arguments]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=120)


def stub(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("own_store", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_one_node_names_the_run_once_and_passes_its_arguments(
    environment: dict[str, str], tmp_path: Path, own_store: bool
) -> None:
    cwd = tmp_path / "elsewhere"
    settings = {**environment, "NPROC": "2", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int(own_store))}
    done = launch(settings, "+experiment=[a,b]", "x=1 2", cwd=cwd)
    assert done.returncode == 0, done.stderr
    (run_dir,) = (cwd / "runs").iterdir()
    assert run_dir.name.startswith("a-b-")
    expected = "of 2: 3, attempt 0, ['+experiment=[a,b]', 'x=1 2']"
    assert [(run_dir / f"rank{rank}.txt").read_text() for rank in (0, 1)] == [f"0 {expected}", f"1 {expected}"]
    assert listens(run_dir) == {LOOPBACK}
    assert "rank 0 speaks" in done.stdout
    assert "rank 1 speaks" not in done.stdout
    (log,) = run_dir.glob("logs/*/attempt_0/1/stdout.log")
    assert "rank 1 speaks" in log.read_text()


def test_a_failed_rank_is_restarted_into_the_same_run(environment: dict[str, str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = {**environment, "NPROC": "2", "RUN_DIR": str(run_dir), "MAX_RESTARTS": "1"}
    done = launch(settings, "fail=once", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (run_dir / "rank1.txt").read_text().startswith("1 of 2: 3, attempt 1")
    (error,) = run_dir.glob("logs/*/attempt_0/1/error.json")
    assert "rank 1 broke" in json.dumps(json.loads(error.read_text()))


def test_slurm_starts_one_launcher_a_node_and_they_meet(environment: dict[str, str], tmp_path: Path) -> None:
    """`srun` is played by two local processes, which rendezvous over localhost as two nodes would."""
    tools = tmp_path / "tools"
    tools.mkdir()
    stub(tools, "scontrol", "printf 'localhost\\nother\\n'")
    stub(tools, "srun", 'shift; SLURM_NODEID=1 "$@" & SLURM_NODEID=0 "$@"; first=$?; wait $! && exit $first')
    slurm = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "localhost,other",
        "SLURM_JOB_ID": str(os.getpid()),  # decides the port
        "RUN_DIR": str(tmp_path / "run"),
        "NPROC": "1",
        "INTERFACE": "lo",
        "PATH": f"{tools}:{os.environ['PATH']}",
    }
    command = ["bash", str(ROOT / "launch/slurm.sbatch"), "a=1"]
    done = subprocess.run(
        command, env={**environment, **slurm}, capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr
    lines = sorted((tmp_path / "run" / f"rank{rank}.txt").read_text() for rank in (0, 1))
    assert lines == ["0 of 2: 3, attempt 0, ['a=1']", "1 of 2: 3, attempt 0, ['a=1']"]
    assert listens(tmp_path / "run") == {LOOPBACK}


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        ((), 600),
        (("runtime.collective_timeout=90.5",), 90),
        (("x=1", "runtime.collective_timeout=1e3"), 1000),
        (("runtime.collective_timeout=0.5",), 1),
    ],
)
def test_nodes_wait_for_one_another_as_long_as_ranks_do(
    environment: dict[str, str], tmp_path: Path, arguments: tuple[str, ...], seconds: int
) -> None:
    stub(tmp_path, "python3", 'echo "$@"')
    nodes = {
        "NNODES": "2",
        "NODE_RANK": "1",
        "MASTER_ADDR": "localhost",
        "NPROC": "1",
        "RUN_DIR": str(tmp_path / "run"),
    }
    found = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = launch({**environment, **nodes, **found}, *arguments, cwd=tmp_path)
    assert f"--rdzv-conf is_host=false,join_timeout={seconds} " in done.stdout


def test_an_interface_that_is_not_there_is_named() -> None:
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(ValueError, match="INTERFACE=nowhere0 has no address .*there are .*lo"):
        address_of("nowhere0")


@pytest.mark.parametrize("missing", ["RUN_DIR", "NODE_RANK", "MASTER_ADDR"])
def test_several_nodes_need_to_agree(missing: str, environment: dict[str, str], tmp_path: Path) -> None:
    settings = {"NNODES": "2", "RUN_DIR": str(tmp_path / "run"), "NODE_RANK": "0", "MASTER_ADDR": "localhost"}
    del settings[missing]
    done = launch({**environment, **settings}, cwd=tmp_path)
    assert done.returncode == 2
    assert missing in done.stderr


def test_the_process_count_follows_the_gpus(environment: dict[str, str], tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    stub(tools, "python3", 'echo "$@"')
    stub(tools, "nvidia-smi", "exit 1")
    settings = {**environment, "PATH": f"{tools}:{os.environ['PATH']}", "RUN_DIR": str(tmp_path / "run")}
    settings.pop("NPROC", None)
    assert "--nproc-per-node 2 " in launch(settings, cwd=tmp_path).stdout
    stub(tools, "nvidia-smi", "echo 'GPU 0: NVIDIA H200 (UUID: x)'")
    assert "--nproc-per-node gpu " in launch(settings, cwd=tmp_path).stdout


def test_runs_that_start_in_one_second_have_folders_of_their_own(environment: dict[str, str], tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    stub(tools, "python3", "echo $RUN_DIR")
    stub(tools, "date", "echo now")
    settings = {**environment, "PATH": f"{tools}:{os.environ['PATH']}"}
    settings.pop("RUN_DIR", None)
    told = [launch(settings, "+experiment=tiny", cwd=tmp_path).stdout.strip() for _ in range(3)]
    assert [Path(text).name for text in told] == ["tiny-now", "tiny-now-2", "tiny-now-3"]
    assert [new_folder(tmp_path / "runs" / "tiny-now").name for _ in range(2)] == ["tiny-now-4", "tiny-now-5"]


def test_without_an_environment_the_launcher_says_what_to_source(tmp_path: Path) -> None:
    done = launch({"PATH": "/usr/bin:/bin"}, cwd=tmp_path)
    assert done.returncode == 2
    assert ".venv/bin/activate" in done.stderr
