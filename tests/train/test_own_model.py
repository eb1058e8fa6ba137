"""The model and the metric of docs/modules.md, as its page has them: files outside the repository."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from modules import models
from modules.costs.flops import count_flops
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.models import CustomConfig
from modules.models.ranking import RankingModel
from tests.launching import ROOT, TINY, train_here
from tests.modules.factories import random_batch, random_spec
from train import evaluate

PAGE = (ROOT / "docs/modules.md").read_text().partition("## A model of your own")[2]
ARCH, METRIC = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(YAML,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page, from which Python imports."""
    (tmp_path / "my_models.py").write_text(ARCH)
    (tmp_path / "my_metrics.py").write_text(METRIC)
    (tmp_path / "my_configs" / "model").mkdir(parents=True)
    (tmp_path / "my_configs" / "model" / "my_towers.yaml").write_text(YAML)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("num_events", [0, 2])
def test_the_page_s_model_is_one(num_events: int, own: Path) -> None:
    spec, config = random_spec(num_events), CustomConfig(name="my_models.TwoTower", dim=8)
    model: Any = RankingModel(FeatureEmbedding(spec, 8, device="cpu"), models.build(config, spec))
    batch = random_batch(spec)
    logits = model(batch)
    assert logits.shape == (batch.num_candidates, len(spec.tasks))
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.arch.parameters())
    assert model.arch.aux_loss() == 0
    request, candidate = (
        sum(2 * layer.weight.numel() for layer in tower if hasattr(layer, "weight"))
        for tower in (model.arch.request, model.arch.candidate)
    )
    assert count_flops(model.arch, spec, 8)(5, 7, 20, 90) == pytest.approx(5 * request + 7 * candidate)
    torch.testing.assert_close(model(batch.expand()), logits)


def test_what_is_no_model_is_refused_by_what_it_lacks(own: Path) -> None:
    bare = "class Bare(nn.Module):\n    def __init__(self, spec, dim, dropout):\n        super().__init__()\n"
    (own / "others.py").write_text(f"from torch import nn\n\n{bare}\nNUMBER = 3\n")
    with pytest.raises(ValueError, match=r"others\.NUMBER must make an nn\.Module.*it gives 3"):
        models.build(CustomConfig(name="others.NUMBER"), random_spec(1))
    with pytest.raises(ValueError, match=r"others\.Bare lacks aux_loss; `Architecture` in"):
        models.build(CustomConfig(name="others.Bare"), random_spec(1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden": [0]}, r"model\.hidden=\[0\] must be at least 1, e\.g\. model\.hidden=\[1\]"),
        ({"activation": "relu"}, r"model\.activation=relu is not known; choose from none, tanh"),
        ({"width": 3}, r"fields of my_models\.TwoTower\.Config: .*'width'"),
    ],
)
def test_wrong_options_of_one_s_own_model_are_refused(arguments: dict[str, Any], message: str, own: Path) -> None:
    with pytest.raises(ValueError, match=message):
        models.build(CustomConfig(name="my_models.TwoTower", arguments=arguments), random_spec(1))


def test_a_class_without_a_config_gets_its_arguments_by_name(own: Path) -> None:
    plain = ARCH.replace("spec, config)", "spec, dim, *, dropout, hidden)").replace("config.", "")
    start, end = plain.index("    @dataclass"), plain.index("    def __init__")
    (own / "plain.py").write_text((plain[:start] + plain[end:]).replace('activation == "tanh"', "True"))
    config = CustomConfig(name="plain.TwoTower", dim=8, arguments={"hidden": [4]})
    model: Any = models.build(config, random_spec(1))
    assert model.candidate[0].out_features == 4


def test_model_and_metric_of_one_s_own_are_trained_and_evaluated(own: Path) -> None:
    options = [override for override in TINY if not override.startswith("model.")]
    options += [f"hydra.searchpath=[file://{own}/my_configs]", "model=my_towers", "model.dim=16", "runtime.steps=2"]
    train_here(own / "run", "tracking.metrics=[my_metrics.top_share]", base=options)
    results = json.loads((own / "run" / "results.json").read_text())
    assert 0 <= results["test"]["click/top_share"] <= 1
    assert "like/top_share" in results["valid"]
    again = evaluate.main([f"run_dir={own / 'run'}", f"out={own / 'scored'}", "runtime.device=cpu"])
    assert again == results["test"]
    with pytest.raises(ValueError, match=r"tracking\.metrics=my_metrics\.auc: another metric is called auc"):
        train_here(own / "other", "tracking.metrics=[my_metrics.auc]", base=options)
    with pytest.raises(ValueError, match=r"theirs\.top_share: another metric is called top_share"):
        train_here(own / "other", "tracking.metrics=[my_metrics.top_share,theirs.top_share]", base=options)
    with pytest.raises(ValueError, match=r"tracking\.metrics=my_metrics\.other cannot be imported .*PYTHONPATH"):
        train_here(own / "other", "tracking.metrics=[my_metrics.other]", base=options)
    with pytest.raises(ValueError, match=r"model\.name=theirs\.TwoTower cannot be imported"):
        train_here(own / "other", "model.name=theirs.TwoTower", base=options)
    with pytest.raises(ValueError, match=r"unknown model 'custom'.*model\.name=my_models\.TwoTower"):
        train_here(own / "other", "model=custom", base=[option for option in options if option != "model=my_towers"])
