"""The wheel, installed where the checkout cannot be imported: one package, whose names lead to what they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tools import wheel
from train.config.places import ROOT, name_here

PACKAGES = ("kernels", "launch", "modules", "train")


def run(*line: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RUN_DIR")}
    done = subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{line}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `make wheel` builds."""
    folder = tmp_path_factory.mktemp("dist")
    (line,) = re.findall(r"-m pip wheel .*", (ROOT / "Makefile").read_text())
    line = line.replace("$$isolation", "--no-build-isolation")
    options = line.replace("--wheel-dir dist", f"--wheel-dir {folder}").split()
    run(sys.executable, *options, cwd=ROOT)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def python(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and, beside it, what is installed here except this checkout."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder)
    python = folder / "bin/python"
    install = ["install", "--quiet", "--no-deps", "--no-index", str(built)]
    run(sys.executable, "-m", "pip", "--python", str(python), *install, cwd=folder)
    site = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    # A path of a .pth file is searched, but its own .pth files, such as that of an editable checkout, are not read.
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return python


def test_it_needs_no_environment_of_training(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    asked = run("make", "--dry-run", "wheel", "DEVICE=cpu", cwd=tmp_path)
    assert "pip wheel" in asked
    assert "requirements" not in asked


def test_it_holds_one_package_and_its_files(built: Path) -> None:
    with zipfile.ZipFile(built) as archive:
        names = archive.namelist()
        launcher = archive.getinfo("gemsmith/launch/torchrun.sh").external_attr >> 16
        (points,) = [archive.read(name).decode() for name in names if name.endswith("entry_points.txt")]
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"gemsmith"}
    assert points.split() == ["[console_scripts]", "gemsmith", "=", "gemsmith.launch.command:main"]
    assert launcher & 0o111, "the launcher is not executable"
    for pattern in ("configs/**/*.yaml", *(f"{package}/**/*.py" for package in PACKAGES)):
        wanted = {f"gemsmith/{path.relative_to(ROOT)}" for path in ROOT.glob(pattern)}
        assert len(wanted) > 3
        assert wanted <= {*names}
    assert "gemsmith/data/ml-latest-small/ratings.parquet" in names
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]


def test_a_modules_example_runs_and_its_tests_pass(python: Path, tmp_path: Path) -> None:
    page = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n([^`]*JaggedSelfAttention[^`]*)```", page)
    wheel.copy_renamed(ROOT / "tests/modules/test_drop_in.py", tmp_path / "test_drop_in.py")
    (tmp_path / "test_example.py").write_text(
        f"from importlib.util import find_spec\n{wheel.renamed(example)}\n"
        "def test_shape():\n    assert out.shape == (8, 64)\n"
        f"def test_only_the_wheel_is_there():\n    assert not any(map(find_spec, {PACKAGES}))\n"
    )
    chosen = "test_example or frozen or copied"
    said = run(str(python), "-m", "pytest", "-q", "-k", chosen, "-p", "no:cacheprovider", ".", cwd=tmp_path)
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None, said
    assert int(passed[1]) > 30
    assert "skipped" not in said


DOCTOR = """
from gemsmith.train.commands import doctor
known = "import json as m; extra = dict(cuda=None, devices=0)"  # of packages that are not this one
doctor.PROBES = {name: probe if name == "gemsmith" else known for name, probe in doctor.PROBES.items()}
doctor.main([])
"""


def test_the_command_and_the_doctor_say_where_configurations_are(python: Path, tmp_path: Path) -> None:
    site = Path(run(str(python), "-c", "import gemsmith; print(gemsmith.__path__[0])", cwd=tmp_path).strip())
    overview = run(str(python.with_name("gemsmith")), "--help", cwd=tmp_path)
    assert f"configurations: {site}/configs\n" in overview
    assert (site / "configs/train.yaml").exists()
    explained = run(str(python.with_name("gemsmith")), "export", "--help", cwd=tmp_path)
    assert "`gemsmith export run_dir=RUN_DIR" in explained
    said = run(str(python), "-c", DOCTOR, cwd=tmp_path)
    assert re.search(rf"^ok +gemsmith +installed in {re.escape(str(site))};", said, re.MULTILINE), said


def test_every_name_is_defined_in_the_files_of_the_wheel(tmp_path: Path) -> None:
    wheel.stage(tmp_path)
    run(sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F811,E9", str(tmp_path), cwd=tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from modules.layers.moe import MoE", "from gemsmith.modules.layers.moe import MoE"),
        ("    from kernels import jagged", "    from gemsmith.kernels import jagged"),
        ("import kernels", "import gemsmith.kernels; from gemsmith import kernels"),
        ("import kernels.jagged", "import gemsmith.kernels.jagged"),
        ('Backend("x", "kernels.moe.hopper.experts:run")', 'Backend("x", "gemsmith.kernels.moe.hopper.experts:run")'),
        ("-m ${MODULE:-train.main}", "-m ${MODULE:-gemsmith.train.main}"),
        ("files: [train.csv]", "files: [train.csv]"),
        ("self.modules.moe, gemsmith.modules.layers.moe", "self.modules.moe, gemsmith.modules.layers.moe"),
        ('source.batch("train", rows)', 'source.batch("train", rows)'),
    ],
)
def test_names_of_modules_are_renamed_and_nothing_else(text: str, expected: str) -> None:
    assert wheel.renamed(text) == expected


def test_a_module_has_the_name_that_it_has_here() -> None:
    assert name_here("kernels.jagged") == name_here("gemsmith.kernels.jagged") == "kernels.jagged"
