"""Imports run one way: launch -> train -> modules -> kernels, and kernels needs neither Triton nor fbgemm."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools.device_sources import Sources
from train.commands.doctor import ROOT

# What the files of a package must not import; `kernels/` itself imports Triton, in its own files only.
FORBIDDEN = {
    "kernels": {"modules", "train", "launch", "hydra", "omegaconf", "torchrec"},
    "modules": {"train", "launch", "triton", "hydra", "omegaconf"},
    "train": {"launch", "triton"},
    "launch": {"triton", "modules", "kernels"},
}


def imported(path: Path) -> set[str]:
    """Dotted names of everything that a file imports, those inside functions and relative ones included."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return names


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def test_what_is_imported_is_a_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    used = ("train", "cuda", "baseline", "flash-attention-4")
    declared = [*project["dependencies"], *(text for extra in used for text in extras[extra])]
    names = [Requirement(text).name.removesuffix("-core").removesuffix("-4").removeprefix("Py") for text in declared]
    names = {name.lower().replace("-", "_") for name in names}
    found = {name.split(".")[0] for package in FORBIDDEN for path in files(package) for name in imported(path)}
    assert found - names - set(FORBIDDEN) - sys.stdlib_module_names == set()


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_run_one_way(package: str) -> None:
    assert files(package)
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(package)
        for name in imported(path)
        if name.split(".")[0] in FORBIDDEN[package]
    }
    assert not wrong


@pytest.mark.parametrize("package", ["modules", "train"])
def test_a_kernel_family_is_entered_through_its_package(package: str) -> None:
    """The families' public functions and `kernels.core`, never a file such as kernels/jagged/reference.py."""
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(package)
        for name in imported(path)
        if name.startswith("kernels.")
        and name.split(".")[1] != "core"
        and (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
    }
    assert not wrong


WINGS = ("triton", "hopper")
# What a fused layer is made of has a door of its own.
DOORS = {"kernels.mxfp8.grouped"}


def test_kernel_families_enter_each_other_through_their_package() -> None:
    """Or through `kernels.core`; only the wings, where kernels are, may share device code."""
    wrong = set()
    for path in files("kernels"):
        family, *inner = path.relative_to(ROOT / "kernels").with_suffix("").parts
        if not inner or family in ("core", "bench"):
            continue
        for name in imported(path):
            _, other, *rest = (*name.split("."), "", "")
            module = (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
            elsewhere = name.startswith("kernels.") and other not in (family, "core")
            shared = (inner[0] in WINGS and rest[0] in WINGS) or name in DOORS
            if elsewhere and module and not shared:
                wrong.add(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_device_code_that_other_families_use_says_so() -> None:
    """Its module, by the words "Shared with `family`": a change of it is one of theirs."""
    sources = Sources()
    families = [path.parent.name for path in sorted((ROOT / "kernels").glob("*/reference.py"))]
    users: dict[str, set[str]] = {}
    for family in families:
        for path in sources.files(family):
            for target in sources.module(sources.name_of(path)).imports.values():
                module, name = sources.resolve(*target) or ("", "")
                owner = (*module.split("."), "")[1]
                statements = sources.module(module).definitions[name] if owner in families else []
                decorated = [ast.unparse(each) for node in statements for each in getattr(node, "decorator_list", [])]
                if owner != family and any("jit" in text for text in decorated):
                    users.setdefault(module, set()).add(family)
    assert {"kernels.attention.hopper.backward_loader", "kernels.mxfp8.hopper.grouped.tiles"} <= set(users)
    for module, sharing in users.items():
        text = ast.get_docstring(ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text()))
        said = re.search(r"^Shared with (.*)\.$", text, re.MULTILINE)
        assert said, f"{module} is used by {sorted(sharing)}"
        assert set(re.findall(r"`(\w+)`", said[1])) == sharing, module


def test_no_files_import_each_other_in_a_circle() -> None:
    packages = ("kernels", "modules", "train", "launch")
    module_of = {
        path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for name in packages for path in files(name)
    }
    modules = {module.removesuffix(".__init__") for module in module_of.values()}
    # A package's `__init__` names what is inside it, so only the files themselves are looked at.
    edges = {
        module: imported(path) & modules - {module} for path, module in module_of.items() if path.name != "__init__.py"
    }
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module not in done:
            for other in sorted(edges.get(module, ())):
                visit(other, (*above, module))
            done.add(module)

    for module in edges:
        visit(module, ())


def test_the_scan_sees_every_form_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "modules/layers/moe/layer.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import triton.language as tl\ndef f():\n    from train import main\n    from ..norms import RMSNorm\n"
    )
    assert {
        "triton.language",
        "train",
        "train.main",
        "modules.layers.norms",
        "modules.layers.norms.RMSNorm",
    } <= imported(file)


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "fbgemm_gpu", "torchrec"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def test_drop_in_modules_need_pytorch_only() -> None:
    script = f"{BLOCKED}from modules import *\n"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_kernels_import_without_triton_and_fbgemm() -> None:
    script = f"""{BLOCKED}
import torch
torch.set_default_device("meta")  # no constant of the package may lie there
import kernels
torch.set_default_device("cpu")
import kernels.testing, kernels.bench.__main__
import kernels.bench.cases.gdpa, kernels.bench.cases.jagged, kernels.bench.cases.mxfp8
values, offsets = torch.ones(3, 2), torch.tensor([0, 1, 1, 3])
values = kernels.mxfp8.dequantize(kernels.mxfp8.quantize(values))
print(kernels.jagged.segment_sum(values, offsets).tolist())
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]"
