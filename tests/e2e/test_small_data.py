"""Tables that leave little to learn: what training on two ranks does with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch.multiprocessing import ProcessRaisedException

from tests.launching import TINY_DLRM, train_ranks

EVENTS = (
    "defaults: [events_schema, _self_]\nfiles: [events.csv]\nuser: user\ntime: time\nlabels: {click: click}\n"
    "request_categorical: [user]\ncandidate_categorical: [item]\nhistories: {seen: {fields: [item]}}\n"
)
SMALL = [override for override in TINY_DLRM[1:] if not override.startswith("data.") or "batch" in override]


def train_on(rows: list[str], folder: Path, *overrides: str) -> dict[str, dict[str, float | None]]:
    (folder / "conf" / "data").mkdir(parents=True)
    (folder / "conf" / "data" / "mine.yaml").write_text(EVENTS)
    (folder / "events.csv").write_text("\n".join(["user,time,item,click", *rows, ""]))
    found = [f"hydra.searchpath=[file://{folder}/conf]", "data=mine", f"data.root='{folder}'"]
    kept = [f"data.cache_dir='{folder}/cache'", "data.num_workers=0"]
    train_ranks(2, folder / "run", *overrides, base=[*found, *SMALL, *kept])
    return json.loads((folder / "run" / "results.json").read_text())


def test_all_labels_positive(tmp_path: Path) -> None:
    rows = [f"u{i % 5},{1000 + 100 * i},m{i % 7},1" for i in range(60)]
    results = train_on(rows, tmp_path)
    assert results["test"]["click/auc"] is None  # one class: there is no ranking to measure
    assert results["test"]["click/ne"] is None
    assert results["test"]["click/log_loss"] is not None
    assert results["label_rates"] == {"click": 1.0}


def test_early_stopping_needs_validations(tmp_path: Path) -> None:
    rows = [f"u{i % 5},{1000 + 100 * i},m{i % 7},{i % 2}" for i in range(60)]
    with pytest.raises(
        ProcessRaisedException, match="early_stop=1 needs validations and the validation split is empty"
    ):
        train_on(rows, tmp_path, "data.split=[0.8,0,0.2]", "runtime.early_stop=1")


def test_a_batch_larger_than_the_data_takes_all_of_it(tmp_path: Path) -> None:
    rows = [f"u{i % 5},{1000 + 100 * i},m{i % 7},{i % 2}" for i in range(60)]
    results = train_on(rows, tmp_path, "data.batch_size=4096", "runtime.epochs=2")
    assert results["step"] == 2
    assert results["test"]["click/examples"] == 6
