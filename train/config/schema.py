"""The configuration's schema: Hydra composes YAML into it, `train.config.compose` checks what was composed.

Every field is documented beside it, and what it may be stands in it; models declare theirs beside their classes
(`modules.models`), sources of data theirs in `train.config.data_schema`. A misspelt key anywhere is an error because
these classes are the schema.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from modules.config import ModelConfig, Settled, SettledShare, option, refuse
from modules.models import CONFIGS
from train.config.data_schema import (  # noqa: F401
    SOURCES,
    DataConfig,
    EventsConfig,
    HistoryConfig,
    JoinConfig,
    MovieLensConfig,
    StatisticConfig,
    SyntheticConfig,
    TableVectorsConfig,
    TransformConfig,
    VectorConfig,
)


@dataclass
class PrecisionConfig:
    # auto: bf16 where the hardware multiplies it, else fp32
    name: str = option(MISSING, choices=["auto", "fp32", "bf16", "mxfp8", "mxfp8_g128"])
    quantize: list[str] = field(default_factory=list)  # globs over names of layers on MXFP8 operands, or auto

    def check_at(self, path: str) -> None:
        if self.name.startswith("mxfp8") and not self.quantize:
            raise ValueError(
                f'{path}={self.name} quantises nothing: {path}.quantize is empty; e.g. {path}.quantize=["arch.*"]'
            )


@dataclass
class GroupConfig:
    """Parameters and tables with settings of their own."""

    match: list[str] = MISSING  # globs over names of parameters, tables and the modules that hold them
    lr: float | None = None  # in place of optimizer.lr, of tables in place of optimizer.sparse_lr
    weight_decay: float | None = None  # in place of optimizer.weight_decay, of tables of optimizer.sparse_weight_decay


@dataclass
class OptimizerConfig:
    dense: str = option("adamw", choices=["adamw"], dotted="torch.optim.NAdam")
    arguments: dict[str, Any] = field(default_factory=dict)  # of an optimiser by its dotted name: {momentum: 0.9}
    lr: SettledShare = 1e-3  # of the dense part; null, the default: by the size of the data
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    weight_decay: float = 0.01
    # fused into the backward of the tables
    sparse: str = option("rowwise_adagrad", choices=["rowwise_adagrad", "adam", "sgd"])
    sparse_lr: SettledShare = 0.02  # null, the default: by the size of the data
    sparse_weight_decay: float = 0.0  # of the rows that a batch looks up; with rowwise_adagrad
    groups: list[GroupConfig] = field(default_factory=list)  # the first one that matches a name counts
    warmup_steps: Settled = option(
        20
    )  # dense steps; null, the default: 20, with data=events at most a tenth of the run
    # after the warm-up
    schedule: str = option("cosine", choices=["cosine", "constant"], dotted="torch.optim.lr_scheduler.PolynomialLR")
    # of a scheduler by its dotted name; the word steps stands for those of the run after its warm-up: {T_max: steps}
    schedule_arguments: dict[str, Any] = field(default_factory=dict)
    min_lr: float = 0.1  # at the end of cosine, as a fraction of the peak
    clip_norm: float = 10.0  # largest norm of the dense gradient; 0 turns clipping off
    accumulate: int = option(1, least=1)  # micro-batches to one dense step (the tables step at each)
    # of an average of the dense weights, which evaluations and exports take; 0: none
    ema_decay: float = option(0.0, below=1, example=0.999)
    frozen: list[str] = field(default_factory=list)  # globs over names of modules and parameters that do not learn
    task_weights: dict[str, float] = field(default_factory=dict)  # in the loss and for the best checkpoint; others 1

    retired: ClassVar[dict[str, Any]] = {"sparse_weight_decay_mode": "decoupled", "decay_share": 0.2}

    def check_at(self, path: str) -> None:
        refuse(
            self.sparse_weight_decay and self.sparse != "rowwise_adagrad",
            f"{path}.sparse_weight_decay={self.sparse_weight_decay} goes with {path}.sparse=rowwise_adagrad; use "
            f"that, or 0 with {path}.sparse={self.sparse}",
        )
        refuse(len(self.betas) != 2, f"{path}.betas={self.betas} must be two numbers, e.g. {path}.betas=[0.9,0.999]")
        refuse(self.min_lr > 1, f"{path}.min_lr={self.min_lr} is a fraction of {path}.lr: at most 1, e.g. 0.1")


SHARDING_TYPES = ("table_wise", "row_wise", "column_wise")


KERNELS = ("fused", "fused_uvm", "fused_uvm_caching")


@dataclass
class TablesConfig:
    """How tables are sharded whose names match a glob; what is not given is as for other tables."""

    match: list[str] = MISSING
    # data_parallel: whole on every rank, and stepped by the optimiser of the dense part
    sharding_types: list[str] | None = option(None, choices=(*SHARDING_TYPES, "data_parallel"))
    # fused: in GPU memory | fused_uvm: in host memory | fused_uvm_caching: there, with a cache of rows on the GPU
    kernels: list[str] | None = option(None, choices=KERNELS)
    cache_share: float | None = option(None, most=1)  # of the rows, that the cache of fused_uvm_caching holds


@dataclass
class ParallelConfig:
    # ddp: each rank holds the dense part | fsdp: all ranks share one | hsdp: each shard_ranks one
    dense: str = option("ddp", choices=["ddp", "fsdp", "hsdp"])
    shard_ranks: int = 0  # of hsdp: ranks that share a copy of the dense part; 0: those of a node
    recompute: list[str] = field(default_factory=list)  # globs of modules that the backward runs again, to save memory
    expert_ranks: int = 0  # ranks that share the experts of a layer and exchange tokens; 0: every rank has all experts
    # of experts' tokens between ranks: in the dtype of the products | in MXFP8 | in MXFP8, gradients as they are
    expert_payload: str = option("full", choices=["full", "mxfp8", "mxfp8_forward"])
    # requests that stay together when those of a step are dealt out over ranks by cost; 0: ranks take them in order
    balance: int = 0
    # To TorchRec an empty list would mean any kind.
    sharding_types: list[str] = option(list(SHARDING_TYPES), choices=SHARDING_TYPES)
    tables: list[TablesConfig] = field(default_factory=list)  # tables with rules of their own, the first that matches
    table_ranks: int = 0  # neighbouring ranks that share a copy of the tables; 0: all ranks, one copy
    table_average_every: int = option(1, least=1)  # steps after which the copies are averaged
    index_dedup: bool = False  # send each id of a batch once, however often it occurs
    prefetch_tables: bool = False  # fill caches of tables in host memory for the next batch while one computes; on GPUs
    # in which tables hand out rows, take their gradients, and send both between ranks; the tables stay fp32
    row_precision: str = option("fp32", choices=["fp32", "bf16"])
    hbm_gib: float | None = None  # GPU memory of a rank that the planner may use; default: the device's
    host_gib: float = 64.0  # the same of host memory, for tables that the GPUs cannot hold

    retired: ClassVar[dict[str, Any]] = {"reserve": ...}

    def check_at(self, path: str) -> None:
        in_host = next((rule.kernels for rule in self.tables if set(rule.kernels or ()) - {"fused"}), None)
        refuse(
            self.expert_payload != "full" and self.expert_ranks < 2,
            f"{path}.expert_payload={self.expert_payload} needs experts on several ranks, between which tokens "
            f"travel; use {path}.expert_payload=full, or e.g. {path}.expert_ranks=2",
        )
        refuse(
            self.index_dedup and self.row_precision != "fp32",
            f"{path}.index_dedup=true with {path}.row_precision={self.row_precision}: the gradients of an id that "
            "occurs often would be added up in bfloat16, where small ones are lost; use "
            f"{path}.row_precision=fp32 or {path}.index_dedup=false",
        )
        refuse(
            self.table_ranks and in_host,
            f"{path}.table_ranks={self.table_ranks} with {path}.tables kernels={in_host}: copies of tables in "
            f"host memory cannot be averaged; use kernels: [fused] or {path}.table_ranks=0",
        )
        refuse(
            self.table_average_every > 1 and not self.table_ranks,
            f"{path}.table_average_every={self.table_average_every} needs copies of the tables, each on "
            f"{path}.table_ranks ranks; use that, e.g. {path}.table_ranks=8, or {path}.table_average_every=1",
        )


@dataclass
class DistillConfig:
    predictions: str = ""  # folder that train.evaluate split=train has written of a teacher: its soft labels
    checkpoint: str = ""  # or a teacher's checkpoint, or a run's best one, which scores every batch
    weight: float = 1.0  # of the loss on soft labels, beside that on labels
    adapter: bool = False  # learn from the fresh labels to correct the teacher before the student sees it


@dataclass
class CheckpointConfig:
    every: int = 0  # steps between checkpoints; 0: only with validations
    keep: int = option(2, least=1)  # newest checkpoints kept; the best on validation is kept, too
    load: str | None = None  # start from the weights of this checkpoint, or of a run's best one (no resumption)
    # with `load`: all weights | only what has the same name and size, the log lists what is left out | all weights and
    # the moments of their optimisers
    load_what: str = option("weights", choices=["weights", "partial", "optimizer"])
    async_save: bool = True

    retired: ClassVar[dict[str, Any]] = {"load_optimizer": ..., "load_partial": ...}


@dataclass
class PublishConfig:
    every: int = 0  # steps between publications of what has changed, for scorers that follow the run; 0: none
    to: str = ""  # folder, or prefix of an object store (s3://bucket/run); default: RUN_DIR/published


@dataclass
class TrackingConfig:
    wandb: str = option(
        "auto", choices=["auto", "online", "offline", "disabled"]
    )  # auto: online with a key, else offline
    project: str = "gemsmith"
    name: str | None = None  # of the W&B run; default: that of the run directory
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    tensorboard: bool = True
    metrics: list[str] = field(default_factory=list)  # functions of your own for evaluations: [my_metrics.brier]
    top_k: list[int] = option([], least=1)  # of NDCG and recall within a request, in evaluations: [5, 10]
    rank_seen: bool = False  # of next items: what the history holds is ranked as well
    progress: str = option(
        "auto", choices=["auto", "always", "never"]
    )  # bar on rank 0; auto: when stderr is a terminal
    http_port: int = option(0, most=65535)  # rank 0 serves /metrics (Prometheus) and /healthz there; 0: nowhere
    http_host: str = "127.0.0.1"  # address of the interface that it listens on; 0.0.0.0: of all

    retired: ClassVar[dict[str, Any]] = {"entity": ..., "http_healthy": ..., "job_type": ...}


@dataclass
class RuntimeConfig:
    run_dir: str = ""  # named once by the launcher (RUN_DIR), else by rank 0; starting again with it resumes
    device: str = option("auto", choices=["auto", "cpu", "cuda"])
    seed: int = 0
    # null, the default: 1, with data=events by the size of the data 1 to 10
    epochs: Settled = option(1, least=1)
    steps: int = 0  # stop after this many steps; 0: the epochs decide
    eval_every: int = 0  # steps between validations; 0: evals_per_epoch decides
    # validations in each epoch, the last one at its end; null, the default: 1, of epochs chosen by the data 2 or 4
    evals_per_epoch: Settled = option(1, least=1)
    eval_epochs: int = option(1, least=1)  # epochs between those at the ends of epochs, which save checkpoints, too
    eval_steps: int = 0  # batches of a validation; 0: all
    # stop after this many validations without a better NE; 0: never; null, the default: 0, of epochs chosen by
    # the data those of two epochs
    early_stop: Settled = option(0)
    log_every: int = option(20, least=1)
    bad_batch: str = option("skip", choices=["skip", "stop"])  # what a batch with a non-finite loss or gradient does
    skip_window: int = 20  # stop when most of this many newest batches were skipped: the run has diverged; 0: never
    kernels: str = ""  # force kernel backends, e.g. "reference" or "jagged_attention=reference"
    compile: bool = False  # torch.compile the layers of the dense part one by one
    cuda_graphs: bool = False  # replay CUDA graphs of the dense part, or of its layers, for shapes that recur
    deterministic: bool = False  # ask torch for deterministic algorithms, and warn where it has none
    collective_timeout: float = option(
        600.0, least=1
    )  # seconds that ranks wait for the slowest one before the run ends
    threads: int = 0  # CPU threads a rank; 0: cores divided by the ranks of this node
    profile_step: int = 0  # trace five steps from this one with torch.profiler; 0 never

    def check_at(self, path: str) -> None:
        if self.eval_every and (self.evals_per_epoch or 1) > 1:
            raise ValueError(
                f"{path}.eval_every={self.eval_every} counts steps and {path}.evals_per_epoch={self.evals_per_epoch} "
                f"parts of an epoch; use one of them, e.g. {path}.eval_every=0"
            )


@dataclass
class Config:
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    tasks: dict[str, Any] = field(default_factory=dict)  # task of the data -> its loss: {loss: huber, delta: 2}
    precision: PrecisionConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    parallel: ParallelConfig = MISSING
    checkpoint: CheckpointConfig = MISSING
    distill: DistillConfig = field(default_factory=DistillConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    tracking: TrackingConfig = MISSING
    runtime: RuntimeConfig = MISSING


@cache
def register_schema() -> None:
    """Make the schema known to Hydra; YAML files name theirs as `<group>/<name>_schema` in their defaults list."""
    store = ConfigStore.instance()
    store.store(name="config_schema", node=Config)
    for name, model in CONFIGS.items():
        store.store(group="model", name=f"{name}_schema", node=model)
    for source in SOURCES:
        store.store(group="data", name=f"{source.name}_schema", node=source)
    for group, node in {
        "precision": PrecisionConfig,
        "optimizer": OptimizerConfig,
        "parallel": ParallelConfig,
        "checkpoint": CheckpointConfig,
        "tracking": TrackingConfig,
        "runtime": RuntimeConfig,
    }.items():
        store.store(group=group, name=f"{group}_schema", node=node)
