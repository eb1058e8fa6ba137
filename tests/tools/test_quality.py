"""The page is that of the stored results, intervals cover a further seed, published rows compare, and our DIN does not
lose to a plain one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tests.train.config.test_experiments import composed
from tools.quality import check, logistic, nightly, page, plain_din
from tools.quality.run import configuration, train

SMALL = (
    "model=din", "data=movielens_ids", "data.max_history=10", "data.eval_batch_size=2048", "data.num_workers=0",
    "runtime.device=cpu", "precision=fp32", "data.batch_size=256", "runtime.epochs=1",
)  # fmt: skip


def test_the_page_is_that_of_the_stored_results() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run: python -m tools.quality.page"


def test_bounds_hold_a_further_seed_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    samples, further = generator.normal(3, 2, (4000, 5)), generator.normal(3, 2, 4000)
    bounds = [nightly.bounds(sample, 0.9) for sample in samples]
    inside = [low <= value <= high for value, (low, high) in zip(further, bounds, strict=True)]
    assert np.mean(inside) == pytest.approx(0.9, abs=0.02)  # four deviations of a share of 4,000


def test_nightly_fails_outside_of_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    same = nightly.rows()[nightly.ROW][1][0]
    monkeypatch.setattr(nightly, "train", lambda job, folder: {"test": same})
    assert nightly.main([]) == 0
    monkeypatch.setattr(nightly, "train", lambda job, folder: {"test": same | {"like/auc": same["like/auc"] - 0.05}})
    assert nightly.main([]) == 1
    assert nightly.main(["--row", "ml1m/nothing"]) == 2


def test_nightly_knows_the_rows_of_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    job, tests = nightly.rows()["ml1m_features/plain PyTorch DIN"]
    assert job["by"] == "plain_din"
    assert "again" not in job
    assert "data=ml1m_features" in job["overrides"]
    monkeypatch.setattr(nightly, "train", lambda job, folder: {"test": tests[0]})
    assert nightly.main(["--row", "ml1m_features/plain PyTorch DIN"]) == 0


def test_a_run_is_held_against_its_published_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = check.data_config("amazon_electronics")
    data = dataclasses.asdict(config)
    (tmp_path / "config.json").write_text(json.dumps({"config": {"model": {"name": "din"}, "data": data}}))
    for auc, status in ((0.8861, 0), (0.8849, 1)):
        test = {"click/auc": auc, "click/gauc": 0.88, "click/log_loss": 0.43}
        (tmp_path / "results.json").write_text(json.dumps({"test": test}))
        assert check.main([str(tmp_path)]) == status
        shown = capsys.readouterr().out
        assert f"AUC of din: {auc - 0.886028:+.4f}" in shown
        assert "BARS" in shown
    (tmp_path / "config.json").write_text(json.dumps({"config": {"model": {"name": "din"}, "data": {}}}))
    assert check.main([str(tmp_path)]) == 2


def test_a_next_item_run_is_held_against_its_published_row() -> None:
    assert check.table_name(dataclasses.asdict(configuration(["+experiment=ml1m_hstu"]).data)) == "ml1m_next"
    table = check.published("ml1m_next")
    for ndcg, keeps_up in ((0.183, True), (0.16, False)):
        lines, kept = check.compare(table, "hstu", {"next/hr@10": 0.3, "next/ndcg@10": ndcg}, 0.001)
        assert kept == keeps_up
        assert f"NDCG@10 of hstu: {ndcg - 0.172:+.4f}" in lines[-1]
    with pytest.raises(ValueError, match=r"no next/hr@10.*tracking.top_k"):
        check.compare(table, "hstu", {"next/ndcg@10": 0.183}, 0.001)


def test_token_mixing_is_held_against_the_model_that_it_is_configured_as() -> None:
    for name in ("rankmixer", "tokenmixer", "hyformer", "mixformer", "wukong"):
        config = configuration([f"model={name}", "data=kuaivideo"])
        assert check.published_name(dataclasses.asdict(config.model)) == name
    saved = dataclasses.asdict(configuration(["model=din", "data=kuairand"]).data)
    assert check.table_name(saved) == "kuairand_1k"
    with pytest.raises(ValueError, match="no published table"):
        check.table_name(saved | {"files": ["log_standard_4_08_to_4_21_pure.csv"]})
    test = {"click/gauc": 0.67, "click/auc": 0.75, "click/log_loss": 0.43}
    lines, kept = check.compare(check.published("kuaivideo_x1"), "rankmixer", test, 0.001)
    assert kept
    assert "0.6634      0.7436" in next(line for line in lines if line.startswith("rankmixer"))


@pytest.mark.parametrize("name", ["diginetica", "nowplaying", "tmall", "amazon_beauty", "amazon_sports", "amazon_toys"])
def test_sets_that_share_a_configuration_are_told_apart_by_their_folder(name: str, tmp_path: Path) -> None:
    experiment = "amazon_sasrec" if name.startswith("amazon") else "sessions_sasrec"
    config = composed(experiment)
    config.data.root = str(tmp_path / name)
    assert check.table_name(dataclasses.asdict(config.data)) == name
    table = check.published(name)
    test = {f"next/{metric}": 1.0 for metric in table["metrics"]}
    assert {int(metric.split("@")[1]) for metric in table["metrics"]} <= set(config.tracking.top_k)
    lines, kept = check.compare(table, "sasrec", test, 0.001)
    assert kept
    assert lines[1].startswith("this run")
    config.data.root = str(tmp_path / "other")
    with pytest.raises(ValueError, match="data.root=prepared/tmall"):
        check.table_name(dataclasses.asdict(config.data))


def test_every_published_table_names_its_data_and_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check.main(["--help"])
    helped = capsys.readouterr().out
    assert "\n\nkuaivideo_x1: data=kuaivideo\n# KuaiVideo_x1 (huggingface.co/reczoo)" in helped
    for name, table in json.loads(check.PUBLISHED.read_text()).items():
        assert f"\n\n{name}: data={table['data']}\n# " in helped
        assert table["task"] in check.data_config(table["data"]).labels
        assert all(len(row) == len(table["metrics"]) for row in table["rows"].values())
        assert table["source"]
        assert table["protocol"]


def test_a_run_that_lacks_a_metric_is_left_out_and_said() -> None:
    assert page._cell(np.array([0.5, np.nan, 0.5])) == "0.5000 (2 seeds)"
    assert page._cell(np.array([np.nan])) == ""


def test_the_logistic_model_says_which_numbers_it_reads() -> None:
    with pytest.raises(ValueError, match=r"user_mean and movie_mean; the data have no user_mean"):
        logistic.train(configuration(list(SMALL)))


@pytest.mark.nightly  # as the published rows are
def test_our_din_does_not_lose_to_a_plain_one(tmp_path: Path) -> None:
    ours = train({"overrides": list(SMALL)}, tmp_path)
    plain = plain_din.train(configuration(list(SMALL)))
    assert ours["step"] == plain["step"]
    assert plain["test"]["like/auc"] > 0.75  # it learns
    # Seeds move the AUC of either by some 0.005 here.
    assert ours["test"]["like/auc"] > plain["test"]["like/auc"] - 0.01
