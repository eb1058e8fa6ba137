"""The training job: `torchrun train/main.py +experiment=NAME`, or `torchrun -m train.main +experiment=NAME`.

`+experiment=NAME` is a file of configs/experiment; `model=NAME`, `data=NAME` and so on choose one of another folder,
`key=value` sets any key, and `--config-dir DIR` adds a folder of your own configurations. `--cfg job` prints the whole
configuration and trains nothing. A run that is started again with the same `runtime.run_dir` resumes.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __package__ in (None, ""):  # `torchrun train/main.py` puts train/ on the path, not the repository root
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from train.process.imports import lasting

with lasting():
    from train.config.compose import to_config
    from train.config.files import parse
    from train.process import distributed, errors
    from train.trainer import Trainer


def main(arguments: list[str]) -> None:
    config = to_config(parse(arguments, "train.main", __doc__))
    world = distributed.start(config.runtime)
    try:
        Trainer(config, world).run()
    finally:
        distributed.stop()


if __name__ == "__main__":
    errors.run(main)
