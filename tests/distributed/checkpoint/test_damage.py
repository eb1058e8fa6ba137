"""Checkpoints that are damaged or made by somebody else: none runs code, none is taken for what was written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from tests.launching import ROOT, TINY_DLRM, environment, python, train_here, train_ranks
from train.checkpoint import manifest
from train.checkpoint.load import best_checkpoint, read_meta
from train.checkpoint.manifest import DamagedError
from train.checkpoint.progress import Progress
from train.checkpoint.read import read_metadata
from train.evaluate import main as evaluate
from train.process.files import summed, write_json
from train.record.tracking import Record, read_metrics

OPTIONS = ("runtime.eval_every=2", "checkpoint.keep=9", "runtime.steps=6")
NEWEST, BEFORE = "checkpoints/step_00000006", "checkpoints/step_00000004"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    train_here(run_dir, *OPTIONS, base=TINY_DLRM)
    return run_dir


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def shard(checkpoint: Path) -> Path:
    return next(checkpoint.glob("*.distcp"))


def flip(file: Path) -> None:
    """One bit amid the bytes of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def sign(checkpoint: Path) -> None:
    """As a forger would: a manifest that agrees."""
    names = [file.name for file in checkpoint.iterdir() if file.name != "manifest.json"]
    write_json(checkpoint / "manifest.json", {"files": {name: summed(checkpoint / name) for name in names}})


class Runs:
    """Its pickle makes a folder."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.made),)


@pytest.mark.reliability(
    "a foreign checkpoint with code in its index",
    "`checkpoint.load` and `train.evaluate` refuse it, naming the call; nothing runs",
)
def test_a_checkpoint_runs_no_code(run_dir: Path, tmp_path: Path) -> None:
    made, checkpoint = tmp_path / "made", run_dir / NEWEST
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Runs(made)))
    sign(checkpoint)
    refusal = r"step_00000006 is damaged \(UnpicklingError: .metadata names posix.mkdir, which no checkpoint does\)"
    with pytest.raises(ValueError, match=refusal):
        train_here(tmp_path / "new", f"checkpoint.load='{checkpoint}'", base=TINY_DLRM)
    with pytest.raises(ValueError, match=refusal):
        evaluate([f"checkpoint={checkpoint}", f"out={tmp_path / 'out'}"])
    assert not made.exists()


@pytest.mark.reliability(
    "a checkpoint index that names a pickled object or another folder", "refused; nothing runs, no other file is read"
)
def test_an_index_leads_to_tensors_of_the_checkpoint_only(run_dir: Path, tmp_path: Path) -> None:
    made, checkpoint = tmp_path / "made", run_dir / NEWEST
    index = read_metadata(checkpoint)
    key, info = next((key, info) for key, info in index.storage_data.items() if key.fqn.startswith("dense."))
    whole = pickle.dumps(index)
    payload = pickle.dumps(Runs(made))
    index.state_dict_metadata[key.fqn] = BytesStorageMetadata()
    index.storage_data[MetadataIndex(key.fqn)] = info
    info.relative_path, info.offset, info.length = "__0_9.distcp", 0, len(payload)
    (checkpoint / "__0_9.distcp").write_bytes(payload)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    sign(checkpoint)
    with pytest.raises(DamagedError, match="is damaged .* a file holds something else than tensors") as refused:
        train_here(run_dir, *OPTIONS, base=TINY_DLRM)
    assert "weights_only" not in str(refused.value)  # torch's advice to unpickle it after all
    assert not made.exists()
    index = pickle.loads(whole)
    next(iter(index.storage_data.values())).relative_path = "../step_00000004/__0_0.distcp"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(DamagedError, match="names a file of another folder"):
        read_metadata(checkpoint)


@pytest.mark.parametrize(
    "what", ["flip", "older", "cut", "lost", "meta", "index", "manifest", "no meta.json", "no manifest.json"]
)
@pytest.mark.reliability(
    "a file of the newest checkpoint is corrupt, cut short, lost or of an older step",
    "a warning names it; the checkpoint is set aside, the run resumes from the one before",
)
def test_the_newest_whole_checkpoint_serves(what: str, run_dir: Path) -> None:
    newest = run_dir / NEWEST
    file = {"meta": newest / "meta.json", "index": newest / ".metadata", "manifest": newest / "manifest.json"}.get(
        what, newest / what.removeprefix("no ") if what.startswith("no ") else shard(newest)
    )
    if what == "older":
        shutil.copy(shard(run_dir / BEFORE), file)
    elif what == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    elif what == "lost" or what.startswith("no "):
        file.unlink()
    elif what == "manifest":
        file.write_bytes(file.read_bytes()[:20])
    else:
        flip(file)
    train_here(run_dir, *OPTIONS, base=TINY_DLRM)
    log = (run_dir / "train.log").read_text()
    assert f"{newest} is damaged ({'the checksum of ' if what in ('flip', 'older', 'meta', 'index') else ''}" in log
    assert file.name in log.partition("is damaged")[2].partition("\n")[0]
    assert "goes on from step_00000004; the damaged one is now step_00000006.damaged" in log
    assert f"resumed from {run_dir / BEFORE}" in log
    steps = [record.step for record in read_metrics(run_dir / "metrics.jsonl") if record.split == "train"]
    assert steps == [1, 2, 3, 4, 5, 6]
    manifest.verify_alone(newest)  # written anew


@pytest.mark.reliability("every checkpoint is damaged", "the run is refused; nothing is renamed")
def test_a_run_without_a_whole_checkpoint_does_not_begin_anew(run_dir: Path) -> None:
    before = sorted((run_dir / "checkpoints").iterdir())
    for checkpoint in before:
        flip(shard(checkpoint))
    with pytest.raises(DamagedError, match="step_00000006 is damaged .the checksum of __0_0.distcp is not"):
        train_here(run_dir, *OPTIONS, base=TINY_DLRM)
    assert sorted((run_dir / "checkpoints").iterdir()) == before


@pytest.mark.reliability("a damaged checkpoint is evaluated or loaded by a new run", "refused, naming the file")
def test_a_damaged_checkpoint_is_not_evaluated(run_dir: Path, tmp_path: Path) -> None:
    flip(shard(run_dir / NEWEST))
    with pytest.raises(DamagedError, match="__0_0.distcp"):
        evaluate([f"checkpoint={run_dir / NEWEST}", f"out={tmp_path / 'out'}"])
    with pytest.raises(DamagedError, match="__0_0.distcp"):
        train_here(tmp_path / "new", f"checkpoint.load='{run_dir / NEWEST}'", base=TINY_DLRM)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "meta.json has no 'config'"),
        ("[]", "meta.json has no 'config'"),
        ("{", "meta.json: Expecting"),
        ('{"config": {}, "progress": 7, "data_fingerprint": ""}', "meta.json has no 'progress'"),
    ],
)
def test_a_meta_file_that_says_nothing_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(DamagedError, match=message):
        read_meta(tmp_path)


@pytest.mark.parametrize(
    ("progress", "message"),
    [
        ({"pace": 3}, r"meta.json has the unknown progress.pace=3"),
        ({"step": -7}, r"meta.json has progress.step=-7, expected one like 0"),
        ({"step": "7"}, r"meta.json has progress.step='7', expected one like 0"),
        ({"best_values": []}, r"meta.json has progress.best_values=\[\], expected one like {}"),
    ],
)
def test_progress_that_no_run_made_is_named(progress: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match=message):
        Progress.of(tmp_path, progress)


@pytest.mark.parametrize("how", ["flip", "lost"])
@pytest.mark.reliability(
    "the best checkpoint is damaged or lost",
    "a warning; the next best takes its place, and `results.json` describes one model",
)
def test_another_takes_the_place_of_a_damaged_best(how: str, run_dir: Path) -> None:
    """The newest says that step 2 was best; of the others, step 4 is."""
    meta_file = run_dir / NEWEST / "meta.json"
    meta = json.loads(meta_file.read_text())
    values = {step: record.values for step in (2, 4, 6) for record in [validation(run_dir, step)]}
    meta["progress"] |= {"best_step": 2, "best_ne": 0.1, "validations": [[2, 0.1], [4, 0.2], [6, 0.3]]}
    meta_file.write_text(json.dumps(meta))
    sign(run_dir / NEWEST)
    best = run_dir / "checkpoints" / "step_00000002"
    flip(shard(best)) if how == "flip" else shutil.rmtree(best)
    train_here(run_dir, *OPTIONS, base=TINY_DLRM)
    results = json.loads((run_dir / "results.json").read_text())
    assert (results["step"], results["best_step"], results["best_ne"]) == (6, 4, 0.2)
    assert results["valid"] == pytest.approx(values[4])
    evaluate([f"checkpoint={run_dir / BEFORE}", f"out={run_dir / 'evaluated'}", "split=test"])
    alone = json.loads((run_dir / "evaluated" / "metrics.json").read_text())
    assert alone["click/ne"] == pytest.approx(results["test"]["click/ne"])
    log = (run_dir / "train.log").read_text()
    reason = "the checksum of __0_0.distcp" if how == "flip" else "it is lost"
    assert f"step_00000002 is damaged ({reason}" in log
    assert "It was the best in validation, and step 4 is best now" in log
    assert best.with_suffix(".damaged").exists() == (how == "flip")


def validation(run_dir: Path, step: int) -> Record:
    return next(each for each in read_metrics(run_dir / "metrics.jsonl") if (each.step, each.split) == (step, "valid"))


def test_the_best_checkpoint_is_found_beside_a_damaged_one(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(run_dir / NEWEST / "meta.json")
    meta = json.loads((run_dir / BEFORE / "meta.json").read_text())
    meta["progress"]["best_step"] = 2
    (run_dir / BEFORE / "meta.json").write_text(json.dumps(meta))
    sign(run_dir / BEFORE)
    assert best_checkpoint(run_dir / "checkpoints") == run_dir / "checkpoints" / "step_00000002"
    assert "the checksum of meta.json" in caplog.text


def test_ranks_sum_what_they_write_and_verify_together(tmp_path: Path) -> None:
    train_ranks(2, tmp_path, "checkpoint.every=2", "checkpoint.keep=9", "runtime.steps=4", base=TINY_DLRM)
    newest = tmp_path / "checkpoints" / "step_00000004"
    assert set(manifest.read(newest)) == {"__0_0.distcp", "__1_0.distcp", ".metadata", "meta.json"}
    assert set(manifest.read(newest)) | {"manifest.json"} == {file.name for file in newest.iterdir()}
    flip(newest / "__1_0.distcp")
    train_ranks(2, tmp_path, "checkpoint.every=2", "checkpoint.keep=9", "runtime.steps=4", base=TINY_DLRM)
    log = (tmp_path / "train.log").read_text()
    assert "the checksum of __1_0.distcp" in log
    assert f"resumed from {tmp_path}/checkpoints/step_00000002" in log


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.launching import TINY_DLRM, train_here
from train.checkpoint import save

write = save._write_files

def die_in_the_second(path, state, world):
    if path.name == "step_00000004.partial":
        (path / "__0_0.distcp").write_bytes(b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, state, world)

save._write_files = die_in_the_second
train_here(Path(sys.argv[1]), *sys.argv[2:], base=TINY_DLRM)
"""


@pytest.mark.reliability(
    "SIGKILL to a rank that writes a checkpoint",
    "the partial checkpoint is removed; the run resumes from the one before",
)
def test_a_kill_in_a_write_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    killed = subprocess.run(python("-c", KILLED, str(tmp_path), *OPTIONS), cwd=ROOT, env=environment(), check=False)
    assert killed.returncode == -signal.SIGKILL
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "step_00000002",
        "step_00000004.partial",
    ]
    train_here(tmp_path, *OPTIONS, base=TINY_DLRM)
    assert f"resumed from {tmp_path / 'checkpoints/step_00000002'}" in (tmp_path / "train.log").read_text()
    assert not list((tmp_path / "checkpoints").glob("*.partial"))
    manifest.verify_alone(tmp_path / NEWEST)
