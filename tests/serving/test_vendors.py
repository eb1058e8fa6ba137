"""Exports of models that read vendors score requests, whatever the order of their candidates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from modules.config import ModelConfig
from modules.models.baselines import DIN, DCNv2
from modules.pretrained import PretrainedModel
from tests.serving.conftest import Rows
from train.commands.score import latencies
from train.data import build_source
from train.serving.scorer import Scorer, _given_to_last
from train.serving.service import Service
from train.speedup.graphs import _inputs_of_arch

Export = Callable[[ModelConfig, Rows], tuple[Path, PretrainedModel]]
CONFIGS: dict[str, ModelConfig] = {
    "dcnv2": DCNv2.Config(dim=8),
    "din": DIN.Config(dim=8, hidden=[16]),
}


@pytest.fixture(scope="module")
def sold(ranking: Rows, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Requests with several candidates, of sellers in two countries."""
    folder = str(tmp_path_factory.mktemp("sold"))  # whose name tells its exports from those of `ranking`
    files = [f"{ranking.config.root}/rows.parquet"]
    config = dataclasses.replace(
        ranking.config, root=folder, cache_dir=folder, files=files, request_window=20_000,
        request_categorical=["user"], vendor="country", vendor_categorical=["country"],
    )  # fmt: skip
    rows = Rows(ranking.rows, config, build_source(config))
    batch = rows.source.batch("train", np.arange(rows.source.num_requests("train")))
    assert batch.vendors is not None
    assert batch.num_requests < batch.vendors.num_vendors < batch.num_candidates
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_requests_are_scored_as_by_the_model(name: str, sold: Rows, exported: Export) -> None:
    folder, model = exported(CONFIGS[name], sold)
    service = Service.from_pretrained(folder)
    assert service.scorer.traced == (name != "din")
    numbers = [9, 0, 4]
    with torch.no_grad():
        expected = model(sold.batch(numbers)).sigmoid()[:, 0].tolist()
    requests = [sold.request(number) for number in numbers]
    scores = [value for each in service(requests) for value in each["click"]]
    assert scores == pytest.approx(expected, abs=1e-5)
    scores = [value for each in requests for value in service([each])[0]["click"]]
    assert scores == pytest.approx(expected, abs=1e-5)
    # One candidate and one vendor, and a vendor that comes up again.
    own = requests[0]
    few = {count: service([{**own, "candidates": own["candidates"][:count]}])[0]["click"] for count in (1, 2)}
    assert few[1] + few[2] == pytest.approx([*expected[:1], *expected[:2]], abs=1e-5)
    turned = service([{**own, "candidates": [*own["candidates"][::2], *own["candidates"][1::2]]}])[0]["click"]
    of_own = expected[: len(own["candidates"])]
    assert turned == pytest.approx([*of_own[::2], *of_own[1::2]], abs=1e-5)
    if name != "din":  # a program alone takes one request after another
        service.scorer._model = None
        scores = [value for each in service(requests) for value in each["click"]]
        assert scores == pytest.approx(expected, abs=1e-5)
        single = PretrainedModel(CONFIGS[name], dataclasses.replace(model.spec, max_candidates=1)).eval()
        single.load_state_dict(model.state_dict())
        rows = latencies(Scorer(folder), (model, single), torch.float32, sold.batch([9]), [1, 11], 11)
        assert [row["candidates"] for row in rows] == [1, 11]


def test_graphs_are_given_the_vendors(sold: Rows) -> None:
    model = PretrainedModel(CONFIGS["dcnv2"], sold.source.spec).eval()
    batch = sold.batch([0, 4])
    tokens = model.embedding(batch)
    inputs, _, together = _inputs_of_arch(tokens, batch)
    arguments, named = together([tensor.clone() for tensor in inputs])
    assert not named
    with torch.no_grad():
        torch.testing.assert_close(model.arch(*arguments), model.arch(tokens, batch))


def test_candidates_that_fill_up_are_the_last_vendors() -> None:
    tokens, offsets, ends = torch.randn(2, 1, 4), torch.tensor([0, 2]), torch.tensor([0, 3, 5])
    ((values, of_request, of_vendors),) = _given_to_last(16, ((tokens, offsets, ends),))
    assert values is tokens
    assert of_request is offsets
    assert of_vendors.tolist() == [0, 3, 16]
    assert _given_to_last(16, ()) == ()
