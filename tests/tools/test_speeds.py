"""Arms of `tools.speeds`: what is measured, and what a process that dies or hangs leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from tools import speeds
from train.config.compose import to_config
from train.config.files import composed

# Stands in for a worker: it measures "ok", dies of "breaks" and of a second "fails second", and hangs in "hangs". Of
# several ranks the first one writes, and the second dies of "breaks second".
STAND_IN = """
import json, os, sys, time
for number, line in enumerate(sys.stdin):
    arm = json.loads(line)
    if arm["name"] == "hangs":
        time.sleep(60)
    if arm["name"] == "breaks" or (arm["name"] == "fails second" and number):
        sys.exit(3)
    if os.environ.get("RANK", "0") != "0":
        if arm["name"] == "breaks second":
            sys.exit("what the second rank says")
        continue
    if arm["name"] == "breaks second":
        time.sleep(60)
    row = arm | {"each_rank": [{"peak_memory_bytes": 0}], "examples_per_s": 1, "seconds": 0, "process": os.getpid()}
    with open(sys.argv[1], "a") as rows:
        rows.write(json.dumps(row) + "\\n")
"""


def test_a_process_that_dies_or_hangs_is_replaced_and_the_rest_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker.py").write_text(STAND_IN)
    monkeypatch.setattr(speeds, "COMMAND", [sys.executable, str(tmp_path / "worker.py")])
    names = ["first", "second", "breaks", "third", "fails second", "hangs", "instead", "not instead", "last"]
    arms = [{"name": name, "limit": 1 if name == "hangs" else 30, "overrides": []} for name in names]
    arms[6]["if_failed"], arms[7]["if_failed"] = "hangs", "first"
    (tmp_path / "arms.yaml").write_text(yaml.safe_dump(arms))
    out = tmp_path / "out.jsonl"
    out.write_text(json.dumps({"name": "second", "examples_per_s": 5}) + "\n")  # of a run that was interrupted
    speeds.main([str(out), str(tmp_path / "arms.yaml")])
    rows = {row["name"]: row for row in speeds.rows_of(out)}
    assert list(rows) == ["second", "first", "breaks", "third", "fails second", "hangs", "instead", "last"]
    assert rows["breaks"]["error"] == "the process ended with status 3"
    assert rows["hangs"]["error"] == "took more than 1 seconds"
    assert rows["third"]["process"] != rows["fails second"]["process"] != rows["instead"]["process"]
    assert rows["instead"]["process"] == rows["last"]["process"]


ARMS = sorted((speeds.CONFIGS.parent / "docs" / "performance").glob("*_arms.yaml"))
LONG = "two_gpus_arms.yaml"  # a composition takes half a second


@pytest.mark.parametrize(
    "file", [pytest.param(file, marks=[pytest.mark.nightly] * (file.name == LONG)) for file in ARMS], ids=str
)
def test_every_measured_arm_is_a_configuration(file: Path) -> None:
    arms = speeds.arms_of(file)
    assert len({arm["name"] for arm in arms}) == len(arms)
    assert speeds.chosen(arms, [arms[-1]["name"]])[-1] is arms[-1]
    with pytest.raises(ValueError, match="no arm is called 'nobody'; they are"):
        speeds.chosen(arms, [arms[0]["name"], "nobody"])
    known: set[str] = set()
    for arm in arms:
        if not known.issuperset(arm["overrides"]):  # composing takes a tenth of a second
            assert to_config(composed(arm["overrides"])).runtime.steps >= 20
        known.update(arm["overrides"])


def test_ranks_run_an_arm_together_and_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker.py").write_text(STAND_IN)
    monkeypatch.setattr(speeds, "COMMAND", [sys.executable, str(tmp_path / "worker.py")])
    names = {"one": 1, "two": 2, "breaks second": 2, "two again": 2}
    arms = [{"name": name, "limit": 30, "ranks": ranks, "group": "g", "overrides": []} for name, ranks in names.items()]
    (tmp_path / "arms.yaml").write_text(yaml.safe_dump([*arms, {**arms[0], "name": "of another", "group": "h"}]))
    out = tmp_path / "out.jsonl"
    speeds.main([str(out), str(tmp_path / "arms.yaml"), "--group", "g", "--seconds", "25"])
    rows = {row["name"]: row for row in speeds.rows_of(out)}
    assert list(rows) == list(names)
    assert [name for name, row in rows.items() if "error" in row] == ["breaks second"]
    assert "what the second rank says" in rows["breaks second"]["said"]
    assert len({row["process"] for row in rows.values() if "process" in row}) == 3
    assert "examples/s" not in speeds._shown(rows["breaks second"])


def test_what_arms_have_in_common_is_written_once(tmp_path: Path) -> None:
    lines, out = tmp_path / "out.jsonl", tmp_path / "out.json"
    about = {"device": "H200", "versions": {"torch": "2.11"}}
    for row in ({"name": "old", **about, "versions": {"torch": "2.10"}}, {"name": "new", **about}):
        speeds.append(lines, row)
    speeds.main([str(lines), "--json", str(out)])
    written = json.loads(out.read_text())
    assert {name: written[name] for name in about} == about
    assert written["rows"] == [{"name": "old", "versions": {"torch": "2.10"}}, {"name": "new"}]
