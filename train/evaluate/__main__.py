"""`python -m train.evaluate`."""

from __future__ import annotations

import sys

from train.process.imports import lasting

with lasting():
    from torch.distributed.elastic.multiprocessing.errors import record

    from train.evaluate import main

if __name__ == "__main__":
    record(main)(sys.argv[1:])
