"""The scorer by itself: threads, a process without TorchRec and the trainer, and batches that are wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch

from modules.config import ModelConfig
from modules.models import MODELS, CustomConfig
from modules.models.baselines import DIN
from modules.pretrained import PretrainedModel
from tests.launching import ROOT
from tests.serving.conftest import Rows
from train.commands.score import latencies
from train.data.reader import RequestReader
from train.serving.scorer import Scorer
from train.serving.service import Service

Export = Callable[[ModelConfig, Rows], tuple[Path, PretrainedModel]]
DCN = MODELS["dcnv2"].Config(dim=8)  # type: ignore[operator]
DIN_SMALL = DIN.Config(dim=8, hidden=[16])


@pytest.mark.reliability("a file of an export is cut short, changed or lost", "named before it serves")
def test_a_damaged_export_is_refused(ranking: Rows, exported: Export, tmp_path: Path) -> None:
    whole, _ = exported(DCN, ranking)
    copy = shutil.copytree(whole, tmp_path / "copy")
    Service.from_pretrained(copy)
    files = {str(file.relative_to(whole)): file.read_bytes() for file in whole.rglob("*") if file.is_file()}
    assert {"config.json", "model.safetensors", "model.pt2", "reader.json", "vocabulary/item.parquet"} < {*files}
    for name, content in files.items():
        reads: type[Service | RequestReader] = RequestReader if ".parquet" in name else Service
        middle = len(content) // 2
        for damaged in (content[:middle], content[:middle] + bytes([content[middle] ^ 128]) + content[middle + 1 :]):
            (copy / name).write_bytes(damaged)
            with pytest.raises(ValueError, match="is damaged"):
                reads.from_pretrained(copy)
        (copy / name).unlink()
        with pytest.raises(ValueError, match="is damaged|holds no exported model"):
            reads.from_pretrained(copy)
        (copy / name).write_bytes(content)
    mapping = copy / "vocabulary" / "mapping.json"  # as an earlier version wrote it
    mapping.write_text(json.dumps({**json.loads(mapping.read_text()), "files": {}}))
    (copy / "vocabulary" / "item.parquet").unlink()
    with pytest.raises(ValueError, match=r"vocabulary lacks the ids of table 'item'"):
        RequestReader.from_pretrained(copy)


@pytest.mark.parametrize("config", [DCN, DIN_SMALL], ids=["program", "eager"])
def test_threads_share_a_scorer(config: ModelConfig, ranking: Rows, exported: Export) -> None:
    service = Service.from_pretrained(exported(config, ranking)[0])
    calls = [[ranking.request(number) for number in numbers] for numbers in ([3], [90, 60], [60], [5, 7, 9])]
    expected = [service(requests) for requests in calls]
    with ThreadPoolExecutor(8) as threads:
        actual = list(threads.map(service, calls * 10))
    # Sums of a product may be taken in another order in another piece of memory.
    torch.testing.assert_close(actual, expected * 10, atol=1e-6, rtol=1e-5)


WITHOUT = """
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torchrec", "fbgemm_gpu", "triton") or name in ("train.trainer", "train.build"):
            raise ModuleNotFoundError(f"{name} is not needed", name=name)
sys.meta_path.insert(0, Blocked())
from train.serving.asgi import App
from train.serving.service import Service
requests = json.load(sys.stdin)
print(json.dumps([App(Service.from_pretrained(folder)).service(requests) for folder in sys.argv[1:]]))
"""


def test_a_process_without_torchrec_and_the_trainer_scores(ranking: Rows, exported: Export, own_models: Path) -> None:
    """A program, one of a class that this process does not have, and a model in eager PyTorch."""
    configs = (DCN, CustomConfig(name="served_models.Dot", dim=8), DIN_SMALL)
    folders = [exported(config, ranking)[0] for config in configs]
    requests = [ranking.request(number) for number in (90, 3)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *map(str, folders)],
        input=json.dumps(requests), capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for folder, predictions in zip(folders, json.loads(done.stdout), strict=True):
        for expected, actual in zip(Service.from_pretrained(folder)(requests), predictions, strict=True):
            assert actual.keys() == expected.keys()
            for task, values in expected.items():
                assert actual[task] == pytest.approx(values, abs=1e-5)


def test_batches_with_keyed_jagged_tensors_score_alike(ranking: Rows, exported: Export) -> None:
    folder, _ = exported(DIN_SMALL, ranking)
    scorer, service = Scorer(folder), Service.from_pretrained(folder)
    requests = [ranking.request(number) for number in (90, 3)]
    torch.testing.assert_close(scorer(ranking.batch([90, 3])), scorer(service.read.batch(requests)))


def test_an_id_that_no_row_has_is_refused_by_the_name_of_its_feature(ranking: Rows, exported: Export) -> None:
    folder, _ = exported(DIN_SMALL, ranking)
    scorer = Scorer(folder)
    tables, lookups = scorer.spec.tables, iter(scorer.spec.lookups())
    for side in range(len(ranking.batch([90]).sparse)):
        for key in range(len(ranking.batch([90]).sparse[side].keys())):
            name, table = next(lookups)
            for outside in (-1, tables[table]):
                batch = ranking.batch([90, 3])
                ids = batch.sparse[side].values()
                ids[sum(batch.sparse[side].length_per_key()[: key + 1]) - 1] = outside
                with pytest.raises(ValueError, match=f"^{name} has the id {outside}; table '{table}' has rows 0 to"):
                    scorer(batch)


def test_models_that_are_served_eagerly_are_timed_as_well(ranking: Rows, exported: Export) -> None:
    folder, model = exported(DIN_SMALL, ranking)
    single = PretrainedModel(DIN_SMALL, dataclasses.replace(model.spec, max_candidates=1)).eval()
    single.load_state_dict(model.state_dict())
    rows = latencies(Scorer(folder), (model, single), torch.float32, ranking.batch([90]), [2, 5], 2)
    assert [set(row) for row in rows] == [
        {"candidates", "exported_ms", "eager_ms", "broadcast_ms"},
        {"candidates", "exported_ms", "eager_ms"},
    ]


def test_a_history_longer_than_was_exported_is_refused(ranking: Rows, exported: Export) -> None:
    scorer = Scorer(exported(DIN_SMALL, ranking)[0])
    events = scorer.spec.histories
    scorer.spec = dataclasses.replace(scorer.spec, histories=(dataclasses.replace(events[0], max_length=2), events[1]))
    for numbers in ([90], [90, 3]):
        with pytest.raises(ValueError, match=r"6 events of type 'seen', more than the 2 that were exported"):
            scorer(ranking.batch(numbers))


WRONG = [None, True, 1.5, "../x", [1], {"x": 1}, {"../x": {"bytes": 1, "crc32": 1}}]


def test_a_field_that_no_export_has_so_is_named(ranking: Rows, exported: Export, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no exported model"):
        Scorer(tmp_path)
    copy = shutil.copytree(exported(DIN_SMALL, ranking)[0], tmp_path / "copy")
    path = copy / "export.json"
    about = json.loads(path.read_text())
    about["tasks"] = {"click": {"loss": "focal", "gamma": 2.0}}
    expected = Scorer(copy)(ranking.batch([90]))

    def refusal(changed: object) -> str:
        path.write_text(json.dumps(changed))
        try:
            scores = Scorer(copy)(ranking.batch([90]))
        except ValueError as error:
            return str(error)
        torch.testing.assert_close(scores, expected)
        return ""

    name, sums = next(iter(about["files"].items()))
    cases: list[tuple[str, object]] = [("mapping", each) for each in ([], [about], "", 1, None)]
    for field in about:
        cases.append((field, {key: value for key, value in about.items() if key != field}))
        cases += [(field, about | {field: value}) for value in WRONG]
    for value in (*WRONG, {"bytes": sums["bytes"]}, sums | {"crc32": "1"}, sums | {"of": 1}):
        cases.append((name, about | {"files": about["files"] | {name: value}}))
    for task in ({}, {"loss": None}, {"loss": ["binary"]}, {"loss": "classes", "classes": 3}, {"loss": "os.system"}):
        cases.append(("tasks", about | {"tasks": {"click": task}}))
    cases.append(("model.pt2", about | {"program": "model.pt2"}))
    refused = set()
    for field, changed in cases:
        if text := refusal(changed):
            assert "export.json" in text, (field, changed)
            assert field in text, text
            assert len(text) < 500
            refused.add(field)
    assert refused == {*about, "mapping", name, "model.pt2"}
    copy = shutil.copytree(exported(DCN, ranking)[0], tmp_path / "traced")
    path = copy / "export.json"
    assert "compiled=True" in refusal(json.loads(path.read_text()) | {"compiled": True})


def keys_of(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from keys_of(each, (*path, key))


@pytest.mark.parametrize("name", ["config.json", "reader.json", "vocabulary/mapping.json"])
def test_a_description_that_was_changed_by_hand_is_served_or_refused(
    name: str, ranking: Rows, exported: Export, tmp_path: Path
) -> None:
    """Of an export without checksums, as earlier versions wrote it."""
    copy = shutil.copytree(exported(DIN_SMALL, ranking)[0], tmp_path / "copy")
    for file in (copy / "export.json", copy / "vocabulary/mapping.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"files": {}}))
    path = copy / name
    text, requests, refused, scorer = path.read_text(), [ranking.request(90)], list[str](), Scorer(copy)
    values = (None, -1, "x", [], {"x": [1]}, ...)
    for number, (*above, key) in enumerate(keys_of(json.loads(text))):
        for value in values[number % 3 :: 3]:
            about = json.loads(text)
            section = reduce(lambda part, each: part[each], above, about)
            if value is ...:
                del section[key]
            else:
                section[key] = value
            path.write_text(json.dumps(about))
            try:
                own = Scorer(copy) if name == "config.json" else scorer
                service = Service(own, RequestReader.from_pretrained(copy))
            except ValueError as error:
                refused.append(str(error))
                continue
            with contextlib.suppress(ValueError):  # for requests that do not fit
                service(requests)
    assert len(refused) > 5
    assert not [text for text in refused if str(copy) not in text and "data." not in text]
