"""The scorer by itself: threads, a process without TorchRec and the trainer, and batches that are wrong."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
        middle = len(content) // 2
        for damaged in (content[:middle], content[:middle] + bytes([content[middle] ^ 128]) + content[middle + 1 :]):
            (copy / name).write_bytes(damaged)
            with pytest.raises(ValueError, match="is damaged"):
                Service.from_pretrained(copy)
        (copy / name).unlink()
        with pytest.raises(ValueError, match="is damaged|holds no exported model"):
            Service.from_pretrained(copy)
        (copy / name).write_bytes(content)
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


def test_an_export_of_another_version_is_told_in_words(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no exported model"):
        Scorer(tmp_path)
    (tmp_path / "export.json").write_text('{"operators": [], "compiled": false}')
    with pytest.raises(ValueError, match=r"has no 'program': it is of another version; export the model anew"):
        Scorer(tmp_path)
