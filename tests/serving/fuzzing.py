"""Sends damaged bodies to the server, in a process of its own that may die: `python -m tests.serving.fuzzing`.

Arguments: an export's folder, a file with a JSON list of good requests, how many bodies of each format, a seed.
"""

from __future__ import annotations

import asyncio
import json
import random
import struct
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.serving.http import memory
from tests.serving.test_asgi import ARROW, call
from train.serving.asgi import App
from train.serving.service import Service

MOST_ANSWER = 2000
"""Bytes of an error."""
MOST_MEMORY = 1 << 30
"""Bytes that the process may grow by."""
EXTREMES = [sign * (1 << bits) + off for bits in (7, 12, 20, 30, 31, 32, 62, 63) for sign in (1, -1) for off in (-1, 0)]


def arrow(requests: list[dict[str, Any]], compression: str | None = None, dictionary: bool = False) -> bytes:
    table = pa.Table.from_pylist(requests)
    if dictionary:
        candidates = table["candidates"].combine_chunks()
        rows = candidates.values
        columns = [rows.field(index) for index in range(rows.type.num_fields)]
        coded = [each.dictionary_encode() if pa.types.is_string(each.type) else each for each in columns]
        rows = pa.StructArray.from_arrays(coded, [field.name for field in rows.type])
        made = pa.ListArray.from_arrays(candidates.offsets, rows)
        table = table.set_column(table.schema.get_field_index("candidates"), "candidates", made)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue().to_pybytes()


FORMATS: dict[str, tuple[str, Callable[[list[dict[str, Any]]], bytes]]] = {
    "json": ("application/json", lambda requests: json.dumps(requests).encode()),
    "lines": ("application/x-ndjson", lambda requests: "\n".join(map(json.dumps, requests)).encode()),
    "arrow": (ARROW, arrow),
    "arrow zstd": (ARROW, lambda requests: arrow(requests, "zstd")),
    "arrow dictionary": (ARROW, lambda requests: arrow(requests, dictionary=True)),
}


def damaged(body: bytes, chance: random.Random) -> bytes:
    """With one to four changes: bytes, numbers of 4 or 8 bytes, parts that are lost, repeated or moved."""
    changed = bytearray(body)
    for _ in range(chance.randint(1, 4)):
        place, how = chance.randrange(max(1, len(changed))), chance.randrange(6)
        if how < 2:
            changed[place : place + 1] = bytes([chance.randrange(256)])
        elif how == 2:
            kind = chance.choice("<i <q".split())
            place -= place % 4
            number = chance.choice(EXTREMES + [chance.randrange(-9, 2000)] * 8)
            size = struct.calcsize(kind)
            changed[place : place + size] = (number % (1 << 8 * size)).to_bytes(size, "little")
        elif how == 3:
            del changed[place : place + chance.randrange(1, 64)]
        elif how == 4:
            end = place + chance.randrange(1, 64)
            changed[place:place] = changed[place:end] * chance.choice([1, 1, 1, 200])
        else:
            other = chance.randrange(max(1, len(changed)))
            changed[place : place + 8] = changed[other : other + 8]
    return bytes(changed)


def main(export: str, requests: str, count: str, seed: str) -> None:
    app = App(Service.from_pretrained(export))
    good = json.loads(Path(requests).read_text())
    loop = asyncio.new_event_loop()

    async def all_of(name: str) -> Counter[int]:
        kind, write = FORMATS[name]
        bodies, statuses, chance = [write(good[:1]), write(good)], Counter[int](), random.Random(f"{seed} {name}")
        for body in bodies:
            assert (await call(app, "/score", body, kind))[0] == 200, name
        before = memory()
        for number in range(int(count)):
            body = damaged(chance.choice(bodies), chance)
            Path(f"{requests}.last").write_bytes(body)
            status, _, answer = await call(app, "/score", body, kind)
            statuses[status] += 1
            at = f"{name} {number} of seed {seed}, {requests}.last: {status} {answer[:MOST_ANSWER]!r}"
            assert status in (200, 400, 413), at
            assert status == 200 or len(answer) <= MOST_ANSWER, at
            assert memory() - before < MOST_MEMORY, at
        return statuses

    for name in FORMATS:
        print(name, dict(loop.run_until_complete(all_of(name))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
