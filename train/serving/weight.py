"""What an Arrow IPC stream would take in memory, by its metadata: before anything of it is decompressed or converted.

Arrow allocates what a compressed buffer says that it holds, and arrays of nulls have a length and no bytes. Messages
are FlatBuffers (Arrow's Message.fbs), whose offsets Arrow has verified by then.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import pyarrow as pa

VALUE_BYTES = 8
"""That each value counts beside its bytes: of Python's reference to it. So nulls are not free."""
V5, DICTIONARY, BATCH = 4, 2, 3
"""Of MetadataVersion and MessageHeader. Version 4 could compress in a way of its own."""


def refuse_heavy(data: bytes, most_rows: int | None, most_bytes: int | None) -> None:
    """ValueError for a stream of more rows, or more bytes decompressed. OSError or ArrowInvalid for what is none."""
    rows = weight = 0
    messages = pa.ipc.MessageReader.open_stream(data)
    while True:
        try:
            message = messages.read_next_message()
        except StopIteration:
            return
        metadata, body = bytes(message.metadata), message.body
        root = _Table(metadata, _number("<I", metadata, 0))
        if root.number(0, "<h") < V5:
            raise ValueError("it is of a version before Arrow 1.0; write it with a newer one")
        kind = root.number(1, "<B")
        if kind not in (DICTIONARY, BATCH):
            continue
        batch = root.table(2) if kind == BATCH else root.table(2).table(1)
        rows += batch.number(0, "<q") if kind == BATCH else 0
        if most_rows is not None and rows > most_rows:
            raise ValueError(f"a call has up to {most_rows} requests, got {rows}; send them in several calls")
        weight += VALUE_BYTES * sum(length for length, _ in batch.pairs(1))
        compressed = batch.place(3) is not None
        for offset, length in batch.pairs(2):
            raw = _number("<q", body, offset) if compressed and length else -1
            weight += length if raw == -1 else raw
        if most_bytes is not None and weight > most_bytes:
            raise ValueError(f"a body has up to {most_bytes} bytes, decompressed too; send fewer requests at once")


class _Table(NamedTuple):
    """A table of a FlatBuffer."""

    data: bytes
    start: int

    def place(self, field: int) -> int | None:
        """Where a field is; None where it has its default."""
        vtable = self.start - _number("<i", self.data, self.start)
        entry = 4 + 2 * field
        offset = _number("<H", self.data, vtable + entry) if entry < _number("<H", self.data, vtable) else 0
        return self.start + offset if offset else None

    def number(self, field: int, kind: str) -> int:
        place = self.place(field)
        return 0 if place is None else _number(kind, self.data, place)

    def table(self, field: int) -> _Table:
        place = self.place(field)
        if place is None:
            raise ValueError("a message lacks its header")
        return _Table(self.data, place + _number("<I", self.data, place))

    def pairs(self, field: int) -> list[tuple[int, int]]:
        """A vector of structs of two int64, none of them negative."""
        place = self.place(field)
        if place is None:
            return []
        place += _number("<I", self.data, place)
        count = _number("<I", self.data, place)
        found = struct.unpack_from(f"<{2 * count}q", self.data, place + 4)
        if min(found, default=0) < 0:
            raise ValueError("a message has negative lengths")
        return list(zip(found[::2], found[1::2], strict=True))


def _number(kind: str, data: bytes | pa.Buffer, place: int) -> int:
    if place < 0:  # which Python counts from the end
        raise ValueError("a message leads out of its bytes")
    return struct.unpack_from(kind, data, place)[0]
