"""A scorer that follows what a run publishes: whole versions, bit for bit, whatever is killed on either side."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modules.batch import RequestBatch
from modules.config import ManagedTable, ModelConfig
from modules.models import MODELS
from modules.models.baselines import DIN, DCNv2
from modules.pretrained import PretrainedModel
from tests.serving.conftest import Rows
from train.checkpoint.publish import Place, Publisher
from train.serving import following
from train.serving.asgi import App
from train.serving.following import PIN, Follower
from train.serving.scorer import Scorer
from train.serving.service import Service

Export = Callable[[ModelConfig, Rows], tuple[Path, PretrainedModel]]
State = dict[str, Tensor]
DCN = MODELS["dcnv2"].Config(dim=8)  # type: ignore[operator]
DIN_SMALL = DIN.Config(dim=8, hidden=[16])
FEW_WEIGHTS = DCNv2.Config(dim=8, rank=2, num_layers=1, hidden=[8])  # beside its tables
MANAGED = DIN.Config(dim=8, hidden=[16], managed_tables={"item": ManagedTable(rows=12)})


class Training:
    """Stands in for a run: a state that a step changes in a few rows of each table and all of the dense part."""

    def __init__(self, model: PretrainedModel) -> None:
        self.state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self.generator = torch.Generator().manual_seed(1)
        self.steps = 0

    def step(self) -> State:
        self.steps += 1
        for name, tensor in self.state.items():
            if not tensor.is_floating_point():
                continue
            rows = torch.randint(len(tensor), (2,), generator=self.generator) if ".embeddings." in name else slice(None)
            tensor[rows] += torch.randn(tensor[rows].shape, generator=self.generator)
        for name, ids in self.state.items():
            if name.endswith("_mch_sorted_raw_ids"):  # as two ranks leave it, each with its own in order
                rows_of_ids = self.state[name.replace("sorted_raw_ids", "remapped_ids_mapping")]
                half = len(ids) // 2
                for first, start in ((0, 0), (half, 10)):
                    ids[first : first + half] = (
                        start + torch.randperm(10, generator=self.generator)[:half].sort().values
                    )
                    rows_of_ids[first : first + half] = first + torch.randperm(half, generator=self.generator)
        return self.state

    def touch(self) -> State:
        """A step that changes one row."""
        self.steps += 1
        self.state["embedding.collection.embeddings.item.weight"][self.steps % 20] += 1
        return self.state


def scores(scorer: Scorer, rows: Rows) -> Tensor:
    return torch.cat([scorer(rows.batch([number])) for number in (3, 60, 90)])


def served(state: State, folder: Path, tmp_path: Path, rows: Rows) -> Tensor:
    """Scores of an export whose weights are these."""
    model = PretrainedModel.from_pretrained(folder)
    model.load_state_dict({name: tensor.clone() for name, tensor in state.items()})
    arch = model.eval()
    with torch.no_grad():
        found = [arch(rows.batch([number])).sigmoid() for number in (3, 60, 90)]
    return torch.cat(found)


@pytest.mark.parametrize(
    ("config", "place"),
    [(DCN, "folder"), (DIN_SMALL, "folder"), (DIN_SMALL, "memory"), (MANAGED, "folder")],
    ids=["program", "eager", "object store", "managed"],
)
def test_served_is_trained_bit_for_bit(
    config: ModelConfig, place: str, ranking: Rows, exported: Export, tmp_path: Path
) -> None:
    folder, model = exported(config, ranking)
    url = str(tmp_path / "published") if place == "folder" else f"memory://{tmp_path}"
    training, scorer = Training(model), Scorer(folder)
    publisher = Publisher(Place(url), "run", ranking.source.fingerprint)
    follower, late = Follower(scorer, url), Follower(Scorer(folder), url)
    assert not follower.look()
    for _ in range(3):
        publisher.publish(training.step(), training.steps)
        assert follower.look()
        assert (follower.version, follower.error) == (training.steps, None)
        assert_served(scorer, training.state)
    assert len({file.stat().st_mode for file in [folder / "model.safetensors", *tmp_path.glob("published/*")]}) == 1
    assert late.look()
    assert_served(late.scorer, training.state)
    assert torch.equal(scores(scorer, ranking), served(training.state, folder, tmp_path, ranking))


def assert_served(scorer: Scorer, state: State) -> None:
    sorted_state = dict(state)
    for name in state:
        if name.endswith("_mch_sorted_raw_ids"):
            partner = name.replace("sorted_raw_ids", "remapped_ids_mapping")
            sorted_state[name], order = state[name].sort(stable=True)
            sorted_state[partner] = state[partner][order]
    for name, tensors in scorer.weights().items():
        for tensor in tensors:
            assert torch.equal(tensor, sorted_state[name]), name


def is_version(scorer: Scorer, states: list[State]) -> bool:
    weights = scorer.weights()
    return any(all(torch.equal(each, state[name]) for name in weights for each in weights[name]) for state in states)


class Killed(BaseException):
    pass


@contextmanager
def killed_after(count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Everything that is done at a place, or to the rows that are served, is a step; the process ends before one."""
    done: list[str] = []

    def counted(owner: object, name: str) -> None:
        original = getattr(owner, name)

        def step(*arguments: object) -> object:
            done.append(name)
            if len(done) == count + 1:
                raise Killed
            return original(*arguments)

        patch.setattr(owner, name, step)

    with monkeypatch.context() as patch:
        for name in ("names", "put", "text", "get", "delete", "versions"):
            counted(Place, name)
        counted(__import__("os"), "replace")
        counted(following.Rows, "swap")
        with suppress(Killed):
            yield done


@pytest.mark.reliability(
    "a run or scorer is killed at any step of a publication",
    "the scorer serves a complete version and, after a restart, the newest, bit for bit",
)
def test_a_run_that_is_killed_while_it_publishes(
    ranking: Rows, exported: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = exported(DIN_SMALL, ranking)
    scorer = Scorer(folder)
    for count in range(40):
        url = tmp_path / str(count)
        training, states = Training(model), []
        publisher = Publisher(Place(url), "run", ranking.source.fingerprint)
        follower = Follower(scorer, url)
        publisher.publish(training.step(), 1)
        assert follower.look()
        with killed_after(count, monkeypatch) as done:
            for _ in range(2):
                states.append({name: tensor.clone() for name, tensor in training.step().items()})
                publisher.publish(training.state, training.steps)
            Publisher(Place(url), "run", ranking.source.fingerprint).publish(training.state, training.steps)
        follower.look()
        assert follower.error is None
        assert is_version(follower.scorer, [training.state, *states]) or follower.version == 1
        publisher = Publisher(Place(url), "run", ranking.source.fingerprint)  # started again
        publisher.publish(training.step(), training.steps)
        assert follower.look()
        assert_served(follower.scorer, training.state)
        assert not list(url.glob(".partial*"))
        if len(done) <= count:
            break
    else:
        raise AssertionError("a publication has more steps than this test expects")


@pytest.mark.reliability(
    "a scorer is killed, or runs out of memory, at any step of an update",
    "it serves one complete version, and reaches the newest, bit for bit",
)
@pytest.mark.parametrize("runs", [False, True], ids=["starting", "following"])
def test_a_scorer_that_is_killed_while_it_follows(
    runs: bool, ranking: Rows, exported: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = exported(DIN_SMALL, ranking)
    training, states = Training(model), [dict(model.state_dict())]
    publisher = Publisher(Place(tmp_path), "run", ranking.source.fingerprint)
    for step in (1, 2, 3):
        states.append({name: tensor.clone() for name, tensor in training.step().items()})
        publisher.publish(training.state, step)
    for count in range(100):
        follower = Follower(Scorer(folder), tmp_path)
        if runs:
            (tmp_path / PIN).write_text("1")
            assert follower.look()
            (tmp_path / PIN).unlink()
        with killed_after(count, monkeypatch) as done:
            follower.look()
        assert is_version(follower.scorer, states)
        follower = follower if runs else Follower(Scorer(folder), tmp_path)
        follower.look()
        assert (follower.version, follower.error) == (3, None)
        assert_served(follower.scorer, training.state)
        if len(done) <= count:
            break
    else:
        raise AssertionError("to follow takes more steps than this test expects")


@pytest.mark.reliability(
    "the folder or store that a scorer follows is emptied",
    "it keeps its version, with a warning, until the run's next complete one",
)
def test_a_place_that_begins_anew(
    ranking: Rows, exported: Export, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = exported(DIN_SMALL, ranking)
    for before, after in ((3, 1), (1, 1), (1, 2), (2, 4)):
        place = tmp_path / f"{before} {after}"
        training, follower = Training(model), None
        for count in (before, after):
            publisher = Publisher(Place(place), "run", ranking.source.fingerprint)
            follower = follower or Follower(Scorer(folder), place)
            assert not follower.look()
            assert f"{place} holds no version" in caplog.messages[-1]
            for _ in range(count):
                publisher.publish(training.step(), training.steps)
            assert follower.look()
            assert_served(follower.scorer, training.state)
            about = json.loads((place / f"{publisher.version:08d}.json").read_text())
            for file in place.iterdir():
                file.unlink()
    old = about | {"version": 3, "previous": None, "time": about["time"] - 1}  # of a listing that is out of date
    (place / "00000003.json").write_text(json.dumps(old))
    assert not follower.look()
    assert "the newest of" in str(follower.error)
    assert_served(follower.scorer, training.state)
    assert publisher.publish(training.step(), training.steps)["base"]  # or scorers that start would find none
    assert follower.look()


def test_a_folder_that_is_not_there_is_not_followed(ranking: Rows, exported: Export, tmp_path: Path) -> None:
    scorer = Scorer(exported(DIN_SMALL, ranking)[0])
    with pytest.raises(ValueError, match=f"no folder {tmp_path}/a/b to follow, but {tmp_path};"):
        Follower(scorer, tmp_path / "a/b")
    assert not list(tmp_path.iterdir())


@pytest.mark.reliability("publishing to a folder fails", "training continues; the next version is complete")
def test_a_publication_that_fails_is_made_good_by_the_next(
    ranking: Rows, exported: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = exported(DIN_SMALL, ranking)
    training, follower = Training(model), Follower(Scorer(folder), tmp_path)
    publisher = Publisher(Place(tmp_path), "run", ranking.source.fingerprint)
    publisher.publish(training.step(), 1)
    follower.look()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Place, "put", full)
        with pytest.raises(OSError, match="No space left"):
            publisher.publish(training.step(), 2)
    assert not follower.look()
    assert publisher.publish(training.step(), 3) | {"bytes": 0} == {"version": 3, "bytes": 0, "base": 1}
    assert follower.look()
    assert_served(follower.scorer, training.state)


@pytest.mark.reliability(
    "a run publishes a thousand versions (100 in `make test`)",
    "the folder stays below three times the weights; the scorer keeps up",
)
@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.nightly)])
def test_many_publications_take_bounded_room(count: int, ranking: Rows, exported: Export, tmp_path: Path) -> None:
    folder, model = exported(FEW_WEIGHTS, ranking)
    training, follower = Training(model), None
    publisher, bases = Publisher(Place(tmp_path), "run", ranking.source.fingerprint), 0
    whole = publisher.publish(training.step(), 1)["bytes"]
    for _ in range(count):
        version = publisher.publish(training.touch(), training.steps)
        assert version["base"] or version["bytes"] < whole / 3
        bases += version["base"]
        if training.steps % 10 == 0:
            follower = follower or Follower(Scorer(folder), tmp_path)
            follower.look()
            assert (follower.version, follower.error) == (version["version"], None)
            assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) < 3 * whole
    assert bases
    assert follower
    follower.look()
    assert_served(follower.scorer, training.state)


def test_gaps_other_runs_other_data_and_damage_are_refused(ranking: Rows, exported: Export, tmp_path: Path) -> None:
    folder, model = exported(DIN_SMALL, ranking)
    training, follower = Training(model), Follower(Scorer(folder), tmp_path)
    publisher = Publisher(Place(tmp_path), "run", ranking.source.fingerprint)
    publisher.publish(training.step(), 1)
    follower.look()
    first = {name: tensor.clone() for name, tensor in training.state.items()}
    publisher.publish(training.step(), 2)
    manifest, file = tmp_path / "00000002.json", tmp_path / "00000002.0.safetensors"
    about, values = json.loads(manifest.read_text()), file.read_bytes()

    def refused(expected: str) -> None:
        assert not follower.look()
        assert expected in str(follower.error)
        assert_served(follower.scorer, first)

    for change, expected in (
        ({"run": "other"}, "another run's"),
        ({"data_fingerprint": "other"}, "of other ids"),
        ({"previous": 7}, "00000002.json is no manifest that is read here (previous=7"),
        ({"files": {"../x": {"bytes": 1, "crc32": 1}}}, "00000002.json is damaged (files names '../x'"),
        ({"files": {"x": {"bytes": 1, "crc32": 1}}}, "00000002.json is damaged (files names 'x'"),
        ({"files": {file.name: {"bytes": 1}}}, "00000002.json is damaged (files.00000002.0.safetensors="),
        ({"step": "2"}, "00000002.json is damaged (step='2' is no int)"),
        ({"time": None}, "00000002.json is damaged (time=None is no float)"),
        ({"format": 2}, "(format=2 is none of (1,)"),
    ):
        manifest.write_text(json.dumps(about | change))
        refused(expected)
    for text in ("{", "[]", "[" * 100_000):
        manifest.write_text(text)
        refused("00000002.json is damaged")
        with pytest.raises(ValueError, match=r"00000002\.json is damaged"):
            Publisher(Place(tmp_path), "run", "")
    manifest.write_text(json.dumps(about))
    file.write_bytes(values[:-1] + b"x")
    refused("damaged")
    file.unlink()
    refused("cannot be read")
    file.write_bytes(values)
    assert follower.look()
    publisher.publish(training.touch(), 3)
    publisher.publish(training.touch(), 4)
    (tmp_path / "00000003.json").unlink()
    assert not follower.look()
    assert "version 4 follows 3, and 2 is served" in str(follower.error)
    with pytest.raises(ValueError, match=r"the run run has published.*publish\.to="):
        Publisher(Place(tmp_path), "other", "")


def test_a_base_has_all_values_of_every_weight_and_nothing_else(
    ranking: Rows, exported: Export, tmp_path: Path
) -> None:
    folder, model = exported(DIN_SMALL, ranking)
    scorer, state = Scorer(folder), model.state_dict()
    name = "embedding.collection.embeddings.item.weight"
    for number, (change, expected) in enumerate(
        (
            ({name: state[name][:-1]}, f"the base has {(len(state[name]) - 1) * 8} of {state[name].numel()} values"),
            ({name: torch.cat([state[name]] * 2)}, "rows here, others are published"),
            ({name: state[name].double()}, "other values are published"),
            ({"x": torch.zeros(1)}, "the export has no x"),
        )
    ):
        place = tmp_path / str(number)
        Publisher(Place(place), "run", ranking.source.fingerprint).publish({**state, **change}, 1)
        follower = Follower(scorer, place)
        assert not follower.look()
        assert expected in str(follower.error)
    assert_served(scorer, state)
    Publisher(Place(tmp_path), "run", ranking.source.fingerprint).publish(state, 1)
    follower = Follower(scorer, tmp_path)
    follower._targets["empty"] = [torch.zeros(0, 8)]  # nothing is published of a weight without rows
    assert follower.look(), follower.error


def test_a_pin_goes_back_by_one_and_holds(ranking: Rows, exported: Export, tmp_path: Path) -> None:
    folder, model = exported(DIN_SMALL, ranking)
    training, follower = Training(model), Follower(Scorer(folder), tmp_path)
    publisher, states = Publisher(Place(tmp_path), "run", ranking.source.fingerprint), []
    for step in (1, 2, 3):
        states.append({name: tensor.clone() for name, tensor in training.step().items()})
        publisher.publish(training.state, step)
        follower.look()
    (tmp_path / PIN).write_text("2\n")
    assert follower.look()
    assert not follower.look()
    assert_served(follower.scorer, states[1])
    (tmp_path / PIN).write_text("1")
    assert not follower.look()
    assert "version 1 is not the one before 2" in str(follower.error)
    (tmp_path / PIN).unlink()
    assert follower.look()
    assert_served(follower.scorer, states[2])


def test_calls_are_scored_with_one_version_each(ranking: Rows, exported: Export, tmp_path: Path) -> None:
    folder, model = exported(DIN_SMALL, ranking)
    training, scorer = Training(model), Scorer(folder)
    publisher, follower = Publisher(Place(tmp_path), "run", ranking.source.fingerprint), Follower(scorer, tmp_path)
    batch, found, ended = ranking.batch([60]), [], threading.Event()

    def call() -> None:
        while not ended.is_set():
            found.append(scorer(batch))

    expected = [scorer(batch)]
    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        publisher.publish(training.step(), training.steps)
        follower.look()
        expected.append(scorer(batch))
    ended.set()
    for thread in threads:
        thread.join()
    for result in found:
        assert any(torch.allclose(result, each, rtol=1e-5, atol=1e-6) for each in expected)


def test_all_groups_of_a_call_are_scored_with_one_version(
    ranking: Rows, exported: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.serving.service.MOST_PADDED", 1)
    folder, model = exported(DIN_SMALL, ranking)
    service, request = Service.from_pretrained(folder), ranking.request(60)
    expected = service([request])
    Publisher(Place(tmp_path), "run", ranking.source.fingerprint).publish(Training(model).step(), 1)
    follower, score = Follower(service.scorer, tmp_path), Scorer.__call__
    looking = threading.Thread(target=follower.look)

    def scored(scorer: Scorer, batch: RequestBatch) -> Tensor:
        found = score(scorer, batch)
        if not looking.ident:
            looking.start()
            while not scorer.gate._closed and looking.is_alive():
                time.sleep(0.001)
        return found

    monkeypatch.setattr(Scorer, "__call__", scored)
    assert service([request] * 3) == expected * 3
    looking.join(60)
    assert follower.version == 1
    assert service([request]) != expected


def test_a_server_tells_how_stale_it_is(ranking: Rows, exported: Export, tmp_path: Path) -> None:
    folder, model = exported(DIN_SMALL, ranking)
    Publisher(Place(tmp_path), "run", ranking.source.fingerprint).publish(Training(model).step(), 7)
    service = Service.from_pretrained(folder)
    follower = Follower(service.scorer, tmp_path)
    follower.look()
    app = App(service, follower)
    follower.stop()
    text = app.metrics.text(follower.metrics())
    assert "\ngemsmith_model_version 1\n" in text
    assert "\ngemsmith_model_step 7\n" in text
    assert 0 <= float(text.split("gemsmith_model_age_seconds ")[-1].split("\n")[0]) < 600


def test_a_server_stops_while_a_version_is_read(
    ranking: Rows, exported: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, reading, end = (
        Service.from_pretrained(exported(DIN_SMALL, ranking)[0]),
        threading.Event(),
        threading.Event(),
    )

    def slow(place: Place) -> list[int]:
        reading.set()
        end.wait(20)
        return []

    monkeypatch.setattr(Place, "versions", slow)
    app = App(service, Follower(service.scorer, tmp_path))
    assert reading.wait(10)
    begun = time.monotonic()
    asyncio.run(app._drain())
    assert time.monotonic() - begun < 5
    end.set()
    assert app.follower is not None
    app.follower.stop()
