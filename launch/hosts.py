"""Train on a list of hosts over ssh, where no scheduler starts processes: one torchrun on each.

    python -m launch.hosts --hosts node1,node2 --run-dir /shared/runs/first +experiment=NAME [key=value] [options]

Each host runs launch/torchrun.sh in the folder where this command was started, with the Python environment of this
command: both must be found under the same paths everywhere, as on a shared file system, and so must `--run-dir`. ssh
must ask for nothing (keys, known hosts). The first host is node 0, whose output comes as it is; lines of the others
begin with their names. NPROC, MAX_RESTARTS, MASTER_PORT and MODULE mean what they mean to launch/torchrun.sh, and
MASTER_ADDR is the first host unless it is set. When a host fails, or this command is told to stop or dies, the others
are told to stop and save a checkpoint. Exit status 75 says that all stopped as they were told.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

from train.process import errors
from train.process.signals import SIGNALS, STATUS

LAUNCHER = Path(__file__).with_name("torchrun.sh")
PASSED_ON = ("NPROC", "MAX_RESTARTS", "MASTER_PORT", "MODULE", "INTERFACE")

# Read from its standard input by the shell of a host, which reads all of it before the first command. When the input
# ends, whether it was closed or the connection is lost, the run is told to stop.
REMOTE = """{{
cd {directory} || exit 2
export {variables}
exec 3<&0
{command} </dev/null 3<&- &
job=$!
( while read -r _; do :; done; kill -TERM $job ) <&3 >/dev/null 2>&1 &
watcher=$!
exec 3<&-
wait $job
status=$?
kill $watcher 2>/dev/null
exit $status
}}
"""


def remote_script(rank: int, hosts: Sequence[str], run_dir: str, variables: Sequence[str], command: list[str]) -> str:
    """What the shell of host number `rank` runs. `variables` are names of this environment that it gets."""
    values = {name: os.environ[name] for name in (*PASSED_ON, *variables) if name in os.environ}
    values |= {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])}
    if len(hosts) > 1:
        address = os.environ.get("MASTER_ADDR", hosts[0].rpartition("@")[2])
        values |= {"NNODES": str(len(hosts)), "NODE_RANK": str(rank), "MASTER_ADDR": address}
    values["RUN_DIR"] = run_dir
    return REMOTE.format(
        directory=shlex.quote(os.getcwd()),
        variables=shlex.join(f"{name}={value}" for name, value in values.items()),
        command=shlex.join(command),
    )


class Host:
    """A host's ssh process. It ends with the status of the launcher there, or with 255 if ssh itself failed."""

    def __init__(self, name: str, ssh: list[str], script: str, ended: SimpleQueue[Host], *, prefix: str) -> None:
        self.name, self.status = name, 0
        self._prefix, self._ended = prefix, ended
        self._process = subprocess.Popen(
            [*ssh, name, "bash", "-s"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,  # Ctrl+C is for this command, which tells the hosts
        )  # fmt: skip
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ssh has ended already, and its status says so
            self._process.stdin.write(script)
            self._process.stdin.flush()
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            print(self._prefix + line, end="", flush=True)
        self.status = self._process.wait()
        self._ended.put(self)

    def stop(self) -> None:
        """Tell the run there to save a checkpoint and end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


def run(hosts: Sequence[str], ssh: list[str], scripts: Sequence[str]) -> int:
    """Run each host's script until all have ended; the exit status of the first that failed, 75, or 0."""
    ended: SimpleQueue[Host] = SimpleQueue()
    told = threading.Event()

    def stop_all(*_: object) -> None:
        if not told.is_set():
            told.set()
            for host in running:
                host.stop()

    running: list[Host] = []
    for number in (*SIGNALS, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop_all)
    for name, script in zip(hosts, scripts, strict=True):
        running.append(Host(name, ssh, script, ended, prefix=f"[{name}] " if running else ""))
    if told.is_set():  # while the last ones were started
        for host in running:
            host.stop()
    statuses = []
    for _ in hosts:
        host = ended.get()
        statuses.append(host.status)
        if host.status not in (0, STATUS):
            reason = "ssh failed" if host.status == 255 else f"exit status {host.status}"
            print(f"launch.hosts: {host.name}: {reason}", file=sys.stderr, flush=True)
        if host.status:
            stop_all()
    failed = [status for status in statuses if status not in (0, STATUS)]
    return failed[0] if failed else max(statuses)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m launch.hosts", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--hosts", default="", help="names for ssh, separated by commas, the first is node 0")
    parser.add_argument("--hostfile", type=Path, help="in place of --hosts: a file with a name in each line")
    parser.add_argument("--run-dir", required=True, help="the run's folder, which all hosts see")
    parser.add_argument("--ssh", default="ssh -o BatchMode=yes", help="the command in front of a host's name")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME", help="a variable that hosts get from here"
    )
    options, overrides = parser.parse_known_args(arguments)
    lines = options.hostfile.read_text().splitlines() if options.hostfile else options.hosts.split(",")
    hosts = [name for line in lines if (name := line.partition("#")[0].strip())]
    if not hosts:
        parser.error("--hosts or --hostfile names the hosts, e.g. --hosts node1,node2")
    if len(set(hosts)) < len(hosts):
        parser.error(f"--hosts {','.join(hosts)} names a host twice; each runs all of its processes in one launcher")
    if missing := [name for name in options.env if name not in os.environ]:
        parser.error(f"--env {missing[0]} is not set here")
    run_dir, command = os.path.abspath(options.run_dir), [str(LAUNCHER), *overrides]
    scripts = [remote_script(rank, hosts, run_dir, options.env, command) for rank in range(len(hosts))]
    return run(hosts, shlex.split(options.ssh), scripts)


if __name__ == "__main__":
    errors.run(main)
