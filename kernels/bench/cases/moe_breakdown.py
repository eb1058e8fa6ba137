"""Where the time of an expert layer goes, by kind of kernel: `python -m kernels.bench.cases.moe_breakdown FILE.json`.

Runs forward and backward of the layers of `bench.py`, ours in each recipe and PyTorch's parts compiled, under the
profiler, and adds the device time of each kind of kernel and the layer's peak memory to the file. With
`--draw FIGURE.png` matplotlib draws stacked bars of what is in the file.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.bench.timing import peak_memory, turn_of

STEPS = 5
KINDS = ("products", "gather and quantise", "weights", "SwiGLU", "combine", "places", "other")
"""From the bottom of a bar to its top. A kernel belongs to the first entry of NAMES that its name contains."""
NAMES = (
    ("gather_kernel", "gather and quantise"),
    ("gather_quantized", "gather and quantise"),
    ("dequantize_kernel", "products"),
    ("quantize_kernel", "weights"),
    ("quantize_tiles_kernel", "weights"),
    ("round_tiles_kernel", "weights"),
    ("swiglu", "SwiGLU"),
    ("combine_kernel", "combine"),
    ("collect_kernel", "combine"),
    ("count_kernel", "places"),
    ("place_kernel", "places"),
    ("cutlass", "products"),
    ("grouped", "products"),
    ("gemm", "products"),
    ("sm90_xmma", "products"),
    ("nvjet", "products"),
    ("sigmoid", "SwiGLU"),
    ("silu", "SwiGLU"),
    ("index_add", "combine"),
    ("indexfunc", "combine"),  # launched by index_add
    ("index_put", "combine"),
    ("fused_index", "gather and quantise"),
    ("sort", "places"),
    ("elementwise", "other"),
    ("reduce", "other"),
    ("softmax", "other"),
    ("fill", "other"),
    ("topk", "places"),
    ("top_k", "places"),
    ("transpose_kernel", "products"),  # it prepares their scales
)


def kind_of(kernel: str) -> str:
    return next((kind for name, kind in NAMES if name in kernel.lower()), "other")


def measure(step: Callable[[], Any]) -> dict[str, Any]:
    """Milliseconds a step by kind, and of each kernel, and the memory it takes beyond its inputs."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    kernels: dict[str, float] = {}
    for event in profile.key_averages():
        if event.self_device_time_total:
            kernels[event.key] = event.self_device_time_total / 1e3 / STEPS
    kinds = dict.fromkeys(KINDS, 0.0)
    for name, milliseconds in kernels.items():
        kinds[kind_of(name)] += milliseconds
    return {"kinds": kinds, "kernels": kernels, "peak_mib": peak_memory(step, torch.device("cuda"))}


def run(path: Path, pattern: str) -> None:
    """Measure the cases that match and add them to the file, taking turns with processes that measure other cases."""
    from kernels.bench.cases.moe import PHASES, cases
    from kernels.bench.environment import commit, environment

    device = torch.device("cuda")
    prefix = f"layer_{PHASES[-1]}_"
    facts = {"environment": environment(device), "commit": commit()}
    path.resolve().parent.mkdir(parents=True, exist_ok=True)
    for case in cases(device):
        if not case.name.startswith(prefix) or not fnmatch.fnmatch(case.name, pattern):
            continue
        steps = {name: prepare().step for name, prepare in reversed(case.problem(device).contenders.items())}
        for step in steps.values():
            step()  # compiles
        with turn_of(path.resolve().parent):
            arms = {name: measure(step) for name, step in steps.items()}
            earlier = json.loads(path.read_text()) if path.exists() else {}
            # Earlier results with other code or versions are dropped.
            layers = earlier["layers"] if facts.items() <= earlier.items() else {}
            layers[case.name.removeprefix(prefix)] = arms
            path.write_text(json.dumps({**facts, "layers": layers}, indent=1) + "\n")


def draw(results: dict[str, Any], path: str) -> None:
    from matplotlib.figure import Figure

    layers = results["layers"]
    figure = Figure(figsize=(4 * len(layers), 4), layout="constrained")
    for axes, (name, arms) in zip(figure.subplots(1, len(layers), squeeze=False)[0], layers.items(), strict=True):
        bottom = [0.0] * len(arms)
        for kind in KINDS:
            heights = [arm["kinds"][kind] for arm in arms.values()]
            axes.bar(list(arms), heights, bottom=bottom, label=kind)
            bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
        rows, width, hidden, experts, chosen = (f"{int(size):,}" for size in re.findall(r"\d+", name))
        axes.set_title(f"{rows} x {width} x {hidden}, {chosen} of {experts} experts", fontsize="medium")
        axes.set_ylabel("ms, forward and backward")
        axes.set_xticks(range(len(arms)), [f"{arm}\n{values['peak_mib']:.0f} MiB" for arm, values in arms.items()])
        axes.tick_params(axis="x", rotation=30)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], fontsize=8, loc="outside center right")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.cases.moe_breakdown")
    parser.add_argument("file", type=Path)
    parser.add_argument("--case", default="*", metavar="GLOB", help="only layers whose case matches (default: all)")
    parser.add_argument("--draw", metavar="FIGURE", help="draw what is in the file")
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(options.file.read_text()), options.draw)
    else:
        run(options.file, options.case)


if __name__ == "__main__":
    main()
