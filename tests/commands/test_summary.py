"""The command that prints what a model costs and what serves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launching import EVENTS_DLRM
from train.commands import summary
from train.config.places import CONFIGS

TINY = ["data=synthetic", "data.num_requests=50", "data.num_users=20", "data.num_items=200", "data.max_history=20"]


def test_it_answers_for_a_chip_that_is_absent() -> None:
    found = summary.main(["chip=90", *TINY])
    assert {each.backend for each in found.served if each.op == "jagged_dense_bmm"} == {"triton"}
    assert found.costs[0].precision == "bfloat16, float32"
    assert "jagged_dense_bmm" in str(found)
    here = summary.main(TINY)
    assert {each.backend for each in here.served if each.op == "jagged_dense_bmm"} == {"reference"}
    assert here.costs[0].precision == "float32"
    assert not list(here.slow())


def test_auto_is_that_of_the_chip() -> None:
    pytest.importorskip("triton")
    model = ["model=interformer_moe", "model.dim=128", "model.moe.expert_dim=128", "precision=mxfp8_g128"]
    precision = {cost.name: cost.precision for cost in summary.main(["chip=90", *model, *TINY]).costs}
    assert precision["whole"] == "bfloat16, float32, mxfp8_g128"
    assert precision["history"] == "bfloat16"
    narrow = summary.main(["chip=90", *model, "model.moe.expert_dim=64", *TINY]).costs
    assert narrow[0].precision == "bfloat16, float32"
    here = {cost.name: cost.precision for cost in summary.main([*model, *TINY]).costs}
    assert here["history"] == "mxfp8_g128"  # on a CPU everything is, to study the numbers


def test_it_builds_what_a_run_would_choose_by_the_size_of_its_data(tmp_path: Path) -> None:
    rows = [f"u{row % 7},{row},i{row % 5},{row % 3}" for row in range(100)]
    (tmp_path / "rows.csv").write_text("\n".join(["user,time,item,click", *rows]))
    options = [*EVENTS_DLRM, "model=interformer", f"data.root={tmp_path}", f"data.cache_dir={tmp_path}/cache"]
    options += ["data.files=[rows.csv]", "data.real_labels=[click]", "+tasks.click={loss: classes, number: 3}"]
    found = summary.main(options)
    assert " training requests: " in found.notes[-1]
    assert "model.dropout=0.2 model.plain_head=True" in found.notes[-1]
    assert found.notes[-1] in str(found)
    given = summary.main([*options, "model.dropout=0.2", "model.plain_head=true"])
    assert (found.costs, "model." in given.notes[-1]) == (given.costs, False)
    without = summary.main([*options, "model.plain_head=false"]).costs[0].parameters
    assert without < found.costs[0].parameters
    # Three classes have three logits, which a run builds as well.
    assert summary.main([*options, "tasks.click.number=4"]).costs[0].parameters > found.costs[0].parameters


def test_a_chip_is_a_capability() -> None:
    with pytest.raises(ValueError, match=r"chip=h200 must be a compute capability without its dot, e\.g\. chip=90"):
        summary.main(["chip=h200", *TINY])


# production_mxfp8_h200 does not fit into the memory of a small machine.
GPU_EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("*h200*.yaml") if "mxfp8" not in path.stem)
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in GPU_EXPERIMENTS if name != "synthetic_h200"]


@pytest.mark.parametrize("name", ["synthetic_h200", *NIGHTLY])
def test_no_large_operator_of_a_shipped_experiment_falls_to_the_specification(name: str) -> None:
    pytest.importorskip("triton")
    served = summary.main(["chip=90", f"+experiment={name}", "data.num_requests=50"]).served
    assert served
    assert not [each for each in served if each.share > 0.01 and each.backend == "reference"]
