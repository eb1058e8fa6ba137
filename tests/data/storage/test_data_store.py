"""The cache: which folder belongs to a file set, and how it appears."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from train.config.schema import EventsConfig
from train.data.storage import store


@pytest.mark.reliability("a data file is rewritten with the same size", "the data is prepared anew")
def test_a_file_rewritten_with_equal_size_is_another_file_set(tmp_path: Path) -> None:
    config, file = EventsConfig(cache_dir=str(tmp_path)), tmp_path / "events.csv"
    file.write_text("user,click\n1,0\n")
    before, modified = store.cache_folder(config, [file]), file.stat().st_mtime
    assert store.cache_folder(config, [file]) == before
    file.write_text("user,click\n1,1\n")
    os.utime(file, (modified + 1, modified + 1))
    assert store.cache_folder(config, [file]) != before


def save(folder: Path, arrays: dict[str, np.ndarray], meta: dict) -> None:
    for name, array in arrays.items():
        np.save(store.array_file(folder, name), array)
    store.save_meta(folder, meta)


def test_settings_of_the_loader_prepare_nothing_anew() -> None:
    usual = EventsConfig()
    loading = EventsConfig(batch_size=1, eval_batch_size=2, num_workers=3, prefetch=4, max_history=5, pad_events=6)
    assert store.cache_folder(loading, []) == store.cache_folder(usual, [])
    assert store.cache_folder(EventsConfig(negative_rate=0.5), []) == store.cache_folder(usual, [])
    assert store.cache_folder(EventsConfig(min_count=2), []) != store.cache_folder(usual, [])


def test_the_folder_has_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    folder, plain = tmp_path / "cache" / "data", tmp_path / "plain"
    before = os.umask(0o027)
    try:
        store.prepare_once(folder, lambda partial: save(partial, {}, {}), lambda make: make())
        plain.mkdir()
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent, plain)}
    assert modes == {0o750}


@pytest.mark.reliability(
    "the disk is full when data is prepared",
    "the error names the folder and the key that moves it",
)
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    def prepare(partial: Path) -> None:
        raise OSError("3964 requested and 3056 written")  # as numpy tells it

    with pytest.raises(OSError, match=r"cache/data could not be prepared \(3964 .* MiB are free .* data\.cache_dir"):
        store.prepare_once(tmp_path / "cache" / "data", prepare, lambda make: make())
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/data could not be prepared \(.* Not a directory.* data\.cache_dir"):
        store.prepare_once(tmp_path / "file" / "data", prepare, lambda make: make())


def test_arrays_come_back_under_their_names(tmp_path: Path) -> None:
    arrays = {
        name: np.arange(len(name)) for name in ("plain", "history.x.ids", "list.a/b", "100%", "..", "\u0939" * 80)
    }
    save(tmp_path, arrays, {"key": [1]})
    loaded = store.Arrays(tmp_path)
    assert loaded.keys() == arrays.keys()
    assert all(np.array_equal(loaded[name], array) for name, array in arrays.items())
    assert store.load_meta(tmp_path) == {"key": [1]}


@pytest.mark.parametrize("file", ["numbers.npy", "meta.json", "manifest.json", "vocabulary.parquet"])
@pytest.mark.reliability(
    "a prepared file is corrupt, cut short or lost",
    "a warning names it; the data is prepared anew",
)
def test_a_damaged_cache_is_prepared_anew(file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, prepared = tmp_path / "data", []

    def prepare(partial: Path) -> None:
        prepared.append(partial)
        save(partial, {"numbers": np.arange(1000)}, {"key": 1})
        (partial / "vocabulary.parquet").write_bytes(b"ids")

    def again() -> int:
        store.prepare_once(folder, prepare, lambda make: make())
        return len(prepared)

    assert (again(), again()) == (1, 1)
    data = bytearray((folder / file).read_bytes())
    data[len(data) // 2] ^= 128
    (folder / file).write_bytes(data)
    assert again() == 2
    assert "is damaged (" in caplog.text
    assert file in caplog.text.partition("is damaged (")[2]
    (folder / file).write_bytes(data[:-1])
    assert again() == 3
    (folder / file).unlink()
    assert again() == 4
    assert store.Arrays(folder)["numbers"].tolist() == list(range(1000))


def test_a_file_that_is_cut_short_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    store.prepare_once(folder, lambda partial: save(partial, {"numbers": np.arange(1000)}, {}), lambda make: make())
    os.truncate(folder / "numbers.npy", 4000)
    with pytest.raises(RuntimeError, match=r"numbers.npy of the prepared data in .*/data had 8,128 bytes .* has 4,000"):
        store.Arrays(folder)
