"""torchrun for jobs that may be told to stop: `python -m launch.agent`, with torchrun's arguments.

torchrun hands a signal on to its processes, waits 30 seconds for them to end, and ends with a traceback and status 1,
as after a failure. This ends with the status that its processes have when they stopped as they were told to, and knows
SIGUSR1 besides, which would end torchrun at once and leave its processes behind.
"""

from __future__ import annotations

import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from train.preemption import SIGNALS, STATUS


def main(arguments: list[str]) -> int:
    try:
        run.main(["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", *arguments])
    except SignalException as stopped:
        return STATUS if stopped.sigval in SIGNALS else 128 + stopped.sigval
    except ChildFailedError as error:
        # Of a run that another node, or a signal that went to its processes alone, has stopped. When the first of them
        # has ended, torchrun terminates the others, which may be past handling that.
        ended = {failure.exitcode for failure in error.failures.values()}
        if STATUS not in ended or ended - {STATUS, -signal.SIGTERM}:
            raise
        return STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
