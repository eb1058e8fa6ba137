"""Log files of a run, and its console."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from tqdm import tqdm

from train.config.places import PREFIX
from train.process.quiet import quieten

OWN_LOGGERS = (*(PREFIX + name for name in ("train", "modules", "kernels", "launch")), "__main__")


def setup_logging(run_dir: Path, rank: int) -> None:
    """Rank 0 logs to the console and `train.log`; every other rank logs warnings to `rank_N.log`, made when needed.

    Our own packages put what everybody reads at INFO, and tables for a closer look at DEBUG, for `train.log` only.
    Libraries are heard from WARNING on, Python warnings included.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    file = run_dir / ("train.log" if rank == 0 else f"rank_{rank}.log")
    handlers: list[logging.Handler] = [_LogFile(file, delay=True, encoding="utf-8")]
    if rank == 0:
        handlers.append(_ConsoleHandler(logging.INFO))
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s", handlers=handlers, force=True
    )
    logging.captureWarnings(True)
    quieten()
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(logging.DEBUG if rank == 0 else logging.WARNING)


class _LogFile(logging.FileHandler):
    """Where it cannot be written, mostly because the disk is full, one line on stderr says so; the run goes on."""

    told = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        if not self.told:
            self.told = True
            tqdm.write(
                f"{self.baseFilename} cannot be written ({sys.exc_info()[1]!r}); the run goes on", file=sys.stderr
            )


class _ConsoleHandler(logging.Handler):
    """Prints above the progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)
