"""Resuming equals never having stopped, on one rank and on two, and another number of ranks can go on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.launching import TINY, TINY_DLRM, train_here, train_ranks
from train.process.files import summed, write_json
from train.record.tracking import Record, read_metrics

EVERY = ("checkpoint.every=3", "runtime.steps=6", "checkpoint.keep=5", "model.dropout=0.1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    train_here(run_dir, *EVERY, base=TINY_DLRM)
    return run_dir


def training(run_dir: Path) -> list[Record]:
    return [record for record in read_metrics(run_dir / "metrics.jsonl") if record.split == "train"]


MODELS = {
    "interformer": ("model=interformer_moe", "model.num_layers=1", "model.moe.bias_update_rate=0.05"),
    "tokenmixer": ("model=tokenmixer", "model.feed_forward=moe"),
    **{name: (f"model={name}",) for name in ("rankmixer", "hyformer", "mixformer")},
    "onetrans": ("model=onetrans", "model.length_multiple=1", "model.last_events=4"),
}


@pytest.mark.parametrize(
    ("ranks", "accumulate", "model"),
    [
        (1, 2, "interformer"),
        (2, 1, "interformer"),
        *(pytest.param(1, 2, name, marks=pytest.mark.nightly) for name in list(MODELS)[1:]),
    ],
)
@pytest.mark.reliability(
    "a run stops within an accumulation and resumes, on one and two ranks",
    "losses and results are bitwise the uninterrupted ones",
)
def test_resumed_losses_are_bitwise_those_of_the_uninterrupted_run(
    ranks: int, accumulate: int, model: str, tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    # Step 3 lies in the middle of an accumulation, of gradients and of the tokens that move the routers' biases.
    base = TINY if model == "interformer" else tuple(each for each in TINY if not each.startswith("model."))
    # Which negatives are left out depends on no process that was there before.
    options = (*EVERY, *MODELS[model], "data.negative_rate=0.5", f"optimizer.accumulate={accumulate}")
    train_ranks(ranks, whole, *options, base=base)
    shutil.copytree(whole / "checkpoints" / "step_00000003", resumed / "checkpoints" / "step_00000003")
    train_ranks(ranks, resumed, *options, base=base)
    expected = {record.step: record.values["loss"] for record in training(whole)}
    actual = {record.step: record.values["loss"] for record in training(resumed)}
    assert list(actual) == [4, 5, 6]
    assert actual == {step: expected[step] for step in actual}
    final = [read_metrics(path / "metrics.jsonl")[-1].values for path in (whole, resumed)]
    assert final[0] == final[1]
    assert "resuming with" not in (resumed / "train.log").read_text()  # but for the folder nothing is another one


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    whole, smaller = tmp_path / "whole", tmp_path / "smaller"
    exact = (*EVERY, "precision=fp32", "model.dropout=0")
    # Two ranks validate on the way, with the ids of the next batch exchanged already: their losses do not change by it.
    train_ranks(2, whole, *exact, "runtime.eval_every=2", base=TINY_DLRM)
    shutil.copytree(whole / "checkpoints" / "step_00000003", smaller / "checkpoints" / "step_00000003")
    train_ranks(1, smaller, *exact, "data.batch_size=32", base=TINY_DLRM)
    expected = {record.step: record.values["loss"] for record in training(whole)}
    assert [record.step for record in training(smaller)] == [4, 5, 6]
    # Same global batches; float32 sums over two ranks are taken in another order.
    for record in training(smaller):
        assert record.values["loss"] == pytest.approx(expected[record.step], rel=1e-5)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.dim=32", "model.dim=16"),
        ("data.num_items=300", "another vocabulary.* or for data=synthetic its keys and the version"),
        ("optimizer.sparse=sgd", "optimizer.sparse=rowwise_adagrad"),
    ],
)
def test_resuming_with_another_model_or_optimiser_is_refused(override: str, named: str, finished: Path) -> None:
    with pytest.raises(ValueError, match=named):
        train_here(finished, *EVERY, override, base=TINY_DLRM)


def test_bad_checkpoints_are_named(finished: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step_00000003"
    shutil.copytree(finished / "checkpoints" / checkpoint.name, checkpoint)
    with pytest.raises(ValueError, match="holds another model"):
        train_here(tmp_path / "a", "model.dim=32", f"checkpoint.load='{checkpoint}'", base=TINY_DLRM)
    with pytest.raises(ValueError, match="is not a readable checkpoint"):
        train_here(tmp_path / "b", f"checkpoint.load='{tmp_path}/absent'", base=TINY_DLRM)
    for file in checkpoint.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(
        ValueError, match=r"step_00000003 is damaged \(__0_0.distcp has 1,000 bytes, [\d,]+ were written"
    ):
        train_here(tmp_path / "c", f"checkpoint.load='{checkpoint}'", base=TINY_DLRM)
    sums = {file.name: summed(file) for file in checkpoint.iterdir() if file.name != "manifest.json"}
    write_json(checkpoint / "manifest.json", {"files": sums})
    with pytest.raises(ValueError, match=r"step_00000003 is damaged \(\w+Error: [^\n]*\); use another checkpoint"):
        train_here(tmp_path / "c", f"checkpoint.load='{checkpoint}'", base=TINY_DLRM)
