"""Tables of docs/quality.md with an equal search for every row, by a command that can be stopped and started again:

    python -m tools.quality.suite --out runs/quality_suite --parallel 12 [--sections ml1m gowalla] [key=value ...]

Each row of a section tries the settings it may choose from with the first seed, takes the one that is best on the
validation split, and trains it with all seeds; the test split is looked at by these alone. Jobs that ended well are not
run again, and no row waits for another. `--store` writes the rows that are complete to docs/quality/suite/SECTION.json,
from which `python -m tools.quality.page` makes the tables; with `--seconds 0` nothing is trained for it.
Data must have been prepared (`python -m tools.datasets`); further arguments override the configuration of all jobs.
Whoever has KuaiVideo_x1 gets our rows beside the published ones by `--sections kuaivideo data.root=/folder`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tools.quality import run
from tools.quality.page import STORED, section_table
from tools.quality.sections import SECTIONS

SEEDS = [0, 1, 2, 3, 4]
OURS = [name for name, section in SECTIONS.items() if not section.published]


def job(name: str, row: str, setting: tuple[str, ...], seed: int, extra: list[str]) -> dict[str, Any]:
    """A job of `tools.quality.run`."""
    section = SECTIONS[name]
    own = section.rows[row]
    made: dict[str, Any] = {
        "name": f"{name}/{row}/{' '.join(setting)}/{seed}",
        "overrides": [*section.overrides, *own.overrides, *setting, f"runtime.seed={seed}", *extra],
    }
    return made | ({"by": own.by} if own.by else {}) | ({"again": list(section.again)} if section.again else {})


def search(name: str, row: str, seed: int, extra: list[str]) -> list[dict[str, Any]]:
    """The jobs that choose between settings: none for a row that has one."""
    settings = SECTIONS[name].settings_of(row)
    return [job(name, row, each, seed, extra) for each in settings] if len(settings) > 1 else []


def plan(
    rows: dict[str, list[str]], seeds: list[int], extra: list[str], results: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """The jobs that the results so far call for: of each row its search, and once that has ended all seeds."""
    jobs: dict[str, dict[str, Any]] = {}
    for name, row in [(name, row) for name, of_section in rows.items() for row in of_section]:
        found = search(name, row, seeds[0], extra)
        if all(each["name"] in results for each in found):
            setting = chosen(name, row, seeds[0], results)
            found += [job(name, row, setting, seed, extra) for seed in seeds]
        jobs |= {each["name"]: each for each in found}
    return list(jobs.values())


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
    """What docs/quality/suite/NAME.json holds: of each complete row its setting, all validations of the search, its
    seeds."""
    section = SECTIONS[name]
    content: dict[str, Any] = {}
    about: dict[str, set[str]] = {"device": set(), "commit": set()}
    for row in rows:
        if any(each["name"] not in results for each in plan({name: [row]}, seeds, [], results)):
            continue
        setting = chosen(name, row, seeds[0], results)
        tried = {
            " ".join(each): results[job(name, row, each, seeds[0], [])["name"]]["valid"][section.metric]
            for each in section.settings_of(row)
        }
        runs = [results[job(name, row, setting, seed, [])["name"]] for seed in seeds]
        content[row] = {"setting": list(setting), "tried": tried, "runs": [_numbers(each) for each in runs]}
        about["device"] |= {each["device"] for each in runs}
        about["commit"] |= {re.sub(r"^([0-9a-f]{7})[0-9a-f]+", r"\1", each["commit"]) for each in runs}
    return {"about": {key: ", ".join(sorted(about[key])) for key in about} | {"seeds": seeds}, "rows": content}


def file(name: str) -> Path:
    return STORED / "suite" / f"{name}.json"


def merged(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """What `stored` gives, and rows that it lacks from the file if that is of the same seeds."""
    before = json.loads(file(name).read_text()) if file(name).exists() else content
    about, rows = content["about"], before["rows"] | content["rows"]
    if before["about"]["seeds"] != about["seeds"] or set(rows) == set(content["rows"]):
        return content
    both = {key: {*before["about"][key].split(", "), *about[key].split(", ")} - {""} for key in ("device", "commit")}
    return {
        "about": {key: ", ".join(sorted(values)) for key, values in both.items()} | {"seeds": about["seeds"]},
        "rows": {row: rows[row] for row in SECTIONS[name].rows if row in rows},
    }


def _numbers(result: dict[str, Any]) -> dict[str, Any]:
    again = {f"again:{key}": value for key, value in result.get("again_test", {}).items()}
    test = {key: round(value, 5) for key, value in (result["test"] | again).items()}
    return {"step": result["step"], "best_step": result["best_step"], "test": test}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.quality.suite", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=OURS)
    parser.add_argument("--rows", nargs="+", help="of the sections, first ones first; default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no job later than this after the start")
    parser.add_argument("--store", action="store_true", help="write docs/quality/suite/SECTION.json")
    extra = [each for each in arguments if "=" in each and not each.startswith("--")]
    options = parser.parse_args([each for each in arguments if each not in extra])
    rows = {
        name: [row for row in options.rows or SECTIONS[name].rows if row in SECTIONS[name].rows]
        for name in options.sections
    }
    if unknown := sorted(set(options.rows or []) - {row for found in rows.values() for row in found}):
        of_sections = ", ".join(row for name in options.sections for row in SECTIONS[name].rows)
        parser.error(f"--rows {unknown[0]}: the sections have {of_sections}")
    options.out.mkdir(parents=True, exist_ok=True)
    ended = run.run(
        partial(plan, rows, options.seeds, extra), options.out, parallel=options.parallel, seconds=options.seconds
    )
    results = run.results(options.out)
    for name in rows:
        content = merged(name, stored(name, rows[name], options.seeds, results))
        if not content["rows"]:
            continue
        print("\n".join([f"## {SECTIONS[name].title}", "", *section_table(SECTIONS[name], content), ""]))
        if options.store:
            file(name).parent.mkdir(exist_ok=True)
            file(name).write_text(json.dumps(content, indent=1) + "\n")
    return 0 if ended else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
