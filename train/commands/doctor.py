"""Say what of this machine fits together and how to mend what does not: `python -m train.commands.doctor`.

Most failed installations are a torch and an fbgemm of different minor versions, or a CPU build on a machine with a GPU.
`gather` reads the machine, importing each package in a process of its own, so that a crash on import is a fact like any
other; `diagnose` is a pure function from those facts to findings. Exit code 0 when training can run, 1 when it cannot.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from train.config.places import CONFIGS, PREFIX, ROOT
from train.process import errors

PIP = f"{sys.executable} -m pip"
OK, WARN, FAIL = "ok", "warn", "FAIL"


@dataclass(frozen=True)
class Release:
    """Versions that load together. fbgemm is compiled against one torch minor and loads with no other."""

    torch: str
    triton: str
    cuda: str
    fbgemm: str
    torchrec: str


RELEASES = (
    Release("2.11.0", "3.6.0", "13.0", "1.6.0", "1.6.1"),
    Release("2.12.1", "3.7.1", "13.0", "1.7.0", "1.7.0"),
    Release("2.13.0", "3.7.1", "13.0", "1.8.0", "1.8.0"),
    Release("2.14.1", "3.8.0", "13.0", "1.9.0", "1.9.2"),
)
MIN_PYTHON = (3, 11)
MIN_DRIVER = {"12": 525, "13": 580}  # NVIDIA driver series that runs each CUDA major version
# Triton issues 11366 and 11781: older ptxas miscompiles or races in Hopper's asynchronous matrix instructions.
HOPPER_PTXAS, HOPPER_PTXAS_WHEEL = (13, 3), "nvidia-cuda-nvcc==13.3.73"

# What each package must be able to do. A probe prints one JSON object as its last line.
PROBES = {
    "torch": "import torch as m; extra = dict(cuda=m.version.cuda, devices=m.cuda.device_count())",
    "fbgemm": "import torch, fbgemm_gpu as m; extra = dict(op=str(torch.ops.fbgemm.jagged_2d_to_dense))",
    "torchrec": "import torchrec as m, torchrec.distributed; extra = {}",
    "triton": "import triton as m, triton.language; extra = {}",
    "torchmetrics": "import torchmetrics as m; extra = {}",
    "hydra": "import hydra as m; from hydra.core.override_parser.overrides_parser import OverridesParser as P;"
    "extra = dict(parsed=str(P.create().parse_override('a=1').key_or_group))",
    "pyarrow": "import pyarrow as m, pyarrow.parquet; extra = {}",
    "matplotlib": "import matplotlib as m; extra = {}",
    "tensorboard": "import tensorboard as m; extra = {}",
    "wandb": "import wandb as m; extra = {}",
    "gemsmith": "from importlib import import_module;"
    f"found = [import_module('{PREFIX}' + name) for name in ('train', 'modules', 'kernels', 'launch')];"
    "m = found[0]; extra = dict(places=[package.__path__[0] for package in found])",
}
BEFORE = "import gc; gc.disable()\n"  # a package leaves it nothing to free
REPORT = "\nimport json; print('\\n' + json.dumps(dict(version=getattr(m, '__version__', None), **extra))); gc.freeze()"


@dataclass(frozen=True)
class Package:
    """`version` is None when unknown, `error` a failed import's last line, `installed` false if there is no trace."""

    version: str | None = None
    error: str | None = None
    installed: bool = True


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: str
    memory: str


@dataclass(frozen=True)
class Facts:
    python: tuple[int, ...]
    packages: dict[str, Package]
    torch_cuda: str | None = None  # CUDA version torch was built with; None: a CPU build
    torch_devices: int = 0  # GPUs that torch can use
    fbgemm_builds: tuple[str, ...] = ()  # installed distributions that provide fbgemm_gpu
    places: tuple[str, ...] = ()  # folders that this project's packages import from
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    ptxas: str | None = None  # version of the assembler that Triton uses
    ptxas_path: str | None = None


@dataclass(frozen=True)
class Finding:
    level: str
    subject: str
    message: str
    fixes: tuple[str, ...] = field(default=())  # shell lines


def minor(version: str | None) -> str:
    """Major and minor part: 2.13 of 2.13.0+cpu."""
    return ".".join((version or "").split("+")[0].split(".")[:2])


def numbers(version: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version or "")[:3])


def release_of(torch: Package) -> Release | None:
    """The row of a torch that imports."""
    return next((row for row in RELEASES if minor(row.torch) == minor(torch.version) and not torch.error), None)


def diagnose(facts: Facts) -> list[Finding]:
    """Findings about what fits and what does not, with commands that repair it."""
    findings = [_python(facts), _torch(facts)]
    release = release_of(facts.packages["torch"])
    if release:  # without a working torch these checks would only repeat its error
        findings += [_fbgemm(facts, release), _torchrec(facts, release), _triton(facts, release)]
    findings += [*_ptxas(facts), _torchmetrics(facts)]
    findings += [_plain(facts, name, FAIL) for name in ("hydra", "pyarrow", "matplotlib")]
    findings += [_plain(facts, name, WARN) for name in ("tensorboard", "wandb")]
    findings.append(_gemsmith(facts))
    return findings


def _python(facts: Facts) -> Finding:
    version = ".".join(map(str, facts.python))
    if facts.python[:2] < MIN_PYTHON:
        fix = "make env PYTHON=python3.11"
        return Finding(FAIL, "python", f"{version} is too old: 3.11 or newer is needed", (fix,))
    return Finding(OK, "python", version)


def _lock(facts: Facts) -> str:
    device = "cuda" if facts.gpus else "cpu"
    return f"{PIP} install --no-deps -r {ROOT}/requirements/{device}.txt"


def _torch(facts: Facts) -> Finding:
    torch = facts.packages["torch"]
    if not torch.installed:
        return Finding(FAIL, "torch", "is not installed", (_lock(facts),))
    if torch.error:
        return Finding(FAIL, "torch", f"does not import: {torch.error}", (_lock(facts),))
    if release_of(torch) is None:
        known = ", ".join(minor(row.torch) for row in RELEASES)
        return Finding(
            FAIL, "torch", f"{torch.version}: no fbgemm is built for it; use one of {known}", (_lock(facts),)
        )
    build = f"{torch.version} (CUDA {facts.torch_cuda})" if facts.torch_cuda else f"{torch.version} (CPU build)"
    count = len(facts.gpus)
    if not count:
        return Finding(OK, "torch", f"{build}; no GPU here, training runs on the CPU over gloo")
    if facts.torch_cuda is None:
        fix = _lock(facts) if PREFIX else f"make -C {ROOT} env DEVICE=cuda"
        return Finding(FAIL, "torch", f"{build}, but GPUs here: {count}", (fix,))
    needed = MIN_DRIVER.get(facts.torch_cuda.split(".")[0], 0)
    if numbers(facts.driver)[:1] < (needed,):
        message = f"{build} needs NVIDIA driver {needed} or newer; found {facts.driver}"
        return Finding(FAIL, "torch", message, (f"update the driver to the {needed} series",))
    if facts.torch_devices == 0 and facts.visible is None:
        fix = f"{sys.executable} -c 'import torch; torch.cuda.init()'  # says why"
        return Finding(FAIL, "torch", f"{build} can use none of the {count} GPUs", (fix,))
    limit = "" if facts.visible is None else f" (CUDA_VISIBLE_DEVICES={facts.visible})"
    return Finding(OK, "torch", f"{build} sees {facts.torch_devices} of {count} GPUs{limit}")


def _fbgemm(facts: Facts, release: Release) -> Finding:
    fbgemm, builds = facts.packages["fbgemm"], facts.fbgemm_builds
    name = "fbgemm-gpu" if facts.torch_cuda else "fbgemm-gpu-cpu"
    install = f"{PIP} install --no-deps --force-reinstall {name}=={release.fbgemm}"
    if not fbgemm.installed:
        return Finding(FAIL, "fbgemm", "is not installed: TorchRec's tables need it", (install,))
    if len(builds) > 1:
        message = f"{' and '.join(builds)} are both installed and overwrite each other's files"
        return Finding(FAIL, "fbgemm", message, (f"{PIP} uninstall -y {' '.join(builds)}", install))
    if builds and builds != (name,):
        message = f"{builds[0]} does not go with torch {facts.packages['torch'].version}: {name} does"
        return Finding(FAIL, "fbgemm", message, (f"{PIP} uninstall -y {builds[0]}", install))
    if fbgemm.version and minor(fbgemm.version) != minor(release.fbgemm):
        message = f"{fbgemm.version} is not built for torch {minor(release.torch)}: {minor(release.fbgemm)} is"
        return Finding(FAIL, "fbgemm", message, (install,))
    if fbgemm.error:
        return Finding(FAIL, "fbgemm", f"{fbgemm.version} does not import: {fbgemm.error}", (install,))
    return Finding(OK, "fbgemm", f"{fbgemm.version} matches torch {minor(release.torch)}")


def _torchrec(facts: Facts, release: Release) -> Finding:
    torchrec, fbgemm = facts.packages["torchrec"], facts.packages["fbgemm"]
    install = f"{PIP} install --no-deps torchrec=={release.torchrec}"  # its dependencies have another fbgemm
    if not torchrec.installed:
        return Finding(FAIL, "torchrec", "is not installed", (install,))
    if torchrec.error and (fbgemm.error or not fbgemm.installed):
        return Finding(FAIL, "torchrec", f"{torchrec.version} cannot import before fbgemm is mended")
    if torchrec.error:
        return Finding(FAIL, "torchrec", f"does not import: {torchrec.error}", (install,))
    if minor(torchrec.version) != minor(release.torchrec):
        message = f"{torchrec.version} imports, but torch {minor(release.torch)} is tested with {release.torchrec}"
        return Finding(WARN, "torchrec", message, (install,))
    return Finding(OK, "torchrec", f"{torchrec.version}")


def _triton(facts: Facts, release: Release) -> Finding:
    triton = facts.packages["triton"]
    install = f"{PIP} install --no-deps triton=={release.triton}"
    if triton.error or not triton.installed:
        state = f"does not import: {triton.error}" if triton.installed else "is not installed"
        return Finding(WARN, "triton", f"{state}; only the reference kernels are left", (install,))
    if minor(triton.version) != minor(release.triton):
        message = f"{triton.version} is not the {release.triton} that torch {minor(release.torch)} is built with"
        return Finding(WARN, "triton", message, (install,))
    return Finding(OK, "triton", f"{triton.version}")


def _ptxas(facts: Facts) -> list[Finding]:
    if not facts.ptxas:
        return []
    hopper = any(gpu.capability.startswith("9.") for gpu in facts.gpus)
    if hopper and numbers(facts.ptxas)[:2] < HOPPER_PTXAS:
        path = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin/ptxas"
        message = f"{facts.ptxas}: before {HOPPER_PTXAS[0]}.{HOPPER_PTXAS[1]} it miscompiles some Hopper matrix kernels"
        fixes = (f"{PIP} install --no-deps {HOPPER_PTXAS_WHEEL}", f"export TRITON_PTXAS_PATH={path}")
        return [Finding(WARN, "ptxas", message, fixes)]
    return [Finding(OK, "ptxas", f"{facts.ptxas} ({facts.ptxas_path})")]


def _torchmetrics(facts: Facts) -> Finding:
    torchmetrics = facts.packages["torchmetrics"]
    if not torchmetrics.installed or torchmetrics.error:
        return Finding(FAIL, "torchmetrics", "TorchRec imports it", (f"{PIP} install --no-deps torchmetrics==1.0.3",))
    own = "" if torchmetrics.version == "1.0.3" else " (TorchRec's own metrics want 1.0.3; nothing here uses them)"
    return Finding(OK, "torchmetrics", f"{torchmetrics.version}{own}")


def _plain(facts: Facts, name: str, level: str) -> Finding:
    package = facts.packages[name]
    distribution = "hydra-core" if name == "hydra" else name
    if not package.installed:
        return Finding(level, name, "is not installed", (f"{PIP} install {distribution}",))
    if package.error and "ATN" in package.error:
        fix = f"{PIP} install --no-deps antlr4-python3-runtime==4.9.3"
        return Finding(level, name, "its parser needs antlr4-python3-runtime 4.9, another is installed", (fix,))
    if package.error:
        return Finding(
            level, name, f"does not work: {package.error}", (f"{PIP} install --force-reinstall {distribution}",)
        )
    return Finding(OK, name, f"{package.version}")


def _gemsmith(facts: Facts) -> Finding:
    own = facts.packages["gemsmith"]
    install = f"{PIP} install --no-deps --force-reinstall gemsmith" if PREFIX else f"{PIP} install --no-deps -e {ROOT}"
    if own.error:
        message = f"not importable from everywhere ({own.error}); commands work from the repository's root only"
        return Finding(WARN, "gemsmith", message, (install,))
    strangers = [place for place in facts.places if Path(place).resolve().parent != ROOT]
    if strangers:
        message = f"{', '.join(strangers)} is imported instead of this project's folder, except at its root"
        return Finding(
            WARN, "gemsmith", message, (f"{PIP} uninstall {' '.join(Path(each).name for each in strangers)}",)
        )
    how = "installed in" if PREFIX else "installed from"
    return Finding(OK, "gemsmith", f"{how} {ROOT}; configurations: {CONFIGS}")


def gather() -> Facts:
    """Read this machine. Nothing here raises for a package or a tool that is missing or broken."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        probed = dict(zip(PROBES, pool.map(_probe, PROBES), strict=True))
    extras = {name: extra for name, (_, extra) in probed.items()}
    driver, gpus = nvidia_smi()
    path, ptxas = _find_ptxas()
    return Facts(
        python=tuple(sys.version_info[:3]),
        packages={name: package for name, (package, _) in probed.items()},
        torch_cuda=extras["torch"].get("cuda"),
        torch_devices=extras["torch"].get("devices", 0),
        fbgemm_builds=tuple(name for name in ("fbgemm-gpu", "fbgemm-gpu-cpu") if _installed_version(name)),
        places=tuple(extras["gemsmith"].get("places", ())),
        gpus=gpus,
        driver=driver,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        ptxas=ptxas,
        ptxas_path=path,
    )


DISTRIBUTIONS = {"fbgemm": ("fbgemm-gpu", "fbgemm-gpu-cpu"), "hydra": ("hydra-core",)}


def _installed_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _probe(name: str) -> tuple[Package, dict[str, Any]]:
    """Import a package in a process of its own, outside the working directory, whose folders could shadow packages."""
    found = (_installed_version(each) for each in DISTRIBUTIONS.get(name, (name,)))
    version = next((each for each in found if each), None)
    try:
        done = _run([sys.executable, "-c", BEFORE + PROBES[name] + REPORT], timeout=120)
    except subprocess.TimeoutExpired:
        return Package(version, "the import hangs"), {}
    if done.returncode == 0:
        extra = json.loads(done.stdout.strip().splitlines()[-1])
        return Package(version or extra["version"]), extra
    lines = done.stderr.strip().splitlines()
    error = f"the import dies with signal {-done.returncode}" if done.returncode < 0 or not lines else lines[-1].strip()
    missing = re.fullmatch(r"ModuleNotFoundError: No module named '(\w+)'", error)
    is_own = missing is not None and missing[1] in (name, "fbgemm_gpu" if name == "fbgemm" else name)
    return Package(version, error, installed=version is not None or not is_own), {}


def _run(command: list[str], timeout: float = 30) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd="/", check=False)


def nvidia_smi() -> tuple[str | None, tuple[Gpu, ...]]:
    """Driver version and GPUs; (None, ()) where there is no NVIDIA driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version,compute_cap,memory.total,name", "--format=csv,noheader"]
    try:
        done = _run(query)
    except (OSError, subprocess.TimeoutExpired):
        return None, ()
    rows = [line.split(", ", 3) for line in done.stdout.splitlines() if line.count(", ") >= 3]
    if done.returncode != 0 or not rows:
        return None, ()
    return rows[0][0], tuple(Gpu(name, capability, memory) for _, capability, memory, name in rows)


def _find_ptxas() -> tuple[str | None, str | None]:
    """Path and version of the ptxas that Triton calls: the environment's, else the one in its wheel."""
    triton = find_spec("triton")
    bundled = Path(triton.origin).parent / "backends/nvidia/bin/ptxas" if triton and triton.origin else Path("ptxas")
    path = os.environ.get("TRITON_PTXAS_PATH") or str(bundled)
    try:
        version = re.search(r"V(\d+\.\d+\.\d+)", _run([path, "--version"]).stdout)
    except (OSError, subprocess.TimeoutExpired):
        return None, None
    return path, version[1] if version else None


def report(facts: Facts, findings: list[Finding]) -> str:
    """What `python -m train.commands.doctor` prints."""
    current = release_of(facts.packages["torch"])
    lines = ["versions that go together (* this torch):", "    torch  triton  CUDA  fbgemm  torchrec"]
    for row in RELEASES:
        mark = "*" if row == current else " "
        lines.append(
            f"  {mark} {minor(row.torch):5}  {row.triton:6}  {row.cuda:4}  {minor(row.fbgemm):6}  {row.torchrec}"
        )
    lines.append("")
    lines += [f"GPU {i}: {gpu.name}, capability {gpu.capability}, {gpu.memory}" for i, gpu in enumerate(facts.gpus)]
    lines += [f"driver {facts.driver}" if facts.driver else "no NVIDIA driver or GPU found", ""]
    for finding in findings:
        lines.append(f"{finding.level:4}  {finding.subject:12}  {finding.message}")
        lines += [f"{'':20}mend: {fix}" for fix in finding.fixes]
    failures = sum(finding.level == FAIL for finding in findings)
    device = "GPU" if facts.gpus else "CPU"
    verdict = f"not ready: {failures} to mend" if failures else f"ready: training can run on the {device}"
    return "\n".join([*lines, "", verdict])


def fit_report(arguments: list[str]) -> tuple[str, bool]:
    """Bytes of a rank for a configuration, and whether they fit; imports what `diagnose` may find broken."""
    from train.commands.fit import fit
    from train.config.compose import to_config
    from train.config.files import composed
    from train.config.overrides import split_options

    defaults = {"ranks": "1", "node_ranks": "8", "gpu_gib": "140"}
    options, overrides = split_options(arguments, defaults, "ranks=8 gpu_gib=80 +experiment=synthetic_h200")
    config = to_config(composed(overrides))
    ranks = int(options["ranks"])
    result = fit(config, ranks, min(ranks, int(options["node_ranks"])), float(options["gpu_gib"]))
    return result.report(), result.fits


def main(arguments: list[str]) -> int:
    if arguments:
        text, fits = fit_report(arguments)
        print(text)
        return int(not fits)
    facts = gather()
    findings = diagnose(facts)
    print(report(facts, findings))
    return int(any(finding.level == FAIL for finding in findings))


if __name__ == "__main__":
    errors.run(main)
