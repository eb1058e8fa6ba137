"""The tracker: one truth in metrics.jsonl, mirrors that follow it and never stop the run, logs by rank."""

from __future__ import annotations

import json
import logging
import math
import sys
import warnings

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from train.config.schema import TrackingConfig
from train.process.logs import setup_logging
from train.record.tracking import METRICS_FILE, Record, Tracker, format_table, read_metrics

QUIET = {"wandb": "disabled", "tensorboard": False, "progress": "never"}


def tracker(run_dir, *, enabled=True, **options):
    return Tracker(run_dir, TrackingConfig(**{**QUIET, **options}), enabled=enabled)


def started(run_dir, *, resume_step=None, **options):
    made = tracker(run_dir, **options)
    made.start({"model": {"name": "din"}}, total_steps=10, resume_step=resume_step)
    return made


def steps_of(run_dir):
    return [record.step for record in read_metrics(run_dir / METRICS_FILE)]


@pytest.fixture
def offline_wandb(monkeypatch, tmp_path):
    """No key, no settings and no network of the machine that runs the test."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_SILENT", "true")


def test_every_value_is_a_line(tmp_path):
    run = started(tmp_path)
    run.log(1, "train", {"loss": 0.1 + 0.2, "click/ne": math.nan})
    run.log(2, "valid", {"click/auc": 0.75, "click/loss": math.inf})
    run.finish()
    lines = [json.loads(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines()]
    assert [(line["step"], line["split"]) for line in lines] == [(1, "train"), (2, "valid")]
    assert lines[0]["values"] == {"loss": 0.1 + 0.2, "click/ne": None}
    first, second = read_metrics(tmp_path / METRICS_FILE)
    assert first.values["loss"] == 0.1 + 0.2  # to the last bit
    assert math.isnan(first.values["click/ne"])
    assert math.isnan(second.values["click/loss"])
    assert second.time >= first.time > 1.6e9


def test_a_line_is_on_disk_before_the_run_ends(tmp_path):
    run = started(tmp_path)
    run.log(1, "train", {"loss": 1.0})
    assert steps_of(tmp_path) == [1]
    run.finish()


def test_resuming_drops_what_is_run_again(tmp_path):
    run = started(tmp_path)
    for step in range(1, 8):
        run.log(step, "train", {"loss": 1.0})
    run.log(4, "test", {"loss": 1.0})  # of a start that was to end there
    run.finish()
    run = started(tmp_path, resume_step=4)
    for step in range(5, 7):
        run.log(step, "train", {"loss": 2.0})
    run.finish()
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert [record.values["loss"] for record in read_metrics(tmp_path / METRICS_FILE)] == [1, 1, 1, 1, 2, 2]
    assert [path.name for path in tmp_path.iterdir()] == [METRICS_FILE]


def test_a_new_start_forgets_an_earlier_one(tmp_path):
    run = started(tmp_path)
    run.log(0, "valid", {"loss": 1.0})
    run.log(3, "train", {"loss": 1.0})
    run.finish()
    started(tmp_path).finish()
    assert steps_of(tmp_path) == []


@pytest.mark.reliability(
    "a kill within a line of metrics.jsonl, or a damaged line",
    "the unfinished line is dropped, a damaged one named",
)
def test_a_torn_last_line_is_dropped_and_a_damaged_one_named(tmp_path):
    path = tmp_path / METRICS_FILE
    whole = Record(1, "train", 0.0, {"loss": 1.0}).to_json() + "\n"
    path.write_text(whole + whole[:20])
    started(tmp_path, resume_step=1).finish()
    assert path.read_text() == whole
    path.write_text(whole + "nonsense\n" + whole)
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2 is no metrics record"):
        started(tmp_path, resume_step=1)


def test_other_ranks_write_nothing(tmp_path):
    run = started(tmp_path, enabled=False, wandb="offline", tensorboard=True, progress="always")
    run.log(1, "train", {"loss": 1.0})
    run.advance()
    run.finish({"test": {"click/auc": 0.5}})
    assert run.state_dict() == {"wandb_run_id": None}
    assert list(tmp_path.iterdir()) == []


def test_wandb_without_a_key_is_written_offline_and_resumes_the_same_run(tmp_path, offline_wandb):
    options = {"wandb": "auto", "group": "arms", "name": "bf16 seed 0", "tags": ["unit"]}
    run = started(tmp_path, **options)
    run.log(1, "train", {"loss": 1.0})
    state = run.state_dict()
    run.finish()
    resumed = tracker(tmp_path, **options)
    resumed.load_state_dict(json.loads(json.dumps(state)))
    resumed.start({}, total_steps=10, resume_step=1)
    resumed.log(2, "train", {"loss": 0.5})
    assert resumed.state_dict() == state
    assert wandb.run.group == "arms"
    assert wandb.run.name == "bf16 seed 0"
    assert wandb.run.tags == ("unit",)
    resumed.finish()
    assert wandb.run is None
    written = list(tmp_path.glob(f"wandb/offline-run-*-{state['wandb_run_id']}/run-*.wandb"))
    assert written
    assert all(path.stat().st_size > 0 for path in written)
    assert steps_of(tmp_path) == [1, 2]


@pytest.mark.reliability("W&B cannot start", "one warning; the run goes on")
def test_wandb_that_cannot_start_is_one_warning(tmp_path, offline_wandb, monkeypatch, caplog):
    def no_service(**options):
        raise wandb.errors.CommError("the service process did not start")

    monkeypatch.setattr(wandb, "init", no_service)
    run = started(tmp_path, wandb="online")
    run.log(1, "train", {"loss": 1.0})
    run.finish()
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 1
    assert "W&B FAILED" in warned[0]
    assert "did not start" in warned[0]
    assert run.state_dict() == {"wandb_run_id": None}
    assert steps_of(tmp_path) == [1]


@pytest.mark.reliability("W&B or TensorBoard breaks during a run", "one warning; metrics.jsonl is complete")
def test_a_mirror_that_breaks_on_the_way_is_dropped_once(tmp_path, monkeypatch, caplog):
    run = started(tmp_path, tensorboard=True)

    def disk_full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(run._mirrors["TensorBoard"].writer, "add_scalar", disk_full)
    for step in (1, 2, 3):
        run.log(step, "train", {"loss": 1.0})
    run.finish()
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 1
    assert "TensorBoard FAILED" in warned[0].getMessage()
    assert steps_of(tmp_path) == [1, 2, 3]


def test_tensorboard_shows_the_resumed_run(tmp_path):
    run = started(tmp_path, tensorboard=True)
    for step in (1, 2, 3):
        run.log(step, "train", {"loss": float(step)})
    run.finish()
    run = started(tmp_path, tensorboard=True, resume_step=1)
    run.log(2, "train", {"loss": 20.0})
    run.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 20.0)]


def test_progress_bar_shows_loss_ne_and_speed(tmp_path, capsys):
    run = started(tmp_path, progress="always", resume_step=4)
    run.advance()
    run.log(5, "train", {"loss": 0.5, "click/ne": 0.9876, "examples_per_s": 1234.0, "data_wait_share": 0.1})
    run.finish()
    bar = capsys.readouterr().err
    assert "5/10" in bar
    assert "loss 0.50000 click/ne 0.98760 examples_per_s 1,234" in bar
    assert "data_wait" not in bar


def test_no_bar_without_a_terminal(tmp_path, capsys, monkeypatch):
    for progress, terminal, shown in (("auto", False, False), ("auto", True, True), ("never", True, False)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal, raising=False)
        run = started(tmp_path, progress=progress)
        run.advance()
        run.finish()
        assert ("/10" in capsys.readouterr().err) == shown


def test_values_are_logged_when_no_bar_shows_them(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="train"):
        run = started(tmp_path)
        run.log(5, "train", {"loss": 0.5, "lr": 1e-5})
        run.finish({"test": {"click/auc": 0.75}})
    assert "step 5/10 train: loss 0.50000 lr 1e-05" in caplog.text
    assert "0.75000" in caplog.text


def test_table():
    table = format_table(
        {
            "valid": {"click/ne": 0.98765, "click/examples": 12345.0, "like/ne": math.nan, "examples_per_s": 4321.4},
            "test": {"click/ne": 1.5, "click/examples": 90.0},
        }
    )
    assert table.splitlines() == [
        "split   task       ne  examples",
        "valid  click  0.98765    12,345",
        "valid   like      nan          ",
        " test  click  1.50000        90",
        "valid examples_per_s 4,321",
    ]


@pytest.fixture
def restored_logging():
    logging.captureWarnings(False)  # a run in this process may have left it on, without effect on pytest's own capture
    root, show = logging.getLogger(), warnings.showwarning
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield
    logging.captureWarnings(False)
    for handler in root.handlers:
        handler.close()
    root.handlers, warnings.showwarning = handlers, show
    root.setLevel(level)
    for name in ("train", "modules", "kernels", "launch", "__main__"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def test_rank_0_logs_to_console_and_file(tmp_path, capsys, restored_logging):
    setup_logging(tmp_path, rank=0)
    logging.getLogger("train.trainer").info("ours")
    logging.getLogger("library").info("theirs")
    warnings.warn("careful", stacklevel=1)
    console, file = capsys.readouterr().err, (tmp_path / "train.log").read_text()
    for text in (console, file):
        assert "INFO train.trainer: ours" in text
        assert "theirs" not in text
        assert "careful" in text


def test_other_ranks_log_warnings_to_a_file_of_their_own(tmp_path, capsys, restored_logging):
    setup_logging(tmp_path, rank=3)
    logging.getLogger("train.trainer").info("ours")
    assert list(tmp_path.iterdir()) == []
    logging.getLogger("train.trainer").warning("trouble")
    assert capsys.readouterr().err == ""
    assert (tmp_path / "rank_3.log").read_text().endswith("WARNING train.trainer: trouble\n")
