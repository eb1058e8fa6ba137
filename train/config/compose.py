"""From what Hydra composed, or a checkpoint kept, to a configuration in plain dataclasses that has been checked."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from modules.config import check_options, of_earlier, refuse
from modules.loss import task_loss
from modules.models import CONFIGS, CustomConfig
from train.config import environment
from train.config.files import merge_error
from train.config.numbers import check_numbers
from train.config.overrides import unknown
from train.config.schema import SOURCES, Config
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
    sources = {node.name: node for node in SOURCES}
    kinds = get_type_hints(Config) | {
        "model": CONFIGS.get(saved["model"]["name"], CustomConfig),
        "data": sources[saved["data"]["name"]],
    }
    schema = OmegaConf.structured(Config)
    schema.model, schema.data = (OmegaConf.structured(kinds[group]) for group in ("model", "data"))
    sections = {name: part for name, part in saved.items() if dataclasses.is_dataclass(kinds.get(name)) and part}
    saved = saved | {name: of_earlier(kinds[name], part, name) for name, part in sections.items()}
    if saved["data"]["name"] == "events":
        saved = saved | {"data": {"statistics": "none"} | saved["data"]}  # which a run of an earlier version had not
    try:
        known = OmegaConf.merge(schema, saved)
    except OmegaConfBaseException as error:
        raise ValueError(f"the saved configuration is none of this version: {error.full_key}: {error.msg}") from error
    composed = known
    for text in overrides:
        try:
            composed = OmegaConf.merge(composed, OmegaConf.from_dotlist([text]))
        except (OmegaConfBaseException, YAMLError) as error:
            raise ValueError(f"{text}: {merge_error(error, str(error))}") from error
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
    """Rules of each section, beside its fields, and those that join sections. Raises ValueError naming the key and a
    value that works."""
    for task, chosen in config.tasks.items():
        task_loss(task, chosen)
    for group, section in vars(config).items():
        if group != "tasks":
            check_options(section, group)
    model, optimizer, parallel, runtime = config.model, config.optimizer, config.parallel, config.runtime
    model.check()
    requests = config.data.batch_size
    refuse(
        parallel.balance and requests and requests % parallel.balance,
        f"parallel.balance={parallel.balance} must divide data.batch_size={requests}, so that ranks get equally "
        f"many requests, e.g. parallel.balance={math.gcd(parallel.balance, requests or 0)}",
    )
    refuse(
        optimizer.dense != "adamw" and parallel.dense != "ddp",
        f"optimizer.dense={optimizer.dense} with parallel.dense={parallel.dense}: an optimiser by its dotted name "
        "may need whole matrices; use optimizer.dense=adamw or parallel.dense=ddp",
    )
    refuse(
        parallel.table_ranks and model.managed_tables,
        f"parallel.table_ranks={parallel.table_ranks} with model.managed_tables={sorted(model.managed_tables)}: "
        "copies would give the same row to different ids; use parallel.table_ranks=0 or no managed tables",
    )
    refuse(
        runtime.compile and parallel.expert_ranks,
        f"runtime.compile=true with parallel.expert_ranks={parallel.expert_ranks}: the exchange of tokens cannot "
        "be compiled; use runtime.compile=false or parallel.expert_ranks=0",
    )
    if runtime.cuda_graphs and (refusal := graphs_refusal(config)):
        raise ValueError(f"runtime.cuda_graphs=true with {refusal}")
    check_numbers(config)


def graphs_refusal(config: Config) -> str | None:
    """Which key is incompatible with `runtime.cuda_graphs=true`, why, and what works; None if none is."""
    data, parallel, dense = config.data, config.parallel, config.optimizer.dense
    of_next = [task for task, chosen in config.tasks.items() if task_loss(task, chosen).metrics == "next_item"]
    key = f"tasks.{of_next[0]}.loss" if of_next else ""
    instead = "use runtime.cuda_graphs=false"
    rules = (
        (
            data.negative_rate < 1,
            f"data.negative_rate={data.negative_rate}: the number of candidates differs from batch to batch, so that "
            f"no graph is replayed; {instead} or data.negative_rate=1",
        ),
        (
            of_next,
            f"{key}={config.tasks[of_next[0]]['loss'] if of_next else ''}: a step gives the vectors of all places, and "
            f"reads ids that no graph gets; {instead}",
        ),
        (
            parallel.dense != "ddp",
            f"parallel.dense={parallel.dense}: its parameters move in memory, and a graph reads them where they were; "
            f"{instead} or parallel.dense=ddp",
        ),
        (
            parallel.expert_ranks,
            f"parallel.expert_ranks={parallel.expert_ranks}: the host reads how many tokens each expert got; {instead} "
            "or parallel.expert_ranks=0",
        ),
        (
            parallel.recompute,
            f"parallel.recompute={parallel.recompute}: a graph keeps the memory of a forward and a backward; {instead} "
            "or parallel.recompute=[]",
        ),
        (
            parallel.prefetch_tables,
            "parallel.prefetch_tables=true: a capture beside the stream that fills caches has not been tried; "
            f"{instead} or parallel.prefetch_tables=false",
        ),
        (
            dense != "adamw",
            f"optimizer.dense={dense}: only AdamW's step is captured; {instead} or optimizer.dense=adamw",
        ),
    )
    return next((text for when, text in rules if when), None) or config.model.graphs_refusal()


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
