"""What a run says at its end about its own length."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.launching import TINY_DLRM, train_here
from tests.train.config.test_config import composed
from train.config.compose import to_config
from train.config.schema import Config
from train.process import length
from train.record.advice import advice


def settled(*overrides: str) -> Config:
    """With its length, as a run has it by its end."""
    config = to_config(composed(*overrides))
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
            [r"the first of 2 validations \(step 100\) was the best: .*optimizer.lr=0.001"],
        ),
        ((), [(100, 0.95), (150, 0.9), (200, 0.91)], []),
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
    assert lines[-len(results["advice"])].endswith(results["advice"][0])
