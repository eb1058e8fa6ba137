"""Vectors of a trained model as files: whose they are, what they are, and that another model trains on them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from modules.pretrained import PretrainedModel
from tests.data.sources import whole
from tests.launching import EVENTS_DLRM, ROOT, train_here
from train.build import Job, load_model
from train.checkpoint import load as checkpoint
from train.commands import vectors
from train.config.compose import from_dict
from train.config.schema import SyntheticConfig
from train.data import SyntheticSource, build_source
from train.data.source import PreparedSource

ROWS, DIM = 300, 8
WIDTH = 2 * DIM  # of a DLRM's requests: the user's token and the mean of the history


def overrides(folder: Path, files: str = "rows.parquet") -> list[str]:
    return [
        f"data.root={folder}", f"data.cache_dir={folder}/cache", f"data.files=[{files}]", "data.request=visit",
        "+data.histories={seen: {fields: [item]}}", "data.batch_size=16", "runtime.steps=2", "data.statistics=none",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory; the rows are beside it."""
    folder = tmp_path_factory.mktemp("teacher")
    generator = np.random.default_rng(0)
    visits = np.repeat(np.arange(ROWS), generator.integers(1, 4, ROWS))[:ROWS]  # of one to three rows
    table = {
        "user": [f"user {number}" for number in (visits * 7 % 11)],
        "visit": [f"visit {number}" for number in visits],
        "item": generator.integers(25, size=ROWS),
        "time": 1000 * visits + np.arange(ROWS) % 3,
        "click": generator.integers(2, size=ROWS),
    }
    order = generator.permutation(ROWS)
    pq.write_table(pa.table(table).take(pa.array(order)), folder / "rows.parquet")
    train_here(folder / "run", *overrides(folder), base=EVENTS_DLRM)
    return folder / "run"


def loaded(run_dir: Path) -> tuple[PretrainedModel, PreparedSource]:
    path = checkpoint.resolve(str(run_dir), "")
    config = from_dict(checkpoint.read_meta(path)["config"], [])
    source = build_source(config.data)
    assert isinstance(source, PreparedSource)
    return load_model(path, config, source, 8, torch.device("cpu")), source


def written(out: Path, name: str) -> pa.Table:
    return pq.read_table(out / name).combine_chunks()


def matrix(column: pa.ChunkedArray) -> np.ndarray:
    return np.stack(column.to_numpy(zero_copy_only=False))


def test_rows_of_a_table_have_the_ids_of_the_files(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vectors, "CHUNK", 7)
    vectors.main([f"run_dir={teacher}", "of=table.item,table.user", f"out={tmp_path}", "vector=embedding"])
    model, source = loaded(teacher)
    said = capsys.readouterr().out
    for table in ("item", "user"):
        found = written(tmp_path, f"table.{table}")
        weight = model.state_dict()[f"embedding.collection.embeddings.{table}.weight"]
        assert found.column_names == ["row", "id", "embedding"]
        known = pq.read_table(teacher / "vocabulary" / f"{table}.parquet")
        assert found["id"].to_pylist() == known["value"].to_pylist()
        assert found["row"].to_pylist() == known["row"].to_pylist() == list(range(1, source.spec.tables[table]))
        np.testing.assert_array_equal(matrix(found["embedding"]), weight[1:].numpy())
        assert f"table.{table}: {found.num_rows} vectors in {tmp_path}" in said
        assert found.schema.metadata[b"model"] == b"dlrm"


def test_requests_have_their_users_times_and_rows(teacher: Path, tmp_path: Path) -> None:
    vectors.main([f"run_dir={teacher}", "of=requests", "split=train,valid,test", "columns=visit", f"out={tmp_path}"])
    found, rows = written(tmp_path, "requests"), pq.read_table(teacher.parent / "rows.parquet")
    assert found.column_names == ["split", "user", "time", "rows", "visit", "vector"]
    assert sorted(pc.list_flatten(found["rows"]).to_pylist()) == list(range(ROWS))
    for user, time, own, visit in zip(*(found[name].to_pylist() for name in found.column_names[1:5]), strict=True):
        assert {rows[name][row].as_py() for name in ("user",) for row in own} == {user}
        assert {rows["visit"][row].as_py() for row in own} == {visit}
        assert min(rows["time"][row].as_py() for row in own) == time
    model, source = loaded(teacher)
    model.arch.gives_vectors = True
    for split in ("train", "valid", "test"):
        batch = whole(source, split)
        with torch.no_grad():
            expected = model(batch)
        own = found.filter(pc.equal(found["split"], split))
        assert own["time"].to_pylist() == batch.request_time.tolist()
        np.testing.assert_allclose(matrix(own["vector"]), expected.numpy(), atol=1e-6)


@pytest.fixture(scope="module")
def exported(teacher: Path) -> Path:
    """Vectors of the teacher for a student."""
    names = ["of=requests,table.item", "split=train,valid,test", "columns=visit", "vector=teacher"]
    return vectors.main([f"run_dir={teacher}", *names])


def source_of_run(run_dir: Path) -> PreparedSource:
    source = build_source(from_dict(checkpoint.read_meta(checkpoint.resolve(str(run_dir), ""))["config"], []).data)
    assert isinstance(source, PreparedSource)
    return source


def test_a_student_reads_vectors_of_requests_and_begins_with_the_tables(
    teacher: Path, exported: Path, tmp_path: Path
) -> None:
    """As docs/losses.md says: found by a join, beside tables that both have."""
    train_here(
        tmp_path / "student",
        *overrides(teacher.parent),
        "model=dcnv2",
        f"data.joins=[{{files: ['{exported}/requests'], column: visit}}]",
        f"+data.request_vectors={{teacher: {{width: {WIDTH}, scale: none}}}}",
        f"data.vocabulary_of={teacher}",
        f"checkpoint.load={teacher}",
        "checkpoint.load_what=partial",
        "optimizer.frozen=['*.embeddings.*']",
        base=EVENTS_DLRM,
    )
    found, batch = written(exported, "requests"), whole(source_of_run(tmp_path / "student"))
    expected = found.filter(pc.equal(found["split"], "train"))
    np.testing.assert_array_equal(batch.request_dense.numpy(), matrix(expected["teacher"]))
    states = [checkpoint_weights(run_dir) for run_dir in (teacher, tmp_path / "student")]
    for table in ("item", "user"):
        name = f"embedding.collection.embeddings.{table}.weight"
        assert torch.equal(states[0][name], states[1][name])
    name = "embedding.assemble.request_vectors.0.weight"
    assert name not in states[0]
    assert states[1][name].shape == (DIM, WIDTH)


def checkpoint_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return dict(loaded(run_dir)[0].state_dict())


def test_a_student_reads_vectors_of_items_by_id_and_of_requests_by_rows(
    teacher: Path, exported: Path, tmp_path: Path
) -> None:
    (block,) = re.findall(r"```python\n(rows, found = .*?)```", (ROOT / "docs/losses.md").read_text(), re.DOTALL)
    files = {"log.parquet": teacher.parent / "rows.parquet", "runs/teacher/vectors/requests": exported / "requests"}
    for name, file in files.items():
        block = block.replace(name, str(file))
    names: dict[str, Any] = {"pa": pa, "pc": pc, "pq": pq, "np": np}
    exec(block, names)
    rows, found = names["rows"], names["found"]
    pq.write_table(rows, tmp_path / "rows.parquet")
    of_table = f"files: ['{exported}/table.item'], id: id, vector: teacher"
    train_here(
        tmp_path / "student",
        *overrides(tmp_path),
        f"+data.request_vectors={{teacher: {{width: {WIDTH}, scale: none}}}}",
        f"+data.table_vectors={{content: {{{of_table}, width: {DIM}, scale: none}}}}",
        "+data.transforms={content: {copy: item}}",
        "data.candidate_categorical=[item,content]",
        base=EVENTS_DLRM,
    )
    source = source_of_run(tmp_path / "student")
    batch = whole(source)
    expected = found.filter(pc.equal(found["split"], "train"))
    np.testing.assert_array_equal(batch.request_dense.numpy(), matrix(expected["teacher"]))
    table = written(exported, "table.item")
    of_items = dict(zip(table["id"].to_pylist(), matrix(table["teacher"]), strict=True))
    content = source.vectors("content")[batch.candidate_sparse["content"].values().numpy()]
    items = [str(rows["item"][row].as_py()) for row in batch.row.tolist()]
    np.testing.assert_array_equal(content, [of_items[item] for item in items])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["of=table.items"], r"of=table.items: the tables of this run are user, item, e.g. of=table.user"),
        (["of=items"], r"of=items: model.name=dlrm scores items together .* sasrec, hstu and two_tower have"),
        (["of=users"], r"of=users: name requests, items or table.NAME"),
        (["of=requests", "columns=vist"], r"no column 'vist': .*rows.parquet has"),
        (["of=requests", "columns=time"], r"'time' would be two columns; choose another"),
        (["of=requests", "split=all"], r"split=all is not known; choose train, valid, test"),
    ],
)
def test_what_there_is_not_is_said(teacher: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vectors.main([f"run_dir={teacher}", *arguments, f"out={tmp_path}"])


def test_tables_without_a_vocabulary_are_shared_out_by_their_rows() -> None:
    source = SyntheticSource(SyntheticConfig(num_items=2 * vectors.CHUNK + 5, num_categories=3))
    jobs = [SimpleNamespace(source=source, world=SimpleNamespace(rank=rank, size=2)) for rank in range(2)]
    pieces = [list(vectors.rows_of_ids(cast(Job, job), "item")) for job in jobs]
    assert [[piece.num_rows for piece in own] for own in pieces] == [[vectors.CHUNK, 5], [vectors.CHUNK, 0]]
    assert {tuple(piece.schema.names) for own in pieces for piece in own} == {("row",)}
    rows = sorted(row for own in pieces for piece in own for row in piece["row"].to_pylist())
    assert rows == list(range(1, source.spec.tables["item"]))
