"""Starting a run on a list of hosts: what each is told, and that none is left behind. A local shell plays `ssh`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.hosts import main
from train.config.places import ROOT
from train.process.signals import STATUS

# In place of launch/torchrun.sh: says what it got, and does on each host what PLAY tells.
LAUNCHER = """#!/usr/bin/env bash
echo "node $NODE_RANK of $NNODES at $MASTER_ADDR, $NPROC processes, $TOKEN, $RUN_DIR, in $PWD: $*"
case "$PLAY$NODE_RANK" in
  wait*|fail1)
    trap 'touch "$RUN_DIR/stopped$NODE_RANK"; kill $!; exit 75' TERM
    touch "$RUN_DIR/started$NODE_RANK"
    sleep 120 & wait $!;;
  fail0)
    until [[ -e $RUN_DIR/started1 ]]; do sleep 0.02; done
    exit 3;;
esac
"""
COMMAND = "import sys; from pathlib import Path; from launch import hosts; "
COMMAND += "hosts.LAUNCHER = Path(sys.argv[1]); sys.exit(hosts.main(sys.argv[2:]))"


def start(folder: Path, play: str, *arguments: str) -> subprocess.Popen[str]:
    """Two hosts, of which `ssh` has been told to log in as `me`."""
    for name, text in (
        ("launcher", LAUNCHER),
        ("ssh", '#!/usr/bin/env bash\n[[ $1 == -q ]] && shift 2 && exec "$@"\n'),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    line = [sys.executable, "-c", COMMAND, str(folder / "launcher"), "--ssh", f"{folder}/ssh -q"]
    line += ["--hosts", "me@first,second", "--run-dir", str(folder), "--env", "PLAY", "--env", "TOKEN", *arguments]
    own = {"PYTHONPATH": str(ROOT), "PLAY": play, "TOKEN": "quoted ' and $HOME", "NPROC": "4"}
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"} | own
    return subprocess.Popen(
        line, env=environment, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for(*paths: Path) -> None:
    end = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end, f"none of {paths}"
        time.sleep(0.02)


def files(folder: Path, name: str) -> list[Path]:
    return [folder / f"{name}{rank}" for rank in (0, 1)]


def test_each_host_is_told_its_rank_and_the_rest_alike(tmp_path: Path) -> None:
    out, error = (process := start(tmp_path, "", "+experiment=a", "x=1 '2'", "--config-dir", "c")).communicate(
        timeout=60
    )
    assert process.returncode == 0, error
    rest = f"of 2 at first, 4 processes, quoted ' and $HOME, {tmp_path}, in {tmp_path}: "
    rest += "+experiment=a x=1 '2' --config-dir c"
    assert sorted(out.splitlines()) == [f"[second] node 1 {rest}", f"node 0 {rest}"]


def test_values_are_on_no_command_line(tmp_path: Path) -> None:
    """Other users of a host see command lines."""
    (tmp_path / "log").touch()
    process = start(tmp_path, "wait")
    wait_for(*files(tmp_path, "started"))
    lines = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    process.terminate()
    process.communicate(timeout=60)
    assert str(tmp_path) in lines
    assert "quoted '" not in lines


@pytest.mark.reliability(
    "a host that `gemsmith hosts` started fails",
    "the others save a checkpoint and stop; the command names it and returns its status",
)
def test_a_host_that_fails_stops_the_others(tmp_path: Path) -> None:
    _, error = (process := start(tmp_path, "fail")).communicate(timeout=60)
    assert process.returncode == 3
    assert "launch.hosts: me@first: exit status 3" in error
    assert (tmp_path / "stopped1").exists()


@pytest.mark.reliability("`gemsmith hosts` is stopped or killed", "every host saves a checkpoint and stops; status 75")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_host_is_left_behind(number: signal.Signals, tmp_path: Path) -> None:
    process = start(tmp_path, "wait")
    wait_for(*files(tmp_path, "started"))
    process.send_signal(number)
    wait_for(*files(tmp_path, "stopped"))
    process.communicate(timeout=60)
    assert process.returncode == (STATUS if number == signal.SIGTERM else -signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "e.g. --hosts node1,node2"),
        (["--hosts", "a,a"], "names a host twice"),
        (["--hosts", "a", "--env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set here"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--run-dir", "r", *arguments])
    assert said in capsys.readouterr().err


def test_hosts_stand_in_a_file_too(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# my hosts\nme@first\nsecond  # the large one\n\n")
    out, error = (process := start(tmp_path, "", "--hostfile", str(tmp_path / "hosts"))).communicate(timeout=60)
    assert process.returncode == 0, error
    assert len(out.splitlines()) == 2
