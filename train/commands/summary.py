"""What each part of a model costs, and which backends serve it: `python -m train.commands.summary [chip=90] [key=...]`.

Builds the model of a configuration for its data, as a training would, and prints for each part its parameters, and for
one example its forward FLOPs and the memory that is kept for the backward; then for each operator that multiplies
matrices which backend serves it, and why no faster one. Nothing is trained. `chip=90` (or 100) answers for a GPU of
that compute capability, which need not be there. The other arguments are those of `train.main`.
"""

from __future__ import annotations

from train.process.imports import lasting

with lasting():
    import torch

    from modules.costs.summary import Summary, summarise
    from modules.models import build as build_arch
    from modules.precision import apply_recipe
    from train.build import planned
    from train.config.compose import to_config
    from train.config.files import composed
    from train.config.overrides import split_options
    from train.process import errors


def main(arguments: list[str]) -> Summary:
    options, overrides = split_options(arguments, {"chip": ""}, "chip=90")
    if options["chip"] and not (options["chip"].isdigit() and len(options["chip"]) in (2, 3)):
        raise ValueError(f"chip={options['chip']} must be a compute capability without its dot, e.g. chip=90")
    config = to_config(composed(overrides))
    _, _, spec, chosen = planned(config)
    arch = build_arch(config.model, spec)
    capability = (int(options["chip"][:-1]), int(options["chip"][-1])) if options["chip"] else None
    name = config.precision.name
    if name == "auto":
        name = "bf16" if capability else "fp32"
    holder = torch.nn.ModuleDict({"arch": arch})  # names that the globs of a precision mean
    apply_recipe(holder, name, config.precision.quantize, capability=capability)
    dtype = torch.float32 if name == "fp32" else torch.bfloat16
    layers = config.model.describe_layers()
    notes = [*config.model.notes(), *([chosen] if chosen else [])]
    return summarise(arch, spec, config.model.dim, dtype=dtype, capability=capability, layers=layers, notes=notes)


def _print(arguments: list[str]) -> None:
    found = main(arguments)
    print(found)
    for sentence in found.slow():
        print(f"\n{sentence}")


if __name__ == "__main__":
    errors.run(_print)
