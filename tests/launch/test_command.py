"""`gemsmith`: one command for all, which turns into the process that the longer form starts."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from launch.command import COMMANDS, LAUNCHER, ROOT, process_of, usage


def gemsmith(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "launch.command", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_command_of_the_packages_is_one() -> None:
    launchers = (ROOT / f"launch/{name}.py" for name in ("sweep", "search", "scaling", "scaling_law", "hosts"))
    files = [*ROOT.glob("train/commands/*.py"), *launchers]
    runnable = {path for path in files if '__name__ == "__main__"' in path.read_text()}
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in runnable}
    others = {"train.main", "train.evaluate", "kernels.bench"}
    assert {each.module for each in COMMANDS.values()} == modules | others


def test_the_entry_point_is_declared() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"gemsmith": "launch.command:main"}


def test_what_starts_others_imports_no_pytorch_and_help_lists_all() -> None:
    code = "import sys; from launch.command import overview; import launch.scaling; print(overview(), *sys.modules)"
    listed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(f"\n  {name} " in listed for name in COMMANDS)
    assert not {"torch", "numpy", "hydra"} & set(listed.splitlines()[-1].split())


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"compare", "bench"}))  # whose parsers take PyTorch's import
def test_each_explains_itself(name: str) -> None:
    text = usage(name)
    assert text.startswith(f"usage: gemsmith {name} ")
    assert f"python -m {COMMANDS[name].module} " not in text
    assert ("--nproc" in text) == (COMMANDS[name].ranks != "never" or name in ("sweep", "search", "scaling"))
    assert len(text.splitlines()) >= 5


def test_options_of_parsers_are_listed() -> None:
    text = usage("sweep")
    assert text.count("usage:") == 1
    assert all(f"\n  --{option} " in text for option in ("over", "nproc", "parallel", "out"))


@pytest.mark.parametrize(
    ("name", "arguments", "line", "variables"),
    [
        ("train", ["+experiment=a"], [str(LAUNCHER), "+experiment=a"], {"MODULE": "train.main"}),
        ("train", ["--nproc", "3", "x=1"], [str(LAUNCHER), "x=1"], {"MODULE": "train.main", "NPROC": "3"}),
        ("speed", ["x=1", "--nproc=2"], [str(LAUNCHER), "x=1"], {"MODULE": "train.commands.speed", "NPROC": "2"}),
        (
            "train",
            ["runtime.run_dir='runs/b'"],
            [str(LAUNCHER), "runtime.run_dir='runs/b'"],
            {"MODULE": "train.main", "RUN_DIR": "runs/b"},
        ),
        ("evaluate", ["run_dir=a"], [sys.executable, "-m", "train.evaluate", "run_dir=a"], {}),
        ("evaluate", ["run_dir=a", "--nproc", "2"], [str(LAUNCHER), "run_dir=a"], {"MODULE": "train.evaluate"}),
        ("sweep", ["--nproc", "2"], [sys.executable, "-m", "launch.sweep", "--nproc", "2"], {}),
        ("bench", ["moe"], [sys.executable, "-m", "kernels.bench", "moe"], {}),
    ],
)
def test_a_command_is_the_longer_form(
    name: str, arguments: list[str], line: list[str], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("MODULE", "NPROC", "RUN_DIR"):
        monkeypatch.delenv(variable, raising=False)
    found, environment = process_of(name, arguments)
    assert found == line
    assert variables.items() <= environment.items()
    assert ("MODULE" in environment) == ("MODULE" in variables)
    assert environment["PATH"].startswith(str(Path(sys.executable).parent))
    assert environment["PYTHONPATH"].startswith(str(ROOT))


@pytest.mark.parametrize("given", [["--nproc"], ["--nproc", "two"], ["--nproc=0"]])
def test_a_number_of_processes_that_is_none_is_named(given: list[str]) -> None:
    with pytest.raises(ValueError, match="a number of processes is needed, e.g. --nproc 2"):
        process_of("train", given)


def test_what_is_no_command_is_named_with_the_nearest() -> None:
    done = gemsmith("trian", "+experiment=a")
    assert done.returncode == 1
    assert done.stderr.startswith("gemsmith trian: no such command; did you mean train?")


def test_the_process_gets_arguments_and_gives_its_status_in_any_folder(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = ['', 'sweep', 'x=1']; import launch.command; "
    line = [sys.executable, "-c", code + "launch.command.main()"]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(line, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "the following arguments are required: --over" in done.stderr
