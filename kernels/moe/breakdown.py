"""`python -m kernels.moe.breakdown OUT.json [FIGURE.png]`: where the time of an expert layer goes, by kind of kernel.

Forward and backward of the layers of `bench.py`, ours in each recipe and PyTorch's parts compiled, under the profiler:
device time of each kernel, added up by what it is for, and the peak of the layer's memory. A figure of the stacked bars
needs matplotlib and may be drawn elsewhere, from the JSON file alone:
`python -m kernels.moe.breakdown --draw OUT.json FIGURE.png`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.bench.timing import peak_memory

STEPS = 5
KINDS = ("products", "gather and quantise", "weights", "SwiGLU", "combine", "places", "other")
"""From the bottom of a bar to its top. A kernel belongs to the first entry of NAMES that its name contains."""
NAMES = (
    ("gather_kernel", "gather and quantise"),
    ("gather_quantized", "gather and quantise"),
    ("quantize_kernel", "weights"),
    ("quantize_tiles_kernel", "weights"),
    ("forward_kernel", "SwiGLU"),
    ("backward_kernel", "SwiGLU"),
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
    ("index_put", "combine"),
    ("sort", "places"),
    ("elementwise", "other"),
    ("reduce", "other"),
    ("softmax", "other"),
    ("fill", "other"),
    ("topk", "places"),
    # What the grouped products of kernels.mxfp8 are called, and what prepares their scales.
    ("_kernel", "products"),
    ("_transpose", "products"),
    ("_dequantize", "products"),
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


def run() -> dict[str, Any]:
    from kernels.bench.environment import commit, environment
    from kernels.moe.bench import cases

    device = torch.device("cuda")
    layers = {
        case.name.removeprefix("layer_fwd_bwd_"): {
            name: measure(prepare().step) for name, prepare in reversed(case.problem(device).contenders.items())
        }
        for case in cases(device)
        if case.name.startswith("layer_fwd_bwd_")
    }
    return {"environment": environment(device), "commit": commit(), "layers": layers}


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
        axes.set(title=name, ylabel="ms, forward and backward")
        axes.set_xticks(range(len(arms)), [f"{arm}\n{values['peak_mib']:.0f} MiB" for arm, values in arms.items()])
        axes.tick_params(axis="x", rotation=30)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=100)


def main(arguments: list[str]) -> None:
    if arguments[0] == "--draw":
        draw(json.loads(Path(arguments[1]).read_text()), arguments[2])
        return
    results = run()
    Path(arguments[0]).write_text(json.dumps(results, indent=1) + "\n")
    if len(arguments) > 1:
        draw(results, arguments[1])


if __name__ == "__main__":
    main(sys.argv[1:])
