"""`model.layers` in every model that is a stack: what equals `num_layers`, what differs, what is refused."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any, cast

import pytest
import torch
from torch import nn

from modules.config import StackConfig, from_saved
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.models import CONFIGS, build
from tests.modules.factories import random_batch, random_spec
from tests.modules.models import test_sequential as next_items

STACKS = {name: kind for name, kind in CONFIGS.items() if issubclass(kind, StackConfig)}
OF_ITEMS = ("sasrec", "hstu")


def made(name: str, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    spec = next_items.SPEC if name in OF_ITEMS else random_spec()
    return build(STACKS[name](dim=8, **changes), spec).eval()


def test_the_models_of_layers_are_these() -> None:
    ranking = {"interformer", "kunlun", "wukong", "gem", "token_mixing", "onetrans", "ultra_hstu"}
    assert set(STACKS) == ranking | {*OF_ITEMS}


@pytest.mark.parametrize("kind", CONFIGS.values())
def test_a_default_is_that_of_the_nearest_class_that_states_it(kind: Any) -> None:
    """Of two bases a dataclass takes all fields of the first one, also those that it only inherited."""
    for field in dataclasses.fields(kind):
        stated = next(base for base in kind.__mro__ if field.name in inspect.get_annotations(base))
        assert field.default == cast("Any", stated).__dataclass_fields__[field.name].default, field.name


@pytest.mark.parametrize("name", STACKS)
def test_a_list_of_equal_entries_is_as_many_layers_bit_for_bit(name: str) -> None:
    config = STACKS[name](dim=8, num_layers=3)
    equal = made(name, num_layers=3).state_dict()
    for layers in ([{}] * 3, [{"dropout": config.dropout}, {}, {}]):
        assert STACKS[name](dim=8, layers=layers).of_layers() == config.of_layers()
        listed = made(name, layers=layers).state_dict()
        assert list(equal) == list(listed)
        assert all(torch.equal(tensor, listed[key]) for key, tensor in equal.items())


@pytest.mark.parametrize("name", STACKS)
def test_a_list_says_how_many_layers_there_are_and_without_one_the_model_does(name: str) -> None:
    kind = STACKS[name]
    assert kind(layers=[{}] * 5).num_layers == 5
    # As earlier versions saved "no list".
    for none in (None, []):
        assert kind(layers=none).num_layers == kind.usual_layers
        assert kind(layers=none, num_layers=4).of_layers() == [kind(num_layers=4, layers=none)] * 4
    assert kind(layers=[{}] * 5).describe_layers() == []


@pytest.mark.parametrize(
    ("name", "key"),
    [("gem", "num_fmb"), ("kunlun", "expert_fmb"), ("wukong", "num_fmb"), ("interformer", "wukong_fmb")],
)
def test_layers_that_earlier_versions_saved_have_their_keys_where_they_are_now(name: str, key: str) -> None:
    saved = {"name": name, "layers": [{key: 3}, {}]}
    read = from_saved(STACKS[name], saved, "model")
    assert [layer.wukong.num_fmb for layer in read.of_layers()] == [3, STACKS[name]().wukong.num_fmb]
    assert saved["layers"] == [{key: 3}, {}]


def test_event_types_have_no_keys_of_before_with_an_effect() -> None:
    saved = {"events": {"click": {"layers": [{"shared_kv": True}, {}]}}}
    assert from_saved(STACKS["kunlun"], saved, "model").events == {"click": {"layers": [{}, {}]}}
    saved["events"]["click"]["layers"][0]["shared_kv"] = False
    with pytest.raises(ValueError, match=r"model\.events\.click\.layers\.shared_kv=False was saved by an earlier"):
        from_saved(STACKS["kunlun"], saved, "model")


@pytest.mark.parametrize("name", STACKS)
def test_a_saved_list_is_read_back(name: str) -> None:
    config = STACKS[name](layers=[{"dropout": 0.1}, {}, {"dropout": 0}])
    again = from_saved(STACKS[name], json.loads(json.dumps(dataclasses.asdict(config))), "model")
    assert again == config
    assert [layer.dropout for layer in again.of_layers()] == [0.1, config.dropout, 0]
    # Kunlun's go on with what the layer computes.
    for text, own in zip(again.describe_layers(), ["dropout=0.1", "", "dropout=0"], strict=True):
        assert text.startswith(own)


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_layers": 2, "layers": [{}] * 3},
            r"model\.layers has 3 entries, one a layer, and model\.num_layers=2; .* model\.num_layers=3",
        ),
        (
            {"layers": [{}, {"dim": 16}]},
            r"model\.layers\.1\.dim is no key of a layer; set model\.dim for all, or choose from .*dropout",
        ),
        ({"layers": [{"layers": []}, {}]}, r"model\.layers\.0\.layers is no key of a layer"),
        ({"layers": [{}, {"dropuot": 0.1}]}, r"model\.layers\.1\.dropuot is no key of a layer; did you mean dropout\?"),
        ({"layers": [{}, {"zzz": 1}]}, r"model\.layers\.1\.zzz is no key of a layer; choose from .*dropout"),
        ({"layers": [{"dropout": 1.0}, {}]}, r"model\.layers\.0\.dropout=1\.0 must be below 1, e\.g\. .*dropout=0\.1"),
        ({"layers": [{"dropout": "much"}, {}]}, r"model\.layers\.0\.dropout=much must be of type float, e\.g\. model"),
        ({"layers": [{"dropout": None}, {}]}, r"model\.layers\.0\.dropout=null must be a number"),
        ({"layers": [{"dropout": True}, {}]}, r"model\.layers\.0\.dropout=True must be of type float"),
        ({"layers": [{}, None]}, r"model\.layers\.1=None must be a mapping of keys to values; \{\} where nothing diff"),
        ({"num_layers": 0}, r"model\.num_layers=0 must be at least 1, e\.g\. model\.num_layers=2"),
    ],
)
def test_what_no_layer_can_have_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(name, **changes)


def test_keys_of_dataclasses_and_lists_are_checked_for_their_types() -> None:
    wrong: list[tuple[str, dict[str, Any], str]] = [
        ("kunlun", {"pffn_gdpa": {"qk_norm": 1}}, r"layers\.0\.pffn_gdpa\.qk_norm=1 must be of type bool"),
        ("kunlun", {"pffn_gdpa": "silu"}, r"layers\.0\.pffn_gdpa=silu must be of type GDPAConfig, e\.g\. .*=\{\}"),
        (
            "kunlun",
            {"head_hidden": "wide"},
            r"layers\.0\.head_hidden is no key of a layer; set model\.head_hidden for all",
        ),
        ("wukong", {"hidden": [8, "wide"]}, r"layers\.0\.hidden=\[8, 'wide'\] must be of type list"),
        ("wukong", {"wukong": {"rank": True}}, r"0\.wukong\.rank=True must be of type int, e\.g\. .*\.wukong\.rank=8"),
    ]
    for name, entry, message in wrong:
        with pytest.raises(ValueError, match=message):
            made(name, layers=[entry, {}])


@pytest.mark.parametrize("name", OF_ITEMS)
def test_layers_of_next_item_models_differ_and_learn(name: str) -> None:
    own = {"sasrec": {"feed_forward_dim": 12}, "hstu": {"time_buckets": 4, "position_bias": False}}[name]
    model, batch = made(name, dropout=0.0, layers=[{"num_heads": 4}, own]).train(), next_items.batch()
    first, second = ({key: p.shape for key, p in layer.named_parameters()} for layer in model.layers)  # type: ignore[misc,union-attr]
    assert first != second
    embedding = FeatureEmbedding(next_items.SPEC, 8, "cpu")
    logits = model(embedding(batch), batch)
    twin = batch.expand()
    torch.testing.assert_close(model(embedding(twin), twin), logits)
    logits.square().sum().backward()
    assert [key for key, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


def test_heads_of_a_layer_turn_by_angles_of_their_own_width() -> None:
    batch = random_batch(random_spec(), lengths=[5] * 5)
    for name in ("interformer", "kunlun", "gem"):
        embedding = FeatureEmbedding(random_spec(), 8, "cpu")
        logits = []
        for layers in ([{}] * 2, [{"num_heads": 4}, {"num_heads": 1}]):
            model = made(name, layers=layers)
            logits.append(model(embedding(batch), batch))
        assert (logits[0] - logits[1]).abs().max() > 1e-4
