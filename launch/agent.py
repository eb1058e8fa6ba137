"""torchrun for jobs that may be told to stop: `python -m launch.agent`, with torchrun's arguments.

torchrun passes a signal on to its processes, waits 30 seconds for them to end, and ends with a traceback and status 1,
as after a failure. This command ends with the status of its processes if they stopped because they were told to, and of
what failed first its last lines tell the error. It also handles SIGUSR1, which would end torchrun at once and leave its
processes behind. What listens of a run of one node
(`--standalone`) does so on the loopback interface; of several nodes on INTERFACE, if the environment has it.

On several nodes, the ranks of each start meet in a new store. torchrun would keep that of the first start, but when
another node comes first after a restart, only that node would know of its own store.
"""

from __future__ import annotations

import os
import signal
import sys

from train.process.imports import lasting

with lasting():
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from train.process import errors
    from train.process.interface import listen_on
    from train.process.signals import SIGNALS, STATUS


def main(arguments: list[str]) -> int:
    if "--standalone" not in arguments:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    interface = os.environ.get("INTERFACE") or ("lo" if "--standalone" in arguments else "")
    if interface:
        os.environ["INTERFACE"] = interface  # of rank 0's store, where PyTorch is told not to share the launcher's
        arguments = ["--local-addr", listen_on(interface), *arguments]
    try:
        run.run(run.parse_args(["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", *arguments]))
    except SignalException as stopped:
        return STATUS if stopped.sigval in SIGNALS else 128 + stopped.sigval
    except ChildFailedError as error:
        # The run was stopped by another node, or by a signal that went only to its processes. When the first of them
        # has ended, torchrun terminates the others, which may be too far along to handle that.
        ended = {failure.exitcode for failure in error.failures.values()}
        if STATUS not in ended or ended - {STATUS, -signal.SIGTERM}:
            print(told(error), file=sys.stderr, flush=True)
            return 1
        return STATUS
    return 0


def told(failed: ChildFailedError) -> str:
    """Which process failed first, where its traceback is, and last its error."""
    rank, failure = failed.get_first_failure()
    message = failure.message
    if isinstance(message, dict):
        text, where = message["message"], f"its traceback is in {failure.error_file}"
    elif failure.exitcode < 0:
        text, where = message, "what it printed is in RUN_DIR/logs, or above for rank 0"
    else:
        text, where = f"status {failure.exitcode}", "what it printed is in RUN_DIR/logs, or above for rank 0"
    return f"rank {rank} of {failed.name} failed first; {where}\n{text}"


if __name__ == "__main__":
    errors.run(main)
