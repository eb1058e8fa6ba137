"""Prepare a public data set from files that you fetched.

python -m tools.datasets ml1m --from /data/fetched      # writes prepared/ml1m, which data=ml1m reads
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq

from tools.datasets import amazon, gowalla, ml1m, sessions

DATASETS: dict[str, Callable[[Path, Path], None]] = {
    "ml1m": ml1m.prepare,
    "gowalla_m1": gowalla.prepare,
    "amazon_beauty": partial(amazon.prepare, "Beauty"),
    "amazon_sports": partial(amazon.prepare, "Sports_and_Outdoors"),
    "amazon_toys": partial(amazon.prepare, "Toys_and_Games"),
    "diginetica": partial(sessions.prepare, "diginetica"),
    "nowplaying": partial(sessions.prepare, "Nowplaying"),
    "tmall": partial(sessions.prepare, "Tmall"),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.datasets", description=__doc__.partition("\n")[0])
    parser.add_argument("name", choices=sorted(DATASETS))
    parser.add_argument("--from", dest="source", type=Path, required=True, help="folder with the fetched files")
    parser.add_argument("--to", type=Path, help="folder of the result; default: prepared/NAME")
    options = parser.parse_args(arguments)
    out = options.to or Path("prepared") / options.name
    try:
        DATASETS[options.name](options.source, out)
    except (FileNotFoundError, ImportError, ValueError) as error:
        print(f"{options.name}: {error}", file=sys.stderr)
        return 1
    for file in sorted(out.glob("*.parquet")):
        table = pq.read_metadata(file)
        print(f"{file}: {table.num_rows:,} rows of {', '.join(pq.read_schema(file).names)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
