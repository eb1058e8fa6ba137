"""What a run says at its end about its own length."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.launching import TINY_DLRM, train_here
from train.config.compose import to_config
from train.config.files import composed
from train.config.schema import Config
from train.process import length
from train.record.advice import advice, ending


def settled(*overrides: str) -> Config:
    """With its length, as a run has it by its end."""
    config = to_config(composed([*overrides]))
    length.settle(config, requests=10_000, validated=True)
    return config


@pytest.mark.parametrize(
    ("overrides", "validations", "said"),
    [
        ((), [(100, 0.9), (200, 0.899)], []),
        ((), [(100, 0.9)], []),  # alone, it says nothing about what is before or after it
        ((), [(100, 0.9), (200, 0.85)], ["still falling at the end, by 5.6 % .* e.g. runtime.epochs=2"]),
        (("runtime.steps=200",), [(100, 0.9), (200, 0.85)], ["e.g. runtime.steps=400"]),
        (
            (),
            [(100, 0.9), (200, 0.91)],
            [r"the first of 2 validations \(step 100\) was the best: .*optimizer.lr=0.001, and model.dropout="],
        ),
        ((), [(100, 0.95), (150, 0.9), (200, 0.905)], []),
        (
            (),
            [(50, 0.95), (100, 0.9), (200, 0.99)],
            ["overfitted by 10 % of NE .*: try a lower .*0.2, or.*: runtime.early_stop=2, runtime.epochs=1"],
        ),
        (
            ("runtime.steps=200", "model.dropout=0.1"),
            [(50, 0.95), (100, 0.9), (200, 0.99)],
            ["since step 100: .*optimizer.lr=0.001, or stop earlier: runtime.early_stop=2, runtime.steps=100"],
        ),
        ((), [(200, 1.2)], ["NE 1.2, no better than a constant prediction .* e.g. runtime.epochs=2"]),
        (
            ("optimizer.warmup_steps=500",),
            [(200, 0.9)],
            ["never reached optimizer.lr=0.001: .*optimizer.warmup_steps=500"],
        ),
        (("optimizer.warmup_steps=500",), [], ["too short for its learning rate"]),
    ],
)
def test_what_is_said(overrides: tuple[str, ...], validations: list[tuple[int, float]], said: list[str]) -> None:
    sentences = advice(settled(*overrides), validations, steps=200)
    assert len(sentences) == len(said)
    assert all(re.search(expected, sentence) for expected, sentence in zip(said, sentences, strict=True))


def test_what_stands_for_ne_is_not_called_ne() -> None:
    (said,) = advice(settled(), [(200, 2.272)], 200, "nmse")
    assert "the best validation has nmse 2.272" in said
    assert "NE" not in said
    (said,) = advice(settled(), [(50, 0.95), (100, 0.9), (200, 0.99)], 200, early=True)
    assert "early_stop" not in said


def test_the_end_says_why_and_which_checkpoint_is_measured() -> None:
    assert ending(1600, 4000, 800, 4, early=True) == (
        "stopped early at step 1,600 of 4,000: none of the last 4 validations was better than that of step 800; the "
        "metrics are those of the checkpoint of step 800"
    )
    took = "took all 1,197 steps; the metrics are those of the checkpoint of step"
    assert ending(1197, 1197, 798, 2, early=False) == f"{took} 798"
    assert ending(1197, 1197, 0, 0, early=False) == f"{took} 1,197"


def test_a_run_of_few_steps_with_one_validation_is_told_so() -> None:
    """On 34 thousand rows the defaults took 28 steps to an AUC of .61, six epochs .71, and nothing said so."""
    (said,) = advice(settled(), [(28, 0.95)], steps=28)
    assert "the run took 28 steps" in said
    assert said.endswith("e.g. runtime.epochs=8 runtime.early_stop=2")
    (said,) = advice(settled("runtime.steps=40"), [(40, 0.95)], steps=40)
    assert said.endswith("e.g. runtime.steps=80 runtime.eval_every=40")


def test_a_run_that_was_best_at_first_says_so_after_its_results(tmp_path: Path) -> None:
    # Nothing is learnt at this rate, so the second validation is no better than the first.
    rates = ("optimizer.lr=1e-30", "optimizer.sparse_lr=0", "optimizer.warmup_steps=0")
    train_here(tmp_path / "run", "runtime.eval_every=1", "runtime.steps=2", *rates, base=TINY_DLRM)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    lines = (tmp_path / "run" / "train.log").read_text().splitlines()
    assert results["advice"]
    assert results["ended"] == "took all 2 steps; the metrics are those of the checkpoint of step 1"
    assert lines[-len(results["advice"]) - 1].endswith(results["ended"])
    assert lines[-len(results["advice"])].endswith(results["advice"][0])
