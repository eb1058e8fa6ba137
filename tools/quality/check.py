"""Hold a finished run against published rows: `python -m tools.quality.check RUN_DIR [--tolerance 0.001]`.

The rows are those of docs/quality/published.json for the run's data; --help names the sets. Exits with 1 if a row has
the run's model and the run is below it by more than the tolerance, in AUC or in what the table names for it (NDCG of
next items).
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tools.quality.run import configuration
from train.config.schema import DataConfig

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED, CONFIGS = ROOT / "docs" / "quality" / "published.json", ROOT / "configs" / "data"


def published(name: str) -> dict[str, Any]:
    """A table of docs/quality/published.json. ValueError names all."""
    tables = json.loads(PUBLISHED.read_text())
    if name not in tables:
        raise ValueError(f"no published table is known by the name {name}; there are {', '.join(sorted(tables))}")
    return dict(tables[name])


def compare(table: dict[str, Any], model: str, test: dict[str, float], tolerance: float) -> tuple[list[str], bool]:
    """Lines of a table of the published rows and the run, best first, and whether the run keeps up with its row.

    ValueError for a metric that the run has not measured.
    """
    metrics, task, compared = table["metrics"], table["task"], table.get("compared", "auc")
    if missing := [f"{task}/{metric}" for metric in metrics if f"{task}/{metric}" not in test]:
        raise ValueError(f"its results have no {missing[0]}, only {', '.join(sorted(test))}; see tracking.top_k")
    own = [test[f"{task}/{metric}"] for metric in metrics]
    column = metrics.index(compared)
    rows = sorted([*table["rows"].items(), ("this run", own)], key=lambda row: -row[1][column])
    width = 2 + max(len(name) for name, _ in rows)
    lines = [" " * width + "".join(f"{metric:>12s}" for metric in metrics)]
    lines += [f"{name:{width}s}" + "".join(map(_shown, values)) for name, values in rows]
    row = table["rows"].get(model)
    if row is None:
        return [*lines, f"no published row is of model={model}"], True
    gap = own[column] - row[column]
    return [*lines, f"{compared.upper()} of {model}: {gap:+.4f} against the published row"], gap >= -tolerance


def _shown(value: float | None) -> str:
    return f"{'':12s}" if value is None else f"{value:12.4f}"


def published_name(model: dict[str, Any]) -> str:
    """What tables call a run's model: those of token mixing, which is one model, by how they read sequences and mix."""
    of_keys = {"heads": "mixformer", "queries": "hyformer", "revert": "tokenmixer", "add": "rankmixer"}
    found = [of_keys[model[key]] for key in ("sequences", "mixing") if model.get(key) in of_keys]
    return found[0] if found and model["name"] == "token_mixing" else str(model["name"])


@cache
def data_config(name: str) -> DataConfig:
    """The configuration of a data set that has a table."""
    return configuration([f"data={name}", "model=din"]).data


def table_name(saved: dict[str, Any]) -> str:
    """Which of the published tables is of a run's data, by their labels and features, and by the name of the folder
    that they lie in where one configuration reads several sets."""
    for name, table in json.loads(PUBLISHED.read_text()).items():
        data = data_config(table["data"])
        same = ("user", "labels", "request_categorical", "candidate_categorical", "candidate_numeric")
        ours = all(saved.get(key) == getattr(data, key) for key in same)
        ours = ours and table.get("files") in (None, saved.get("files"))
        if ours and table.get("folder") in (None, Path(saved["root"]).resolve().name):
            return name
    raise ValueError(
        "the run's data have no published table: docs/quality/published.json has a configuration of each, and of those "
        "of several sets the last folder of data.root, e.g. data.root=prepared/tmall"
    )


def _needed(name: str) -> str:
    """A table's configuration, and what its first lines say about its files."""
    data = published(name)["data"]
    lines = (CONFIGS / f"{data}.yaml").read_text().splitlines()
    return "\n".join([f"{name}: data={data}", *(line for line in lines if line.startswith("#"))])


def main(arguments: list[str]) -> int:
    needed = ["Tables, and the data that a run needs:", *map(_needed, json.loads(PUBLISHED.read_text()))]
    parser = argparse.ArgumentParser(
        prog="python -m tools.quality.check",
        description=__doc__,
        epilog="\n\n".join(needed),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.001)
    options = parser.parse_args(arguments)
    try:
        config = json.loads((options.run_dir / "config.json").read_text())["config"]
        results = json.loads((options.run_dir / "results.json").read_text())
        table = published(table_name(config["data"]))
        lines, kept = compare(table, published_name(config["model"]), results["test"], options.tolerance)
    except (OSError, KeyError, ValueError) as error:
        print(f"{options.run_dir}: {error}", file=sys.stderr)
        return 2
    print("\n".join([f"{table['source']}. Published protocol: {table['protocol']}.", *lines]))
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
