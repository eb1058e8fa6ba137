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
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import DictConfig
    from torch.distributed.elastic.multiprocessing.errors import record

    from train.config.compose import to_config
    from train.config.parser import accept_late_help
    from train.config.schema import register_schema
    from train.process import distributed
    from train.trainer import Trainer

register_schema()
accept_late_help()


@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
@record  # innermost: Hydra turns exceptions into exits, and torchrun's error file would lose them
def main(composed: DictConfig) -> None:
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        raise ValueError(
            "-m (--multirun) would run all jobs in these processes, where one's process groups and caches reach into "
            "the next; a sweep with processes for each: python -m launch.sweep +experiment=NAME --over runtime.seed=0,1"
        )
    config = to_config(composed)
    world = distributed.start(config.runtime)
    try:
        Trainer(config, world).run()
    finally:
        distributed.stop()


if __name__ == "__main__":
    main()
