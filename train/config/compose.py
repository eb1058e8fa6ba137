"""From what Hydra composed, or a checkpoint kept, to a configuration in plain dataclasses that has been checked."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from modules.config import check_options, of_earlier
from modules.loss import task_loss
from modules.models import CONFIGS, CustomConfig
from train.config import environment
from train.config.numbers import check_numbers
from train.config.overrides import unknown
from train.config.schema import SOURCES, Config, OptimizerConfig, SyntheticConfig
from train.config.secrets import refuse_secrets


def to_config(composed: DictConfig) -> Config:
    """The composed configuration as plain dataclasses, validated. Errors do not show values of the environment."""
    values = environment.read_by(composed)
    environment.refuse_in_data(composed, values)
    with values.hidden():
        refuse_secrets(OmegaConf.to_container(composed, resolve=False))
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ValueError(f"the configuration leaves {', '.join(missing)} open; give a value, e.g. {missing[0]}=...")
        config = OmegaConf.to_object(composed)
        assert isinstance(config, Config)
        refuse_secrets(dataclasses.asdict(config))
        refuse_unknown(config)
        _say_labels(config)
        validate(config)
    environment.note(config, values)
    return config


def from_dict(saved: dict[str, Any], overrides: list[str]) -> Config:
    """A configuration read back from a checkpoint, with `key=value` overrides of existing keys.

    Raises ValueError for what is saved by no run, or by another version.
    """
    for group in ("model", "data"):
        if not isinstance(saved.get(group), dict) or "name" not in saved[group]:
            raise ValueError(f"the saved configuration has no {group}.name, and is none of a run")
    schema = OmegaConf.structured(Config)
    sources = {node.name: node for node in SOURCES}
    schema.model = OmegaConf.structured(CONFIGS.get(saved["model"]["name"], CustomConfig))
    schema.data = OmegaConf.structured(sources[saved["data"]["name"]])
    kinds = {"model": CONFIGS.get(saved["model"]["name"], CustomConfig), "optimizer": OptimizerConfig}
    saved = saved | {group: of_earlier(kind, saved.get(group) or {}) for group, kind in kinds.items()}
    if saved["data"]["name"] == "events":
        saved = saved | {"data": {"statistics": "none"} | saved["data"]}  # which a run of an earlier version had not
    try:
        known = OmegaConf.merge(schema, saved)
    except OmegaConfBaseException as error:
        raise ValueError(f"the saved configuration is none of this version: {error.full_key}: {error.msg}") from error
    composed = OmegaConf.merge(known, OmegaConf.from_dotlist(overrides))
    assert isinstance(composed, DictConfig)
    for chosen in composed.tasks.values():
        if "of" not in chosen and "." in str(chosen.get("loss")):
            chosen["of"] = "real"  # as it was before runs wrote it down
    return to_config(composed)


def _say_labels(config: Config) -> None:
    """Of losses of one's own: of 0 and 1, unless the data say that the task's labels are real numbers."""
    for task, chosen in config.tasks.items():
        if isinstance(chosen, dict) and "." in str(chosen.get("loss")):
            chosen.setdefault("of", "real" if config.data.has_real_labels(task) else "binary")


def validate(config: Config) -> None:
    """Rules across fields. Raises ValueError naming the key and a value that works."""
    if not 0 < config.data.negative_rate <= 1:
        raise ValueError(
            f"data.negative_rate={config.data.negative_rate} is a share of the negatives: above 0 and at most 1, e.g. "
            "data.negative_rate=0.1"
        )
    for task, chosen in config.tasks.items():
        task_loss(task, chosen)
    for group, section in vars(config).items():
        if group != "tasks":
            check_options(section, group)
    model, data, precision, optimizer = config.model, config.data, config.precision, config.optimizer
    for table, width in model.table_dims.items():
        if width < 4 or width % 4:
            raise ValueError(
                f"model.table_dims.{table}={width} must be a multiple of 4, which the kernels of tables read at once, "
                f"e.g. model.table_dims.{table}={max(4, width // 4 * 4)}"
            )
    if isinstance(data, SyntheticConfig) and len(set(data.tasks)) < len(data.tasks):
        once = ",".join(dict.fromkeys(data.tasks))
        raise ValueError(f"data.tasks={data.tasks} must name each task once, e.g. data.tasks=[{once}]")
    model.check()
    if config.parallel.balance and data.batch_size and data.batch_size % config.parallel.balance:
        raise ValueError(
            f"parallel.balance={config.parallel.balance} must divide data.batch_size={data.batch_size}, so that "
            "ranks get equally many requests, e.g. parallel.balance="
            f"{math.gcd(config.parallel.balance, data.batch_size)}"
        )
    if optimizer.dense != "adamw" and config.parallel.dense != "ddp":
        raise ValueError(
            f"optimizer.dense={optimizer.dense} with parallel.dense={config.parallel.dense}: "
            "an optimiser by its dotted name may need whole matrices; use optimizer.dense=adamw or parallel.dense=ddp"
        )
    if config.parallel.expert_payload != "full" and config.parallel.expert_ranks < 2:
        raise ValueError(
            f"parallel.expert_payload={config.parallel.expert_payload} needs experts on several ranks, between which "
            "tokens travel; use parallel.expert_payload=full, or e.g. parallel.expert_ranks=2"
        )
    if config.parallel.index_dedup and config.parallel.row_precision != "fp32":
        raise ValueError(
            f"parallel.index_dedup=true with parallel.row_precision={config.parallel.row_precision}: the gradients of "
            "an id that occurs often would be added up in bfloat16, where small ones are lost; use "
            "parallel.row_precision=fp32 or parallel.index_dedup=false"
        )
    in_host = [rule for rule in config.parallel.tables if set(rule.kernels or ()) - {"fused"}]
    if config.parallel.table_ranks and in_host:
        raise ValueError(
            f"parallel.table_ranks={config.parallel.table_ranks} with parallel.tables kernels={in_host[0].kernels}: "
            "copies of tables in host memory cannot be averaged; use kernels: [fused] or parallel.table_ranks=0"
        )
    if config.parallel.table_ranks and model.managed_tables:
        raise ValueError(
            f"parallel.table_ranks={config.parallel.table_ranks} with model.managed_tables="
            f"{sorted(model.managed_tables)}: copies would give the same row to different ids; use "
            "parallel.table_ranks=0 or no managed tables"
        )
    if config.parallel.table_average_every > 1 and not config.parallel.table_ranks:
        raise ValueError(
            f"parallel.table_average_every={config.parallel.table_average_every} needs copies of the tables, each on "
            "parallel.table_ranks ranks; use that, e.g. parallel.table_ranks=8, or parallel.table_average_every=1"
        )
    if config.runtime.compile and config.parallel.expert_ranks:
        raise ValueError(
            f"runtime.compile=true with parallel.expert_ranks={config.parallel.expert_ranks}: the exchange of tokens "
            "cannot be compiled; use runtime.compile=false or parallel.expert_ranks=0"
        )
    if config.runtime.cuda_graphs and (refusal := graphs_refusal(config)):
        raise ValueError(f"runtime.cuda_graphs=true with {refusal}")
    if precision.name.startswith("mxfp8") and not precision.quantize:
        raise ValueError(
            f"precision={precision.name} quantises nothing: precision.quantize is empty; "
            'e.g. precision.quantize=["arch.*"]'
        )
    if len(data.split) != 3 or min(data.split) < 0 or data.split[0] == 0 or abs(sum(data.split) - 1) > 1e-6:
        raise ValueError(f"data.split={data.split} must be three fractions of sum 1, e.g. data.split=[0.8,0.1,0.1]")
    if data.max_skipped > 1:
        raise ValueError(f"data.max_skipped={data.max_skipped} is a share of the rows: at most 1, e.g. 0.1")
    if data.id_map == "hash" and (data.min_count > 1 or data.table_min_count):
        raise ValueError(
            f"data.min_count={data.min_count} and data.table_min_count={data.table_min_count} need ids to be counted, "
            "which data.id_map=hash does not do; use data.id_map=vocabulary, or data.min_count=1 and no table_min_count"
        )
    if data.oov_rows and (data.id_map == "hash" or data.min_count < 2):
        raise ValueError(
            f"data.oov_rows={data.oov_rows} are learned from ids that are rare in training, and data.min_count must "
            "say what is rare: e.g. data.id_map=vocabulary data.min_count=2, or use data.oov_rows=0"
        )
    if optimizer.sparse_weight_decay and optimizer.sparse != "rowwise_adagrad":
        raise ValueError(
            f"optimizer.sparse_weight_decay={optimizer.sparse_weight_decay} goes with optimizer.sparse="
            f"rowwise_adagrad; use that, or 0 with optimizer.sparse={optimizer.sparse}"
        )
    if config.runtime.eval_every and (config.runtime.evals_per_epoch or 1) > 1:
        raise ValueError(
            f"runtime.eval_every={config.runtime.eval_every} counts steps and runtime.evals_per_epoch="
            f"{config.runtime.evals_per_epoch} parts of an epoch; use one of them, e.g. runtime.eval_every=0"
        )
    if config.checkpoint.load_partial and config.checkpoint.load_optimizer:
        raise ValueError(
            "checkpoint.load_partial=true takes weights alone, whose moments would be those of another model; use "
            "checkpoint.load_optimizer=false"
        )
    if len(optimizer.betas) != 2:
        raise ValueError(f"optimizer.betas={optimizer.betas} must be two numbers, e.g. optimizer.betas=[0.9,0.999]")
    if optimizer.min_lr > 1:
        raise ValueError(f"optimizer.min_lr={optimizer.min_lr} is a fraction of optimizer.lr: at most 1, e.g. 0.1")
    check_numbers(config)


def graphs_refusal(config: Config) -> str | None:
    """Which key is incompatible with `runtime.cuda_graphs=true`, why, and what works; None if none is."""
    if config.data.negative_rate < 1:
        return (
            f"data.negative_rate={config.data.negative_rate}: the number of candidates differs from batch to batch, so "
            "that no graph is replayed; use runtime.cuda_graphs=false or data.negative_rate=1"
        )
    for task, chosen in config.tasks.items():
        if task_loss(task, chosen).metrics == "next_item":
            return (
                f"tasks.{task}.loss={chosen['loss']}: a step gives the vectors of all places, and reads ids that no "
                "graph gets; use runtime.cuda_graphs=false"
            )
    parallel = config.parallel
    if parallel.dense != "ddp":
        return (
            f"parallel.dense={parallel.dense}: its parameters move in memory, and a graph reads them where they were; "
            "use runtime.cuda_graphs=false or parallel.dense=ddp"
        )
    if parallel.expert_ranks:
        return (
            f"parallel.expert_ranks={parallel.expert_ranks}: the host reads how many tokens each expert got; use "
            "runtime.cuda_graphs=false or parallel.expert_ranks=0"
        )
    if parallel.recompute:
        return (
            f"parallel.recompute={parallel.recompute}: a graph keeps the memory of a forward and a backward; use "
            "runtime.cuda_graphs=false or parallel.recompute=[]"
        )
    if parallel.prefetch_tables:
        return (
            "parallel.prefetch_tables=true: a capture beside the stream that fills caches has not been tried; use "
            "runtime.cuda_graphs=false or parallel.prefetch_tables=false"
        )
    if (dense := config.optimizer.dense) != "adamw":
        return (
            f"optimizer.dense={dense}: only AdamW's step is captured; use runtime.cuda_graphs=false or "
            "optimizer.dense=adamw"
        )
    return config.model.graphs_refusal()


def refuse_unknown(section: object, path: str = "") -> None:
    """ValueError for an attribute below `section` that its dataclass does not have; `path` is its prefix, with the dot.

    Hydra and OmegaConf refuse such keys except after a plus, which Hydra's own message proposes.
    """
    if isinstance(section, dict):
        for name, value in section.items():
            refuse_unknown(value, f"{path}{name}.")
    if not dataclasses.is_dataclass(section):
        return
    known = {field.name for field in dataclasses.fields(section)}
    for name, value in vars(section).items():
        if name not in known:
            raise ValueError(unknown(path.rstrip("."), name, known))
        refuse_unknown(value, f"{path}{name}.")
