"""`from_pretrained` and `save_pretrained`: a model that scores, and that can be trained further."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from modules.config import ModelConfig
from modules.layers.attention.gdpa import GDPAConfig
from modules.layers.embedding.local import LocalEmbedding
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.models import CONFIGS, MODELS, CustomConfig
from modules.models.kunlun import Kunlun
from modules.models.ranking import RankingModel
from modules.pretrained import PretrainedModel, read_description
from tests.modules.factories import random_batch, random_spec
from tests.serving.conftest import Rows
from train.data.reader import RequestReader

SPEC = random_spec(num_events=1)
DCN = MODELS["dcnv2"].Config(dim=8, table_dims={"tag": 4})  # type: ignore[operator]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("pretrained") / "new" / "folder"
    PretrainedModel(DCN, SPEC).save_pretrained(folder)
    return folder


def test_a_folder_gives_the_model_back(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    model = PretrainedModel.from_pretrained(saved)
    assert (model.config, model.spec, model.training) == (DCN, SPEC, False)
    batch = random_batch(SPEC)
    whole = RankingModel(FeatureEmbedding(SPEC, 8, "cpu", DCN.table_dims), MODELS["dcnv2"](SPEC, DCN)).eval()
    whole.load_state_dict(load_file(saved / "model.safetensors"))  # the names of training
    torch.testing.assert_close(model(batch), whole(batch))


def test_it_is_trained_on_and_saved_again(saved: Path, tmp_path: Path) -> None:
    model = PretrainedModel.from_pretrained(saved).train()
    batch = random_batch(SPEC, (3, 2, 4))
    optimizer, before = torch.optim.Adam(model.parameters(), 0.05), load_file(saved / "model.safetensors")

    def loss() -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)

    first = loss().item()
    for _ in range(20):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < first / 4
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(PretrainedModel.from_pretrained(tmp_path)(batch), model.eval()(batch))
    unchanged = load_file(saved / "model.safetensors")
    assert all(torch.equal(unchanged[name], tensor) for name, tensor in before.items())  # though they were mapped


@pytest.mark.parametrize(
    "config",
    [
        Kunlun.Config(pffn_gdpa=GDPAConfig(out_scale=0.5), events={"event0": {"dim": 16}}, head_hidden=[3]),
        *(config() for name, config in CONFIGS.items() if name != "custom"),
        CustomConfig(name="my_models.Tower", dim=8, arguments={"hidden": [4, 2], "deep": {"a": 1}}),
    ],
    ids=lambda config: config.name,
)
def test_configurations_come_back_from_json(config: ModelConfig, tmp_path: Path) -> None:
    about = {"format": 1, "model": dataclasses.asdict(config), "spec": dataclasses.asdict(SPEC)}
    (tmp_path / "config.json").write_text(json.dumps(about))
    assert read_description(tmp_path) == (config, SPEC)


def test_a_folder_that_is_none_is_told_in_words(saved: Path, tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            PretrainedModel.from_pretrained(tmp_path)

    refused("holds no exported model")
    (tmp_path / "config.json").write_text("{}")
    refused(r"config.json is not what save_pretrained writes \(KeyError\('format'\)\)")
    about: dict[str, Any] = json.loads((saved / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | {"format": 7}))
    refused("has format 7, this version reads 1")
    (tmp_path / "config.json").write_text(json.dumps(about | {"model": {**about["model"], "colour": 1}}))
    refused("model.colour is no option; there are ")
    (tmp_path / "config.json").write_text(json.dumps(about))
    refused("model.safetensors cannot be read: ")
    (tmp_path / "model.safetensors").write_bytes(b"\x80\x04 a pickle")
    refused("model.safetensors cannot be read: ")
    save_file({"arch.other": torch.ones(2)}, tmp_path / "model.safetensors")
    refused("model.safetensors is not of the model in config.json: ")


@pytest.mark.reliability("a `config.json` whose model is a foreign class", "refused; nothing is imported")
def test_no_folder_decides_what_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_models.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    about = {"format": 1, "model": {"name": "evil_models.Tower"}, "spec": dataclasses.asdict(SPEC)}
    (tmp_path / "config.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=r"evil_models\.Tower, and no folder decides.*import evil_models first"):
        PretrainedModel.from_pretrained(tmp_path)


def test_tied_and_partial_weights_are_written_whole(tmp_path: Path) -> None:
    model = PretrainedModel(DCN, SPEC)
    first, second = (p for p in model.embedding.parameters() if p.shape[1:] == (8,) and p.shape[0] in (20, 30))
    with torch.no_grad():
        first.set_(torch.randn(60, 8)[10 : 10 + first.shape[0]])
        second.set_(torch.randn(60, 8)[: second.shape[0]])
    batch = random_batch(SPEC)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(PretrainedModel.from_pretrained(tmp_path)(batch), model.eval()(batch))
    assert (tmp_path / "model.safetensors").stat().st_size < 2 * sum(p.nbytes for p in model.parameters())


def test_the_local_embedding_is_torchrec_s(ranking: Rows) -> None:
    spec, batch = ranking.source.spec, ranking.batch([90, 3, 60])
    sharded = FeatureEmbedding(spec, 8, "cpu", {"tags": 4, "item": 12})
    local = LocalEmbedding(spec, 8, "cpu", {"tags": 4, "item": 12})
    assert [(name, p.shape) for name, p in local.state_dict().items()] == [
        (name, p.shape) for name, p in sharded.state_dict().items()
    ]
    local.load_state_dict(sharded.state_dict())
    for expected, actual in zip(tensors(sharded(batch)), tensors(local(batch)), strict=True):
        assert torch.equal(actual, expected)
    for tokens in (local(batch), sharded(batch)):
        torch.stack([tensor.sum() for tensor in tensors(tokens) if tensor.is_floating_point()]).sum().backward()
    for mine, theirs in zip(local.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def tensors(tokens: Any) -> list[torch.Tensor]:
    histories = tokens.histories.values()
    return [tokens.request, tokens.candidate, *(t for s in histories for t in (s.values, s.offsets, s.times))]


def test_a_folder_without_a_reader_is_told_in_words(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no reader.json.*data=events"):
        RequestReader.from_pretrained(saved)


def test_tables_side_by_side_give_the_same_tokens_until_they_are_moved(saved: Path, tmp_path: Path) -> None:
    plain, joined = (PretrainedModel.from_pretrained(saved) for _ in range(2))
    batch, table = random_batch(SPEC, (3, 0, 4)), SPEC.candidate[0].table
    joined.local_embedding.join("cpu")
    joined.save_pretrained(tmp_path)
    assert all(
        torch.equal(value, load_file(saved / "model.safetensors")[name])
        for name, value in load_file(tmp_path / "model.safetensors").items()
    )

    def weight(model: PretrainedModel) -> torch.Tensor:
        return next(value for name, value in model.named_parameters() if f".{table}." in name)

    def check(calls: int) -> None:
        for each in (batch, batch, random_batch(SPEC, (1, 2))):
            with torch.no_grad(), mock.patch.object(torch, "embedding", wraps=torch.embedding) as looked_up:
                assert torch.equal(joined(each), plain(each))
            assert looked_up.call_count - len(list(SPEC.lookups())) == calls

    check(2)  # one for each width
    for model in (plain, joined):  # as a following scorer does it
        with torch.no_grad():
            weight(model).mul_(2)
    check(2)
    for model in (plain, joined):
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}, assign=True)
    check(len(list(SPEC.lookups())))
    joined.local_embedding.join("cpu")
    for model in (plain, joined):
        model(batch).sum().backward()
    torch.testing.assert_close(weight(joined).grad, weight(plain).grad, rtol=0, atol=0)
