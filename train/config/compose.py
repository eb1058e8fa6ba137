"""From what Hydra composed, or a checkpoint kept, to a configuration in plain dataclasses that has been checked."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from omegaconf import DictConfig, OmegaConf

from train.config.numbers import check_numbers
from train.config.schema import MODELS, SOURCES, Config, CustomConfig, DINConfig, InterFormerConfig

CHOICES = {
    "model.gate": ("identity", "sigmoid", "tanh"),
    "model.interaction": ("dhen", "wukong"),
    "model.pffn": ("linear", "gdpa"),
    "model.sequence_attention": ("softmax", "gdpa"),
    "model.feed_forward": ("none", "dense", "moe"),
    "model.sequence_context": ("request", "candidate"),
    "model.moe.score": ("softmax", "sigmoid"),
    "data.id_map": ("vocabulary", "hash"),
    "data.bad_rows": ("raise", "skip"),
    "precision.name": ("auto", "fp32", "bf16", "mxfp8", "mxfp8_g128"),
    "optimizer.dense": ("adamw", "muon"),
    "optimizer.sparse": ("rowwise_adagrad", "adam", "sgd"),
    "optimizer.sparse_weight_decay_mode": ("decoupled", "l2"),
    "optimizer.schedule": ("cosine", "constant", "wsd"),
    "parallel.comm_precision": ("fp32", "bf16"),
    "parallel.sharding_types": ("table_wise", "row_wise", "column_wise"),  # to TorchRec an empty list means any kind
    "tracking.wandb": ("auto", "online", "offline", "disabled"),
    "tracking.progress": ("auto", "always", "never"),
    "runtime.device": ("auto", "cpu", "cuda"),
    "runtime.bad_batch": ("skip", "stop"),
}
AT_LEAST_ONE = (
    "model.dim", "model.num_layers", "model.num_heads", "model.num_cls", "model.num_pma", "model.num_recent",
    "model.dhen_layers", "model.wukong_layers", "model.wukong_fmb", "model.wukong_lcb", "model.wukong_rank",
    "model.pffn_hidden", "model.interaction_hidden", "model.head_hidden", "model.attention_hidden", "model.hidden",
    "model.bottom_hidden", "model.top_hidden", "data.batch_size", "data.prefetch", "data.max_history",
    "data.max_candidates", "data.num_users", "data.num_categories", "data.candidates", "optimizer.accumulate",
    "checkpoint.keep", "tracking.top_k", "runtime.epochs", "runtime.evals_per_epoch",
    "runtime.log_every", "runtime.collective_timeout",
)  # fmt: skip


def to_config(composed: DictConfig) -> Config:
    """The composed configuration as plain dataclasses, validated."""
    missing = sorted(OmegaConf.missing_keys(composed))
    if missing:
        raise ValueError(f"the configuration leaves {', '.join(missing)} open; give a value, e.g. {missing[0]}=...")
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    refuse_unknown(config)
    validate(config)
    return config


def from_dict(saved: dict[str, Any], overrides: list[str]) -> Config:
    """A configuration read back from a checkpoint, with `key=value` overrides of existing keys."""
    schema = OmegaConf.structured(Config)
    models, sources = ({node.name: node for node in nodes} for nodes in (MODELS, SOURCES))
    schema.model = OmegaConf.structured(models.get(saved["model"]["name"], CustomConfig))
    schema.data = OmegaConf.structured(sources[saved["data"]["name"]])
    composed = OmegaConf.merge(schema, saved, OmegaConf.from_dotlist(overrides))
    assert isinstance(composed, DictConfig)
    return to_config(composed)


def validate(config: Config) -> None:
    """Rules across fields. Raises ValueError naming the key and a value that works."""
    for key, allowed in CHOICES.items():
        values = value if isinstance(value := _get(config, key), list) else [value]
        if not values or not set(values) <= {None, *allowed}:
            raise ValueError(f"{key}={value} is not known; choose from {', '.join(allowed)}")
    if not 0 < config.data.negative_rate <= 1:
        raise ValueError(
            f"data.negative_rate={config.data.negative_rate} is a share of the negatives: above 0 and at most 1, e.g. "
            "data.negative_rate=0.1"
        )
    sections = vars(config) | ({"model.moe": config.model.moe} if isinstance(config.model, InterFormerConfig) else {})
    for group, section in sections.items():
        for name, value in vars(section).items():
            key = f"{group}.{name}"
            least = 1 if key in AT_LEAST_ONE else 0
            numbers = value if isinstance(value, list) and key in AT_LEAST_ONE else [value]
            if min((each for each in numbers if isinstance(each, int | float)), default=least) < least:
                example = [least] * len(numbers) if isinstance(value, list) else least
                raise ValueError(f"{key}={value} must be at least {least}, e.g. {key}={example}")
    model, data, precision, optimizer = config.model, config.data, config.precision, config.optimizer
    for table, width in model.table_dims.items():
        if width < 4 or width % 4:
            raise ValueError(
                f"model.table_dims.{table}={width} must be a multiple of 4, which the kernels of tables read at once, "
                f"e.g. model.table_dims.{table}={max(4, width // 4 * 4)}"
            )
    if isinstance(model, InterFormerConfig):
        if model.dim % (2 * model.num_heads):
            pairs = 2 * model.num_heads
            raise ValueError(
                f"model.dim={model.dim} must be a multiple of 2 * model.num_heads={pairs} (rotary positions turn "
                f"pairs), e.g. model.dim={pairs * max(1, model.dim // pairs)}"
            )
        if model.feed_forward == "moe" and not 1 <= model.moe.top_k <= model.moe.num_experts:
            raise ValueError(
                f"model.moe.top_k={model.moe.top_k} must lie in 1..model.moe.num_experts={model.moe.num_experts}"
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
    below_one = (
        ("model.dropout", 0.1), ("model.embedding_dropout", 0.1), ("data.history_dropout", 0.1),
        ("parallel.reserve", 0.1), ("optimizer.ema_decay", 0.999),
    )  # fmt: skip
    for key, works in below_one:
        if _get(config, key) >= 1:
            raise ValueError(f"{key}={_get(config, key)} must be below 1, e.g. {key}={works}")
    for table, share in data.id_dropout.items():
        if not 0 <= share < 1:
            raise ValueError(
                f"data.id_dropout.{table}={share} is a share of ids: at least 0 and below 1, e.g. "
                f"data.id_dropout.{table}=0.1"
            )
    if model.table_std is not None and model.table_std <= 0:
        raise ValueError(
            f"model.table_std={model.table_std} must be above 0, since tables of zeros learn nothing where they are "
            "multiplied, e.g. model.table_std=0.01"
        )
    if optimizer.sparse_weight_decay and optimizer.sparse != "rowwise_adagrad":
        raise ValueError(
            f"optimizer.sparse_weight_decay={optimizer.sparse_weight_decay} goes with optimizer.sparse="
            f"rowwise_adagrad; use that, or 0 with optimizer.sparse={optimizer.sparse}"
        )
    if not 0 < optimizer.decay_share <= 1:
        raise ValueError(
            f"optimizer.decay_share={optimizer.decay_share} is a share of the steps: above 0 and at most 1, e.g. 0.2"
        )
    if config.runtime.eval_every and config.runtime.evals_per_epoch > 1:
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
    model = config.model
    if config.data.negative_rate < 1:
        return (
            f"data.negative_rate={config.data.negative_rate}: the number of candidates differs from batch to batch, so "
            "that no graph is replayed; use runtime.cuda_graphs=false or data.negative_rate=1"
        )
    if config.optimizer.dense == "muon":
        return (
            "optimizer.dense=muon: torch.optim.Muon cannot be captured; use runtime.cuda_graphs=false or "
            "optimizer.dense=adamw"
        )
    if isinstance(model, DINConfig):
        return "model=din: its sizes are read from the device; use runtime.cuda_graphs=false"
    if not isinstance(model, InterFormerConfig):
        return None
    if model.sequence_context == "candidate":
        return (
            "model.sequence_context=candidate: its sizes are read from the device; use runtime.cuda_graphs=false or "
            "model.sequence_context=request"
        )
    if model.feed_forward == "moe" and model.moe.aux_loss_weight:
        return (
            f"model.moe.aux_loss_weight={model.moe.aux_loss_weight} gives that no gradient; use "
            "runtime.cuda_graphs=false, or balance by model.moe.bias_update_rate with aux_loss_weight=0"
        )
    return None


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
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {path}{close[0]}?" if close else f"there are {', '.join(sorted(known))}"
            raise ValueError(f"{path}{name} is no key of the configuration; {hint}")
        refuse_unknown(value, f"{path}{name}.")


def _get(config: object, key: str) -> Any:
    """Value at a dotted key, or None where this kind of model or data has no such key."""
    for name in key.split("."):
        config = getattr(config, name, None)
    return config
