"""What runs are told to stop by, and how they end then. Launchers read it without an import of PyTorch."""

from __future__ import annotations

import signal

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
STATUS = 75
"""Exit status of processes that stopped because they were told to (EX_TEMPFAIL of sysexits.h): start the run again."""
