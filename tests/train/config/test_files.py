"""What configuration files and overrides compose, and what files of somebody else cannot do."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.launching import python, run
from train.config.compose import to_config
from train.config.files import composed, parse

OURS = "defaults: [events_schema, {sibling}_self_]\nfiles: [a.parquet]\nuser: user\n"
SECRET = "value-of-a-secret"


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (exec, ("raise SystemExit('the pickle ran')",))


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


CALLBACK = "_target_: numpy.load\nfile: {folder}/evil.pkl\nallow_pickle: true\n"
REACHES = {
    "a callback by a header": {"data/b.yaml": f"# @package hydra.callbacks.x\n{CALLBACK}"},
    "a callback by a name": {"data/b.yaml": "# @package hydra\ncallbacks: {x: {_target_: os.getcwd}}\n"},
    "a callback from the root": {"data/b.yaml": "# @package _global_\nhydra: {callbacks: {x: {_target_: os.x}}}\n"},
    "the package of a file's name": {"data/b.yaml": "# @package _global_._name_\nx: 1\n"},
    "a package inside another": {"data/b.yaml": "# @package data._global_.model\nname: x.Y\n"},
    "another choice": {
        "data/b.yaml": "defaults:\n  - override /model: custom\n",
        "data/theirs.yaml": OURS.format(sibling="b, "),
    },
    "another choice, of the root": {
        "data/b.yaml": "# @package _global_\ndefaults:\n  - override /model: custom\nmodel: {name: os.Y}\n"
    },
    "two files on": {"data/b.yaml": "defaults: [c]\n", "data/c.yaml": "# @package tracking\nproject: theirs\n"},
    "a file of another group": {
        "data/b.yaml": "defaults: [/model@_global_: evil]\n",
        "model/evil.yaml": "model: {dim: 3}\n",
    },
    "a file above": {"data/b.yaml": "defaults: [../model/evil]\n", "model/evil.yaml": "# @package model\ndim: 3\n"},
    "a group of its own": {
        "data/b.yaml": "defaults: [{sub: evil}]\n",
        "data/sub/evil.yaml": "# @package runtime\nseed: 3\n",
    },
    "one that may be missing": {
        "data/b.yaml": "defaults: [optional /hydra/callbacks: evil]\n",
        "hydra/callbacks/evil.yaml": "x: {_target_: os.getcwd}\n",
    },
    "its first file": {"data/theirs.yaml": "# @package _global_\ntracking: {project: theirs}\n"},
    "its first file's entry": {
        "data/theirs.yaml": "defaults:\n  - events_schema\n  - /tracking@_global_: evil\n  - _self_\n",
        "tracking/evil.yaml": "tracking: {project: theirs}\n",
    },
    "an entry with a package": {"data/b.yaml": "defaults: [events_schema@_global_]\n"},
    "an entry by interpolation": {"data/b.yaml": "defaults: [{'${data}/x': a}]\n"},
    "a file between": {
        "data/b.yaml": "defaults: [/model@data.x: between]\n",
        "model/between.yaml": "defaults: [/tracking@_global_: evil]\n",
        "tracking/evil.yaml": "tasks: {click: {loss: os.x}}\n",
    },
    "the place of a schema": {"config_schema.yaml": "tasks: {click: {loss: os.x}}\n"},
    "the place of a model's schema": {"model/interformer_schema.yaml": "name: os.x\n"},
    "the place of Hydra's own": {"hydra/config.yaml": "# @package _global_\ntasks: {click: {loss: os.x}}\n"},
    "the place of Hydra's launcher": {"hydra/launcher/basic.yaml": "_target_: os.getcwd\n"},
}


@pytest.mark.parametrize("name", REACHES)
@pytest.mark.reliability(
    "a foreign data YAML, or its `defaults`, sets other sections, callbacks or packages",
    "refused by file; none of its code is imported or run",
)
def test_a_data_file_sets_data_alone(name: str, tmp_path: Path) -> None:
    sibling = "b, " if "data/b.yaml" in REACHES[name] else ""
    files = {"data/theirs.yaml": OURS.format(sibling=sibling), **REACHES[name]}
    write(tmp_path, {file: text.replace("{folder}", str(tmp_path)) for file, text in files.items()})
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"sets the section|sets, by|sets hydra|of a schema|is no key|In '"):
        composed(["data=theirs"], tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "canditate_numeric: [p]",
            r"data/m\.yaml: data\.canditate_numeric is no key .*; did you mean data\.cand",
        ),
        ("histories: {h: {field: [a]}}", r"data/m\.yaml: data\.histories\.h\.field is no key .*h\.fields\?"),
        ("valid_files: a.csv", r"data/m\.yaml: data\.valid_files: must be a list, e\.g\. \[a\]"),
        (
            "max_history: 2.5",
            r"data/m\.yaml: data\.max_history: Value '2\.5' of .* to Integer$",
        ),
        ("max_history: 010", r"m\.yaml, line 4: max_history has 010, .* a plain number"),
        ("request_window: 1:30", r"m\.yaml, line 4: request_window has 1:30, .* a plain number"),
        ("time: no", r'm\.yaml, line 4: time has no, .* stands in quotes, "no"'),
        ("labels: {1: a}", r"data/m\.yaml: data\.labels\.1: Key 1 \(int\) must be text: put it in quotes"),
        ("user: other", r"m\.yaml cannot be read: .* found duplicate key user"),
        ("root: !!python/object/apply:os.getcwd []", r"m\.yaml cannot be read: could not determine a constructor"),
        ("root: '${'", r"m\.yaml cannot be read: no viable alternative"),
    ],
)
def test_a_mistake_in_a_file_is_told_in_one_line_with_its_key(text: str, said: str, tmp_path: Path) -> None:
    write(tmp_path, {"data/m.yaml": OURS.format(sibling="") + text + "\n"})
    with pytest.raises(ValueError, match=said) as told:
        composed(["data=m"], tmp_path)
    assert "\n" not in str(told.value)


def test_data_files_that_bring_in_themselves(tmp_path: Path) -> None:
    write(tmp_path, {"data/m.yaml": "defaults: [b]\n", "data/b.yaml": "defaults: [m]\n"})
    with pytest.raises(ValueError, match="defaults lists bring in each other without end"):
        composed(["data=m"], tmp_path)


def test_data_files_may_bring_in_others(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "data/theirs.yaml": "# @package data\n" + OURS.format(sibling="b, {of: them}, "),
            "data/b.yaml": "time: time\n",
            "data/of/them.yaml": "# @package data.labels\nclick: clicked\n",
        },
    )
    found = composed(["data=theirs"], tmp_path)
    assert (found.data.time, found.data.labels) == ("time", {"click": "clicked"})
    plain = composed(["data=events"])
    assert {key for key in plain if plain[key] != found[key]} == {"data"}


@pytest.mark.parametrize(
    "text",
    [
        "# @package _global_\nhydra: {callbacks: {x: {_target_: os.x}}}\n",
        "# @package _global_\nhydra: {run: {dir: elsewhere}}\n",
        "# @package hydra.callbacks.x\n_target_: os.getcwd\n",
        "# @package _global_\ndefaults:\n  - override /hydra/env: default\n",
    ],
)
def test_hydra_s_own_keys_are_the_shipped_ones(text: str, tmp_path: Path) -> None:
    write(tmp_path, {"experiment/mine.yaml": text})
    with pytest.raises(ValueError, match=r"sets hydra.*Hydra's own keys are those of the shipped files"):
        composed(["+experiment=mine"], tmp_path)


@pytest.mark.parametrize("entry", ["${oc.env:S}", "/model: ${oc.env:S}", "${ oc.env:S }", "${oc.decode:${oc.env:S}}"])
@pytest.mark.reliability(
    "`${oc.env:NAME}` in the `defaults` of a data YAML or an experiment", "refused without showing the value"
)
def test_no_defaults_list_reads_the_environment(entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S", SECRET)
    write(tmp_path, {"data/theirs.yaml": f"defaults:\n  - events_schema\n  - {entry}\n  - _self_\n"})
    with pytest.raises(ValueError, match=r"oc.env:...} stands in a defaults list") as error:
        composed(["data=theirs"], tmp_path)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("modle=din", "modle is no key of the configuration; did you mean model=din?"),
        ("model=dni", "there is no file model/dni.yaml; did you mean model=din?"),
        ("model=zzz", "there is no file model/zzz.yaml; there are custom, dcnv2, din,"),
        ("runtime.setps=3", "did you mean runtime.steps?"),
        (
            "+experiment=ml1m_sasrec tasks.nxt.loss=bpr",
            "mean tasks.next? To add it write +tasks.nxt.loss=VALUE",
        ),
        ("runtime={setps: 3}", "did you mean runtime.steps?"),
        ("+experiment=movielens_kunlun model.num_laers=2", "did you mean model.num_layers?"),
        ("experiment=quickstart", "by a plus: +experiment=quickstart"),
        ("optimizer.lr=fast", "optimizer.lr=fast: Value 'fast' of type 'str' could not be converted to Float"),
        ("runtime.seed=1,2", "--over runtime.seed=1,2"),
        ("runtime.run_dir=/a=b", """e.g. 'runtime.run_dir="/a=b"'"""),
        ("runtime.run_dir=/ünï 😀", """e.g. 'runtime.run_dir="/ünï 😀"'"""),
        ("runtime.run_dir=/a)", """e.g. 'runtime.run_dir="/a)"'"""),
        ("hydra.callbacks.x._target_=os.getcwd", "of Hydra's own keys only hydra.searchpath is used"),
        ("steps", "e.g. runtime.steps=100"),
    ],
)
def test_an_override_that_cannot_be_is_told_what_was_meant(override: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        to_config(composed(["data=movielens_ids", *(override.split() if override[0] == "+" else [override])]))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", ["/a=b", "/ünï 😀 x", '/a"b', "/a\\", '/a\\"b', "/a, [b] {c}: d'", "/${x}"[:2]])
def test_what_an_error_proposes_is_read_as_meant(value: str, tmp_path: Path) -> None:
    from train.config.files import _quoted

    assert composed([f"runtime.run_dir={_quoted(value)}"]).runtime.run_dir == value
    folder = write(tmp_path / value.strip("/"), {"experiment/mine.yaml": "# @package _global_\nruntime: {seed: 7}\n"})
    assert composed(["+experiment=mine"], folder).runtime.seed == 7


def test_the_configuration_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--cfg", "job", "model=din", "-p", "model", "runtime.seed=3"], "train.main", None)
    assert ended.value.code == 0
    assert OmegaConf.create(capsys.readouterr().out).name == "din"


def test_no_callback_of_a_data_file_runs_in_the_command(tmp_path: Path) -> None:
    write(tmp_path, {"data/theirs.yaml": OURS.format(sibling="b, ")})
    write(tmp_path, {"data/b.yaml": f"# @package hydra.callbacks.x\n{CALLBACK}".replace("{folder}", str(tmp_path))})
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Evil()))
    done = run(python("-m", "train.main", "--config-dir", str(tmp_path), "data=theirs"), cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ValueError: data/theirs.yaml sets, by data/b, the section hydra")
    assert "Traceback" not in done.stderr
    assert "the pickle ran" not in json.dumps([done.stdout, done.stderr])
