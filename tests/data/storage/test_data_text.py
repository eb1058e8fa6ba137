"""Rows of text files beside an independent reader, in blocks of a few bytes: every row is read or skipped."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.sources import events_config, source_of, whole
from train.config.schema import EventsConfig, HistoryConfig, JoinConfig, TableVectorsConfig
from train.data import build_source
from train.data.storage import records, text
from train.data.storage.records import Layout

NAMES = ["user", "time", "title"]


def read(path: Path, content: str | bytes, skip: bool = False, **layout: object) -> tuple[list[tuple], int, int]:
    """(values, rows skipped, rows in all)."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    skipped: list[int] = []
    values, total = [], 0
    for table, number, end in text.pieces(path, NAMES, Layout(**layout), skip, lambda rows, _: skipped.append(rows)):
        assert len(number) == table.num_rows
        assert not len(number) or (total <= number.min() and number.max() < end)
        total = end
        values += zip(*(table[name].to_pylist() for name in NAMES), strict=True)
    return values, sum(skipped), total


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("quoted", [True, None], ids=["quoted", "unsaid"])
def test_quoted_files_read_as_the_standard_says(tmp_path, monkeypatch, seed, quoted):
    draw = random.Random(seed)
    monkeypatch.setattr(records, "BLOCK", draw.choice([3, 40, 1000]))
    separator, ending = draw.choice([",", "\t", "|", "::", "¦"]), draw.choice(["\n", "\r\n", "\r"])
    always = draw.random() < 0.3
    pieces = ["a", "bc", "", " ", '"', '""', separator, "\n", "x\ny", 'in "it"', "é"]
    rows = [(str(i), str(i), "".join(draw.choices(pieces, k=draw.randrange(5)))) for i in range(30)]

    def field(value: str) -> str:
        special = any(part in value for part in (separator, '"', "\n"))
        return '"' + value.replace('"', '""') + '"' if always or special else value

    lines = [separator.join(map(field, row)) for row in [tuple(NAMES), *rows]]
    content = ending.join(lines) + (ending if draw.random() < 0.5 else "")
    values, skipped, total = read(tmp_path / "a.csv", content, separator=separator, quoted=quoted)
    # As the standard says, of a separator of one character.
    plain = list(csv.reader(io.StringIO(content.replace(separator, "\x1f"), newline=""), delimiter="\x1f"))[1:]
    assert values == [tuple(value.replace("\x1f", separator) or None for value in row) for row in plain]
    assert (skipped, total) == (0, 30)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("quoted", [False, None], ids=["unquoted", "unsaid"])
def test_files_without_quotes_keep_every_line(tmp_path, monkeypatch, caplog, seed, quoted):
    """A quote at the start or the end of a title is part of it, wherever the next one is."""
    draw = random.Random(seed)
    monkeypatch.setattr(records, "BLOCK", draw.choice([3, 50, 1000, 1 << 22]))
    titles = ['"Crocodile Dundee', 'the end"', 'disk of 7" size', "plain", '"', '"An open one, "twice', 'x"y"z']
    rows = [(str(i), str(1000 * i), draw.choice(titles)) for i in range(60)]
    content = "".join("\t".join(row) + "\n" for row in [tuple(NAMES), *rows])
    with caplog.at_level(logging.WARNING):
        values, skipped, total = read(tmp_path / "a.tsv", content, separator="\t", quoted=quoted)
    assert values == rows
    assert (skipped, total) == (0, 60)
    opened = [row for row in rows if row[2].startswith('"')]
    assert quoted is False or (f"in {len(opened)} rows, from row" in caplog.text) == bool(opened)


@pytest.mark.parametrize("block", [5, 1 << 22])
@pytest.mark.parametrize(
    ("line", "flaw"),
    [
        ("7,8", "2 columns, expected 3: '7,8'"),
        ("7,8,x,y", "4 columns, expected 3"),
        ('7,"8,x', r"2 columns, expected 3: '7,\"8,x' \(data.csv_quotes=false takes quotes as text\)"),
        (b"7,8,\xff", r"column 'title' is b'\\xff', expected UTF-8 text"),
        (b"7,\xff", "2 columns, expected 3"),
    ],
)
def test_a_malformed_row_is_one_row(tmp_path, monkeypatch, block, line, flaw):
    monkeypatch.setattr(records, "BLOCK", block)
    lines = ["user,time,title", *(f"{i},{i},t{i}" for i in range(4)), line, "", *(f"{i},{i},t{i}" for i in range(4, 9))]
    content = b"\n".join(each if isinstance(each, bytes) else each.encode() for each in lines)
    if b'"' in content:
        content = content.replace(b'7,"8,x', b'7,"8,x"')
        flaw = r"2 columns, expected 3.*csv_quotes=false"
    with pytest.raises(ValueError, match=rf"a\.csv, row 5: .*{flaw}"):
        read(tmp_path / "a.csv", content)
    values, skipped, total = read(tmp_path / "a.csv", content, skip=True)
    assert [row[2] for row in values] == [f"t{i}" for i in range(9)]
    assert (skipped, total) == (1, 10)


def test_what_quotes_mean_can_be_said_and_is_asked_for(tmp_path):
    """Two columns of words, which do not tell whether the lines are rows."""
    content = 'user,time,title\na,b,"one\nc,d,two"\ne,f,g\n'
    with pytest.raises(ValueError, match=r"row 1: a quote .* closes 1 lines below.*csv_quotes=false .*csv_quotes=true"):
        read(tmp_path / "a.csv", content)
    assert len(read(tmp_path / "a.csv", content, quoted=True)[0]) == 2
    assert len(read(tmp_path / "a.csv", content, quoted=False)[0]) == 3
    with pytest.raises(ValueError, match=r"row 3: a quote that nothing closes; data\.csv_quotes=false"):
        read(tmp_path / "a.csv", content + 'h,i,"j\nk,l,m\n', quoted=True)
    assert read(tmp_path / "a.csv", content + 'h,i,"j\nk,l,m\n', skip=True, quoted=True)[1:] == (1, 4)


def test_arrow_and_the_count_must_agree(tmp_path, monkeypatch):
    """Were a row lost on the way, it would be told."""
    monkeypatch.setattr(text, "_without", lambda block, rows: block.data[: block.starts[4]])
    content = b"user,time,title\n" + b"1,2,x\n" * 5 + b"1,2,\xff\n"
    with pytest.raises(ValueError, match="rows 1 to 6: 5 rows were counted, and 4 read"):
        read(tmp_path / "a.csv", content, skip=True)


@pytest.mark.parametrize("separator", ["", "\n", '"'])
def test_a_separator_that_separates_nothing_is_refused(tmp_path, separator):
    with pytest.raises(ValueError, match="data.csv_separator="):
        read(tmp_path / "a.csv", "user,time,title\n", separator=separator)


LONG = "|".join(str(10**6 + i) for i in range(20_000))
"""A user's history in one row, of many blocks."""
SPANNING = '"a title\nof two lines, and a ""quote"""'


def _rows(past: str, note: str) -> str:
    lines = [f"{i % 4},{1000 * i},{i % 7},{i % 2},{past if i == 9 else '1|2'},{note}" for i in range(40)]
    return "\n".join(["user,time,item,click,past,note", *lines]) + "\n"


def _labelled(folder: Path, past: str, note: str) -> EventsConfig:
    (folder / "a.csv").write_text(_rows(past, note))
    return events_config(folder, files=["a.csv"], histories={"past": HistoryConfig(["past"], lists=True)})


def _joined(folder: Path, past: str, note: str) -> EventsConfig:
    config = _labelled(folder, "1", "x")
    (folder / "u.csv").write_text(f"user,seen,note\n0,1|2,{note}\n1,{past},{note}\n2,3,{note}\n3,4,{note}\n")
    config.joins = [JoinConfig(["u.csv"], "user")]
    config.histories = {"past": HistoryConfig(["seen"], lists=True)}
    return config


def _log(folder: Path, past: str, note: str) -> EventsConfig:
    config = _labelled(folder, "1", "x")
    (folder / "log.csv").write_text(_rows(past, note))
    config.histories = {"past": HistoryConfig(["item"], files=["log.csv"])}
    return config


def _table_vectors(folder: Path, past: str, note: str) -> EventsConfig:
    config = _labelled(folder, "1", "x")
    (folder / "v.csv").write_text("item,vector,note\n" + "".join(f"{i},0.5|{i},{note}{past}\n" for i in range(7)))
    config.table_vectors = {"item": TableVectorsConfig(2, files=["v.csv"], id="item", vector="vector")}
    return config


@pytest.mark.parametrize("kind", [_labelled, _joined, _log, _table_vectors])
@pytest.mark.parametrize(("past", "note"), [(LONG, "x"), ("1|2", SPANNING)], ids=["long row", "lines in quotes"])
def test_every_text_file_has_long_rows_and_quoted_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[..., EventsConfig], past: str, note: str
) -> None:
    monkeypatch.setattr(records, "BLOCK", 1000 if past == LONG else 64)
    config = kind(tmp_path, past, note)
    source = source_of(config)
    assert sum(len(whole(source, split).row) for split in ("train", "valid", "test")) == 40


@pytest.mark.parametrize("rows", [40, 30_000])
@pytest.mark.parametrize("end", ["", 'the end"'])
def test_an_open_quote_swallows_no_row(tmp_path, caplog, rows, end):
    titles = {5: '"Crocodile Dundee', 15: end or "the end"}
    lines = [f"{i % 4},{1000 * i},{i % 7},{i % 2},{titles.get(i, 'title')}" for i in range(rows)]
    (tmp_path / "a.csv").write_text("\n".join(["user,time,item,click,title", *lines]) + "\n")
    with caplog.at_level(logging.WARNING):
        source = source_of(events_config(tmp_path, files=["a.csv"]))
    assert sum(len(whole(source, split).row) for split in ("train", "valid", "test")) == rows
    assert "in 1 rows, from row 6 on, a field begins with a quote that does not enclose it: it is text" in caplog.text


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress])
def test_packed_text_is_told_by_its_first_bytes(tmp_path, pack):
    assert len(read(tmp_path / "a.csv", pack(_rows("1", "x").replace("note", "title").encode()))[0]) == 40
    cut = pack(_rows("1", "x").encode())[:-20]
    (tmp_path / "a.csv").write_bytes(cut)
    with pytest.raises(ValueError, match=r"a\.csv: cannot be read|no column|has no rows"):
        build_source(events_config(tmp_path, files=["a.csv"]))
