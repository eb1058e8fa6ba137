"""Which layers run their GEMMs on MXFP8 operands, and on which format: chosen by name, once, and printed.

Everything else follows the trainer's autocast. Parameters do not change (fp32 masters under the same names), so runs of
either precision load each other's checkpoints.
"""

from __future__ import annotations

import difflib
import logging
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kernels.core import dispatch
from kernels.mxfp8 import QUANTIZED, float32_linear, linear, linear_execution, linear_gains, multiplies_linear_codes

AUTO = "auto"
"""In place of globs: experts whose codes a kernel of the GPU multiplies, and linear layers that gain by it, maybe
none; on a CPU, which gains nothing, all of `EVERY`."""
EVERY = "arch.*"
ABSORBED = "it is absorbed into the queries: faster than to project keys and values in MXFP8"

BLOCK = 32
"""Elements that share a scale; dgrad and fprop reduce over the two widths of a weight, so both must be multiples."""

_log = logging.getLogger(__name__)

DESCRIPTIONS = {
    "fp32": "float32",
    "bf16": "BF16 compute over float32 masters",
    "mxfp8": "MXFP8, E4M3 with an E8M0 scale for every 32 elements",
    "mxfp8_g128": "MXFP8, E4M3 with an E8M0 scale for every 128 elements (128 x 128 of a weight), stored for every 32",
}
"""What a run's log calls its precision."""

HIGH_PRECISION = {"fp32": "fp32", **dict.fromkeys(("bf16", *QUANTIZED), "bf16 autocast")}
"""What a layer that is not quantised runs as, by the run's precision."""


class Row(NamedTuple):
    """One module of the table: `shape` of each of its parameters, `note` says why a matched module is not quantised."""

    name: str
    kind: str
    shape: str
    recipe: str
    note: str = ""


class FP32Linear(nn.Linear):
    """Linear layer that computes in fp32 whatever autocast says and is never quantised: router gates, logit layers.

    The dtype is fp32 or that of the weight, whichever is wider, so float64 models stay float64.
    """

    def forward(self, input: Tensor) -> Tensor:
        return float32_linear(input, self.weight, self.bias)


class Quantizable(nn.Module, ABC):
    """A module whose GEMMs run as its `recipe` says (`kernels.mxfp8.RECIPES`); "none" is plain autocast."""

    recipe: str = "none"

    @abstractmethod
    def multiplies_codes(self, recipe: str, device: torch.device) -> bool:
        """Whether a kernel of `device` takes quantised operands as they are."""

    @abstractmethod
    def execution(self) -> str:
        """Which backend multiplies quantised operands on this device, and how it accumulates the products."""


class MXLinear(Quantizable, nn.Linear):
    """Linear layer with a recipe. `apply_recipe` makes it out of an nn.Linear; the state dict is the same."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias, recipe=self.recipe)

    def product(self, input: Tensor) -> Tensor:
        """The layer without its bias, for a caller that adds it."""
        return linear(input, self.weight, recipe=self.recipe)

    def multiplies_codes(self, recipe: str, device: torch.device) -> bool:
        return multiplies_linear_codes(self.weight, QUANTIZED[recipe], device)

    def execution(self) -> str:
        return linear_execution(self.weight, QUANTIZED[self.recipe])


def apply_recipe(
    model: nn.Module,
    recipe: str,
    globs: Sequence[str],
    device: torch.device | None = None,
    capability: tuple[int, int] | None = None,
) -> list[Row]:
    """Quantise the nn.Linear layers and MoE experts of `model` whose qualified names match one of `globs`, in place.

    Call it once, before the model is wrapped (wrappers prefix names). `*` matches dots too. A glob may cover modules
    that cannot be quantised, whose rows then say why; a glob that quantises nothing is an error.

    Args:
        recipe: "fp32" and "bf16" quantise nothing and take no globs; "mxfp8" and "mxfp8_g128" need at least one.
        globs: over qualified names, or ["auto"]: experts whose codes `device`, by default that of each layer's
            weights, multiplies, and linear layers that are large enough to gain. Where there is none all stay in BF16,
            and a warning says so. On a CPU it is all layers of `arch`, so that the numbers can be studied.
        capability: resolve "auto" for a GPU of this compute capability instead, which need not be there.
    Returns:
        One row for every module that holds parameters, in the model's order.
    Raises:
        ValueError: unknown recipe, globs that the recipe does not use or lacks, or a glob that quantises nothing.
    """
    if recipe not in HIGH_PRECISION:
        raise ValueError(f"unknown precision {recipe!r}; choose one of {sorted(HIGH_PRECISION)}")
    quantizing = recipe in QUANTIZED
    if quantizing and not globs:
        raise ValueError(
            f"precision {recipe} with an empty quantize list is bf16; name layers, e.g. quantize=['*.experts']"
        )
    if globs and not quantizing:
        raise ValueError(f"precision {recipe} quantises nothing, yet quantize={list(globs)}; use mxfp8 or quantize=[]")

    holders = {name: module for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    obstacles = {name: _obstacle(module) for name, module in holders.items()}
    if AUTO in globs and list(globs) != [AUTO]:
        raise ValueError(f"quantize={list(globs)}: {AUTO!r} stands alone; use quantize=['{AUTO}'] or globs")
    matched = {name for glob in globs for name in _matches(EVERY if glob == AUTO else glob, obstacles)}
    if AUTO in globs:
        with dispatch.asked_of(capability):
            slower = _slower(model, {name: holders[name] for name in matched if not obstacles[name]}, recipe, device)
        obstacles |= slower
        if all(obstacles[name] for name in matched):
            _log.warning(
                "precision %s: no layer of this model gains by it on this GPU, so all stay in BF16; "
                'precision.quantize=["%s"] quantises them at a loss of speed',
                recipe,
                EVERY,
            )
    rows = []
    for name, module in holders.items():
        kind = type(module).__name__
        shape = ", ".join("x".join(map(str, parameter.shape)) for parameter in module.parameters(recurse=False))
        if name in matched and not obstacles[name]:
            _quantize(module, recipe)
            rows.append(Row(name, kind, shape, recipe))
        else:
            stays_fp32 = isinstance(module, FP32Linear | nn.Embedding | nn.EmbeddingBag)
            runs_as = "fp32" if stays_fp32 else HIGH_PRECISION[recipe]
            rows.append(Row(name, kind, shape, runs_as, obstacles[name] if name in matched else ""))
    return rows


def format_table(rows: Sequence[Row]) -> str:
    """The rows as aligned text. Modules that differ only by a list index (`layers.0.x`, `layers.1.x`) share a line."""
    counts = Counter(row._replace(name=re.sub(r"(?<![^.])\d+(?![^.])", "*", row.name)) for row in rows)
    lines = [("module", "kind", "shape", "runs as", "count", "note")]
    lines += [(row.name, row.kind, row.shape, row.recipe, str(count), row.note) for row, count in counts.items()]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def format_execution(model: nn.Module) -> str:
    """A line for each way in which quantised layers of `model` multiply on their device."""
    quantised = [module for module in model.modules() if isinstance(module, Quantizable) and module.recipe in QUANTIZED]
    counts = Counter((module.recipe, type(module).__name__, module.execution()) for module in quantised)
    return "\n".join(f"{recipe}, {count} x {kind}, by {how}" for (recipe, kind, how), count in counts.items())


def _slower(
    model: nn.Module, modules: dict[str, nn.Module], recipe: str, device: torch.device | None
) -> dict[str, str]:
    """Why modules of `model` that can run on MXFP8 operands take longer so than in BF16; empty for those that do not,
    and for those on a CPU, where nothing is faster."""
    devices = {name: device or next(module.parameters(recurse=False)).device for name, module in modules.items()}
    gpus = [name for name, on in devices.items() if dispatch.chip_of(torch.empty(0, device=on))["device"] == "cuda"]
    absorbed = dict.fromkeys(_absorbed(model, device), ABSORBED)
    return {name: _too_slow(modules[name], recipe, devices[name]) or absorbed.get(name, "") for name in gpus}


def _too_slow(module: nn.Module, recipe: str, device: torch.device) -> str:
    if isinstance(module, nn.Linear):
        if not multiplies_linear_codes(module.weight, QUANTIZED[recipe], device):
            return "its operands would be quantised or dequantised in memory first: BF16 is faster here"
        return "" if linear_gains(module.weight) else "it is too small to gain what quantising costs: BF16 is faster"
    assert isinstance(module, Quantizable)
    codes = module.multiplies_codes(recipe, device)
    return "" if codes else "its operands would be quantised or dequantised in memory first: BF16 is faster here"


def _absorbed(model: nn.Module, device: torch.device | None) -> Iterator[str]:
    """The projections `key_value` that layers of `model` would not call on the device, by what their `absorbs` says, as
    that of `modules.layers.attention.absorbed.AbsorbingAttention`."""
    for name, module in model.named_modules():
        absorbs = getattr(module, "absorbs", None)
        if absorbs is not None:
            on = device or next(module.parameters()).device
            if absorbs(torch.empty(0, dtype=torch.bfloat16, device=on)):
                yield f"{name}.key_value".lstrip(".")


def _obstacle(module: nn.Module) -> str:
    """Why a module cannot run on MXFP8 operands; empty if it can."""
    if isinstance(module, FP32Linear):
        return "router gates and logit layers stay in fp32"
    if type(module) is not nn.Linear and not isinstance(module, Quantizable):
        return "neither nn.Linear nor MoE experts"
    weights = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() > 1]
    for width in (width for weight in weights for width in weight.shape[-2:]):
        if width % BLOCK:
            return f"width {width} is not a multiple of {BLOCK}"
    return ""


def _matches(glob: str, obstacles: dict[str, str]) -> list[str]:
    names = [name for name in obstacles if fnmatchcase(name, glob)]
    if all(obstacles[name] for name in names):
        usable = [name for name, obstacle in obstacles.items() if not obstacle]
        closest = difflib.get_close_matches(glob, usable, n=3, cutoff=0.0)
        found = "; ".join(f"{name} ({obstacles[name]})" for name in names[:3]) or "no module with parameters"
        raise ValueError(f"quantize glob {glob!r} quantises nothing: it matches {found}. Closest that could: {closest}")
    return names


def _quantize(module: nn.Module, recipe: str) -> None:
    # Changing the class keeps parameters, hooks and every reference to the layer; a new layer would not.
    if isinstance(module, nn.Linear):
        module.__class__ = MXLinear
    assert isinstance(module, Quantizable)
    module.recipe = recipe


@contextmanager
def in_high_precision(model: nn.Module) -> Iterator[None]:
    """A context in which quantised layers multiply unquantised operands (under autocast in its dtype)."""
    layers = [module for module in model.modules() if isinstance(module, Quantizable)]
    recipes = [layer.recipe for layer in layers]
    for layer in layers:
        layer.recipe = "none"
    try:
        yield
    finally:
        for layer, recipe in zip(layers, recipes, strict=True):
            layer.recipe = recipe
