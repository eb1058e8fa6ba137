"""What the configuration's rules refuse, each with the key and values that work."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from copy import deepcopy
from itertools import product

import pytest
from omegaconf import ListConfig, OmegaConf

from modules.models.kunlun import KunlunConfig
from train.commands.doctor import ROOT
from train.config.compose import from_dict, to_config
from train.config.files import composed
from train.config.schema import EventsConfig


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+model.table_dims.user=6", "model.table_dims.user=6 must be a multiple of 4, which the kernels of tables"),
        ("optimizer.ema_decay=1", "optimizer.ema_decay=1.0 must be below 1, e.g. optimizer.ema_decay=0.999"),
        ("model.table_std=0", "model.table_std=0.0 must be above 0"),
        ("+data.id_dropout.user=1", "data.id_dropout.user=1.0 must be below 1"),
        ("data.history_dropout=1", "data.history_dropout=1.0 must be below 1, e.g. data.history_dropout=0.1"),
        (
            "optimizer.sparse=sgd optimizer.sparse_weight_decay=0.1",
            "optimizer.sparse_weight_decay=0.1 goes with optimizer.sparse=rowwise_adagrad",
        ),
        ("optimizer.schedule=linear", "optimizer.schedule=linear is not known; choose from cosine, constant,"),
        ("runtime.eval_every=5 runtime.evals_per_epoch=2", "use one of them, e.g. runtime.eval_every=0"),
        (
            "optimizer.dense=torch.optim.NAdam runtime.cuda_graphs=true",
            "use runtime.cuda_graphs=false or optimizer.dense=adamw",
        ),
        ("runtime.steps=-1", "runtime.steps=-1 must be at least 0, e.g. runtime.steps=0"),
        ("data.prefetch=0", "data.prefetch=0 must be at least 1, e.g. data.prefetch=1"),
        ("optimizer.sparse_lr=-0.1", "optimizer.sparse_lr=-0.1 must be at least 0"),
        ("model.pffn=mlp", "model.pffn=mlp is not known; choose from linear, gdpa"),
        (
            "model.pffn_gdpa.activation=mish",
            "model.pffn_gdpa.activation=mish is not known; choose from gelu",
        ),
        (
            "model.attention_gdpa.activation=[relu,silu,gelu]",
            "must be one name or model.num_heads=2 of them, e.g. model.attention_gdpa.activation=[relu,relu]",
        ),
        ("model.moe.bias_update_rate=-0.001", "model.moe.bias_update_rate=-0.001 must be at least 0"),
        ("data=synthetic data.num_categories=0", "data.num_categories=0 must be at least 1"),
        ("model.head_hidden=[16,0]", "model.head_hidden=[16, 0] must be at least 1, e.g. model.head_hidden=[1, 1]"),
        ("data.split=[1.1,-0.1,0]", "must be three fractions of sum 1, e.g. data.split=[0.8,0.1,0.1]"),
        ("parallel.sharding_types=[row_wise,data_parallel]", "choose from table_wise, row_wise, column_wise"),
        ("parallel.sharding_types=[]", "choose from table_wise, row_wise, column_wise"),
        (
            "data.negative_rate=0",
            "data.negative_rate=0.0 is a share of the negatives: above 0 and at most 1, e.g. data",
        ),
        (
            "data=criteo_kaggle data.id_map=hash",
            "use data.id_map=vocabulary or data.min_count=1",
        ),
        ("data.oov_rows=4", "e.g. data.id_map=vocabulary data.min_count=2, or use data.oov_rows=0"),
        ("data.oov_rows=4 data.id_map=hash", "data.oov_rows=4 are learned from ids that are rare in training"),
        ("tracking.top_k=[5,0]", "tracking.top_k=[5, 0] must be at least 1, e.g. tracking.top_k=[1, 1]"),
        ("data.negative_rate=2", "data.negative_rate=2.0 is a share of the negatives"),
        ("data.negative_rate=0.1 runtime.cuda_graphs=true", "use runtime.cuda_graphs=false or data.negative_rate=1"),
        (
            "model=sasrec +tasks.click.loss=bpr runtime.cuda_graphs=true",
            "runtime.cuda_graphs=true with tasks.click.loss=bpr: a step gives the vectors of all places",
        ),
        ("model=din runtime.cuda_graphs=true", "runtime.cuda_graphs=true with model=din: its sizes are read from"),
        ("model.sequence_context=candidate runtime.cuda_graphs=true", "or model.sequence_context=request"),
        ("optimizer.betas=[0.9,1]", "optimizer.betas=[0.9, 1.0] must be below 1, e.g. optimizer.betas=[0.9, 0.999]"),
        ("optimizer.betas=[-0.9,0.999]", "optimizer.betas=[-0.9, 0.999] must be at least 0"),
        ("+optimizer.task_weights.like=-1", "optimizer.task_weights.like=-1.0 must be at least 0, e.g. optimizer"),
        ("+data.history_scale.click=-3 data=synthetic", "data.history_scale.click=-3.0 must be at least 0"),
        ("data=synthetic data.mean_history=0", "data.mean_history=0.0 must be above 0, e.g. data.mean_history=20"),
        ("data=synthetic data.num_items=0", "data.num_items=0 must be above 0"),
        ("data=synthetic data.history_sigma=1e9", "data.history_sigma=1000000000.0 must be at most 10, e.g. "),
        ("+model.managed_tables={item:{min_count:2}}", "managed_tables.item.rows=0 must be at least 2, e.g. "),
        (
            "parallel.table_ranks=2 +model.managed_tables={item:{rows:8}}",
            "copies would give the same row to different ids; use parallel.table_ranks=0",
        ),
        ("parallel.table_average_every=4", "needs copies of the tables, each on parallel.table_ranks ranks"),
        (
            "parallel.table_ranks=8 parallel.tables=[{match:[item],kernels:[fused_uvm]}]",
            "copies of tables in host memory cannot be averaged; use kernels: [fused] or parallel.table_ranks=0",
        ),
        (
            "parallel.index_dedup=true parallel.row_precision=bf16",
            "parallel.row_precision=fp32 or parallel.index_dedup=f",
        ),
        ("parallel.hbm_gib=0", "parallel.hbm_gib=0.0 must be above 0, e.g. parallel.hbm_gib=64"),
        ("runtime.collective_timeout=1e12", "must be at most 1000000000, e.g. runtime.collective_timeout=600.0"),
        ("runtime.seed=99999999999999999999", "runtime.seed=99999999999999999999 must be at most 9223372036854775807"),
        ("data.num_workers=100000", "data.num_workers=100000 must be at most 1024, e.g. data.num_workers=1"),
        ("data.batch_size=100000000", "data.batch_size=100000000 must be at most 16777216, e.g. data.batch_size=256"),
        ("data=synthetic data.tasks=[a,a]", "must name each task once, e.g. data.tasks=[a]"),
        (
            "model=kunlun model.layers=[{},{dim:8}]",
            "model.layers.1.dim is no key of a layer; set model.dim for all, or",
        ),
        ("model=kunlun model.layers=[{window:wide},{}]", "model.layers.0.window=wide must be of type int, e.g. model"),
        (
            "+experiment=kunlun_h200 model.layers=[{},{}]",
            "model.layers has 2 entries, one a layer, and model.num_layers=4; leave out one of the two, or use",
        ),
        ("model=gem model.layers=[{pffn_gdpa:{out_scale:inf}}]", "model.layers.0.pffn_gdpa.out_scale=inf must be fin"),
    ],
)
def test_a_value_that_cannot_work_is_refused(override: str, message: str) -> None:
    whole = composed(override.split())
    with pytest.raises(ValueError, match=re.escape(message)):
        to_config(whole)


REAL = ("float", "float | None", "SettledShare", "list[float]", "dict[str, float]")
WHOLE = ("int", "int | None", "Settled", "Optional[int]", "dict[str, int]")


def number_keys(section: object, kinds: tuple[str, ...], prefix: str = "") -> list[str]:
    """Every key below a section that takes a number of these types."""
    keys = []
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        value, key = getattr(section, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            keys += number_keys(value, kinds, f"{key}.")
        elif field.type in kinds:
            keys.append(f"{key}.name" if str(field.type).startswith("dict") else key)
    return keys


@pytest.mark.parametrize("data", [("data=synthetic",), ("data=avazu", "data.files=[a.csv]")])
def test_a_number_that_is_not_finite_is_refused(data: tuple[str, ...]) -> None:
    good = composed(data)
    keys = number_keys(to_config(good), REAL)
    assert {"optimizer.sparse_lr", "optimizer.betas", "optimizer.task_weights.name", "data.split"} <= set(keys)
    for key, number in product(keys, (math.nan, math.inf, -math.inf)):
        bad = deepcopy(good)
        default = OmegaConf.select(bad, key)
        OmegaConf.update(
            bad, key, [number, *default[1:]] if isinstance(default, ListConfig) else number, force_add=True
        )
        with pytest.raises(ValueError, match=re.escape(key) + "=.* (must|is) .*e.g. "):
            to_config(bad)


def test_a_whole_number_that_no_machine_holds_is_refused() -> None:
    good = composed(["data=avazu", "data.files=[a.csv]"])
    keys = number_keys(to_config(good), WHOLE)
    assert {"data.request_window", "data.max_candidates", "data.min_count", "runtime.seed"} <= set(keys)
    for key in (key for key in keys if not key.startswith("model.")):  # models have rules of their own
        bad = deepcopy(good)
        OmegaConf.update(bad, key, 10**25, force_add=True)
        with pytest.raises(ValueError, match=rf"{re.escape(key)}=1{'0' * 25} "):
            to_config(bad)


def test_numbers_of_other_classes_and_columns_may_be_any() -> None:
    to_config(composed(["model=custom", "model.name=my.Model", "+model.arguments={cap: .inf, least: -1}"]))
    where = "+data.histories={low: {fields: [site_id], where: {site_id: [-1]}}}"
    to_config(composed(["data=avazu", "data.files=[a.csv]", "+data.missing_fill.x=-1", "data.user=device_id", where]))


def test_layers_are_lists_on_the_command_line_and_in_what_a_run_has_saved() -> None:
    """As the documentation writes them; a checkpoint of before has no list, or an empty one."""
    page = (ROOT / "docs/kunlun.md").read_text(encoding="utf-8")
    of_model, of_events = re.findall(r"'(\+?model\.(?:layers|events)=[^']+)'", page)
    for override, depth in ((of_model, 3), (of_events, 2)):
        config = to_config(composed(["model=kunlun", "data=synthetic", override]))
        assert isinstance(config.model, KunlunConfig)
        assert config.model.num_layers == len(config.model.layers or config.model.events["click"]["layers"]) == depth
        saved = json.loads(json.dumps(dataclasses.asdict(config)))
        assert from_dict(saved, []).model == config.model
    equal = to_config(composed(["model=interformer", "data=synthetic", "model.num_layers=3"]))
    saved = json.loads(json.dumps(dataclasses.asdict(equal)))
    assert from_dict({**saved, "model": {**saved["model"], "layers": []}}, []).model.describe_layers() == []
    del saved["model"]["layers"]
    assert from_dict(saved, []).model == equal.model


def test_a_run_of_an_earlier_version_has_no_statistics() -> None:
    config = to_config(composed(["data=events", "data.files=[rows.csv]", "+data.labels={click: click}"]))
    saved = json.loads(json.dumps(dataclasses.asdict(config)))
    assert saved["data"].pop("statistics") == "auto"
    assert getattr(from_dict(saved, []).data, "statistics", None) == "none"


def test_wrong_keys_of_a_trained_run_are_named() -> None:
    saved = json.loads(json.dumps(dataclasses.asdict(to_config(composed(["model=dlrm", "data=synthetic"])))))
    for override, message in {
        "splt=test": "splt is no key of the configuration; there are checkpoint, data",
        "data.num_itms=3": "data.num_itms is no key of the configuration; did you mean data.num_items?",
        "model.dim=wide": "model.dim: Value 'wide' of type 'str' could not be converted to Integer",
        "tracking.metrics=[": "while parsing a flow node",
        "tracking.metrics=x": "tracking.metrics: must be a list, e.g. [a] or [a, b]",
        "data=shop": "a section takes keys, as in data.batch_size=64",
    }.items():
        with pytest.raises(ValueError, match="^" + re.escape(f"{override}: {message}")):
            from_dict(saved, [override])


def test_tables_of_names_grow_on_the_command_line_as_the_documentation_says() -> None:
    added = ["+data.labels.good='stars >= 4'", "+data.missing_fill.price=0"]
    event_type = "+data.histories={cart: {fields: [item_id]}}"
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    assert all(override in page for override in (*added, event_type))
    data = to_config(composed(["data=taobao_ad", "data.root=/data", *added, event_type])).data
    assert isinstance(data, EventsConfig)
    assert data.labels.keys() == {"click", "good"}
    assert data.histories["cart"].fields == ["item_id"]
    assert data.missing_fill == {"price": 0}


def test_a_loss_of_one_s_own_is_of_the_labels_that_the_data_have() -> None:
    own = {"loss": "torch.nn.functional.soft_margin_loss"}

    def of(*overrides: str) -> str:
        config = to_config(composed([*overrides, f"+tasks.like.loss={own['loss']}"]))
        saved = dataclasses.asdict(config)
        assert from_dict(saved, []).tasks == config.tasks
        saved["tasks"] = {"like": own}  # as runs had it before they said what it is of
        assert from_dict(saved, []).tasks["like"]["of"] == "real"
        return str(config.tasks["like"]["of"])

    assert of() == of("+tasks.like.of=binary") == "binary"
    assert of("data=ml1m", "+data.real_labels=[like]") == of("+tasks.like.of=real") == "real"
