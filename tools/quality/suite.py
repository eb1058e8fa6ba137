"""Tables of docs/quality.md with an equal search for every row, by a command that can be stopped and started again:

    python -m tools.quality.suite --out runs/quality_suite --parallel 12 [--sections ml1m gowalla] [key=value ...]

Each row of a section tries the settings it may choose from with the first seed, takes the one that is best on the
validation split, and trains it with all seeds; the test split is looked at by these alone. Jobs that ended well are not
run again. `--store` writes docs/quality/suite/SECTION.json, from which `python -m tools.quality.page` makes the tables.
Data must have been prepared (`python -m tools.datasets`); further arguments override the configuration of all jobs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tools.quality import run
from tools.quality.page import STORED, section_table
from tools.quality.sections import SECTIONS
from train.process import versions

SEEDS = [0, 1, 2, 3, 4]


def job(name: str, row: str, setting: tuple[str, ...], seed: int, extra: list[str]) -> dict[str, Any]:
    """A job of `tools.quality.run`."""
    section = SECTIONS[name]
    own = section.rows[row]
    made: dict[str, Any] = {
        "name": f"{name}/{row}/{' '.join(setting)}/{seed}",
        "overrides": [*section.overrides, *own.overrides, *setting, f"runtime.seed={seed}", *extra],
    }
    return made | ({"plain": True} if own.plain else {}) | ({"again": list(section.again)} if section.again else {})


def search(name: str, rows: list[str], seed: int, extra: list[str]) -> list[dict[str, Any]]:
    """The jobs that choose between settings: none for rows that have one."""
    section = SECTIONS[name]
    choices = {row: section.settings_of(row) for row in rows}
    return [job(name, row, each, seed, extra) for row in rows for each in choices[row] if len(choices[row]) > 1]


def chosen(name: str, row: str, seed: int, results: dict[str, dict[str, Any]]) -> tuple[str, ...]:
    """The setting whose first run is best on validation. KeyError for a job without a result."""
    section = SECTIONS[name]
    settings = section.settings_of(row)
    if len(settings) == 1:
        return settings[0]
    values = [results[job(name, row, each, seed, [])["name"]]["valid"][section.metric] for each in settings]
    signed = np.nan_to_num(np.array(values) * (-1 if section.larger else 1), nan=np.inf)
    return settings[int(signed.argmin())]


def stored(name: str, rows: list[str], seeds: list[int], results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What docs/quality/suite/NAME.json holds: of each row its setting, all validations of the search, its seeds."""
    section = SECTIONS[name]
    content: dict[str, Any] = {}
    for row in rows:
        setting = chosen(name, row, seeds[0], results)
        tried = {
            " ".join(each): results[job(name, row, each, seeds[0], [])["name"]]["valid"][section.metric]
            for each in section.settings_of(row)
        }
        runs = [results[job(name, row, setting, seed, [])["name"]] for seed in seeds]
        content[row] = {"setting": list(setting), "tried": tried, "runs": [_numbers(each) for each in runs]}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = {"device": device, "commit": versions.collect()["commit"], "seeds": seeds}
    return {"about": about, "rows": content}


def _numbers(result: dict[str, Any]) -> dict[str, Any]:
    again = {f"again:{key}": value for key, value in result.get("again_test", {}).items()}
    test = {key: round(value, 5) for key, value in (result["test"] | again).items()}
    return {"step": result["step"], "best_step": result["best_step"], "test": test}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.quality.suite", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rows", nargs="+", help="of the sections; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no job later than this after the start")
    parser.add_argument("--store", action="store_true", help="write docs/quality/suite/SECTION.json when all has ended")
    extra = [each for each in arguments if "=" in each and not each.startswith("--")]
    options = parser.parse_args([each for each in arguments if each not in extra])
    rows = {name: [row for row in SECTIONS[name].rows if row in (options.rows or [row])] for name in options.sections}
    if unknown := sorted(set(options.rows or []) - {row for found in rows.values() for row in found}):
        parser.error(f"--rows {unknown[0]}: the sections have {', '.join(r for n in rows for r in SECTIONS[n].rows)}")
    options.out.mkdir(parents=True, exist_ok=True)
    first = options.seeds[0]
    ended = run.run(
        [each for name in rows for each in search(name, rows[name], first, extra)],
        options.out,
        parallel=options.parallel,
        seconds=options.seconds,
    )
    if not ended:
        return 1
    results = run.results(options.out)
    finals = [
        job(name, row, chosen(name, row, first, results), seed, extra)
        for name in rows
        for row in rows[name]
        for seed in options.seeds
    ]
    if not run.run(finals, options.out, parallel=options.parallel, seconds=options.seconds):
        return 1
    results = run.results(options.out)
    for name in rows:
        content = stored(name, rows[name], options.seeds, results)
        print("\n".join([f"## {SECTIONS[name].title}", "", *section_table(SECTIONS[name], content), ""]))
        if options.store:
            (STORED / "suite").mkdir(exist_ok=True)
            (STORED / "suite" / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
