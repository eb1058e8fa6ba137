"""Write a trained model for scoring: `python -m train.commands.export run_dir=RUN_DIR out=DIR`.

`torch.export` traces the architecture once, for a request with any number of candidates and events. A model that it
cannot trace is served in eager PyTorch: the command says so, and why, in one line, and so does `export.json`. Lookups
of embeddings and their assembly into tokens stay eager in any case: tables are usually served elsewhere.
`train.serving.scorer` scores with what is written.

`run_dir=` takes the run's best checkpoint, or its newest when none was validated; `checkpoint=` names one. Further
arguments: `max_candidates=` of a request (10000), `compile=false` to leave out the compiler, `rewrite=true` to take
copies of the request out of a model of your own by `modules.ikbo_rewrite`, and `key=value` overrides of the run's
configuration (`runtime.device=cpu`). Layers that a run quantised multiply in bfloat16 here.
Written to `out`, by default RUN_DIR/export:

- `config.json`, `model.safetensors`: the model and its weights, for `modules.pretrained.PretrainedModel`;
- `model.pt2`, unless it is served in eager PyTorch: on a GPU compiled with AOTInductor for it, elsewhere (and with
  `compile=false`) an exported program;
- `reader.json`, `vocabulary/` (of data=events): how requests become batches, for `train.data.reader.RequestReader`;
- `export.json`: device, precision, tasks, modules of the operators, and how the model is served.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from train.process.imports import lasting

with lasting():
    import numpy as np
    import torch
    from torch.export import ExportedProgram, export, save
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    from kernels import defined_in
    from kernels.core import dispatch
    from modules.batch import RequestBatch, with_candidates
    from modules.models import CustomConfig
    from modules.models.ranking import RankingModel
    from modules.models.scoring import ScoringArch, scoring_inputs, scoring_shapes, vendor_inputs
    from modules.pretrained import CONFIG, WEIGHTS, PretrainedModel
    from train.build import load_model
    from train.checkpoint import load as checkpoint
    from train.commands.score import check
    from train.config.compose import from_dict
    from train.config.overrides import split_options
    from train.config.schema import DataConfig
    from train.data import build_source
    from train.data.features import mapping
    from train.data.reader import DESCRIPTION, keep_reader
    from train.data.source import Source
    from train.process import errors
    from train.process.files import summed, write_json
    from train.process.precision import compute_dtype
    from train.process.quiet import quieten
    from train.serving.scorer import ABOUT, PROGRAM

TIMED_CANDIDATES = 1000
"""Of the example request: Inductor chooses kernels by timing them on it."""
LOOKED_AT = 1000
"""Requests that are looked at together; the best of them is the example, if it will do."""
MOST_LOOKED_AT = 100_000
"""How many of the newest requests are searched for an example."""


@torch.no_grad()
def export_arch(
    model: RankingModel, batch: RequestBatch, dtype: torch.dtype, max_candidates: int, rewriting: bool = False
) -> ExportedProgram:
    """The architecture as a program for one request; `batch` is an example with two candidates and events or more.

    With `rewriting` copies of the request to its candidates are taken out, and what was changed is printed. Raises
    whatever tracing raises for an architecture that cannot be traced, e.g. one that reads sizes from its data.
    """
    arch = ScoringArch(model.arch, dtype).eval()
    spec = model.embedding.assemble.spec
    inputs, shapes = _inputs(model, batch), scoring_shapes(spec, max_candidates)
    if rewriting:
        print(arch.rewrite(inputs, shapes, max_candidates))
    return export(arch, inputs, dynamic_shapes=shapes)


def traced(
    model: PretrainedModel, source: Source, dtype: torch.dtype, rewriting: bool = False
) -> tuple[ExportedProgram, RequestBatch] | str:
    """A program and the request that it was made from; where there is none, the reason.

    A model of your own may do anything while it is traced, hence any exception is a reason.
    """
    device, max_candidates = next(model.arch.parameters()).device, model.spec.max_candidates
    try:
        request = with_candidates(example(source), min(TIMED_CANDIDATES, max_candidates)).to(device)
        with redirect_stderr(io.StringIO()):  # PyTorch prints the graph of a model that it cannot trace
            program = export_arch(model, request, dtype, max_candidates, rewriting)
        run, arch = program.module(), ScoringArch(model.arch, dtype).eval()
        for count in (1, request.num_candidates):
            batch = with_candidates(request, count)
            inputs = _inputs(model, batch)
            with torch.no_grad():
                # The two run the same operators.
                torch.testing.assert_close(run(*inputs), arch(*inputs), rtol=2e-2, atol=2e-2)
        return program, request
    except GuardOnDataDependentSymNode as error:
        return f"its sizes depend on its data: {_first_line(error)}"
    except Exception as error:
        return f"{type(error).__name__}: {_first_line(error)}"


def _inputs(model: RankingModel | PretrainedModel, batch: RequestBatch) -> tuple[Any, ...]:
    tokens = model.embedding(batch)
    return *scoring_inputs(tokens, batch.candidate_offsets), *vendor_inputs(tokens, batch)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0].strip()


def operator_modules(program: ExportedProgram) -> list[str]:
    """The modules that define our operators in a program: they must be imported where it is loaded."""
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    names = {
        node.target.name() for graph in graphs for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)
    }
    return sorted({defined_in[name] for name in names & defined_in.keys()})


def main(arguments: list[str]) -> Path:
    quieten()
    defaults = {"run_dir": "", "checkpoint": "", "out": "", "max_candidates": "10000"}
    defaults |= {"compile": "true", "rewrite": "false"}
    options, overrides = split_options(arguments, defaults, "run_dir=RUN_DIR out=DIR")
    most = options["max_candidates"]
    if not most.isdecimal() or int(most) < 2:
        raise ValueError(f"max_candidates={most} must be a number of at least 2, e.g. max_candidates=10000")
    for name in ("compile", "rewrite"):
        if options[name] not in ("true", "false"):
            raise ValueError(f"{name}={options[name]} must be true or false, e.g. {name}=false")
    max_candidates = int(most)
    path = checkpoint.resolve(options["run_dir"], options["checkpoint"])
    config = from_dict(checkpoint.read_meta(path)["config"], overrides)
    dispatch.force(config.runtime.kernels)
    kind = (
        config.runtime.device if config.runtime.device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    )
    device, out = torch.device(kind), Path(options["out"] or path.parent.parent / "export")
    out.mkdir(parents=True, exist_ok=True)
    source = build_source(config.data)
    model = load_model(path, config, source, max_candidates, device)
    dtype = compute_dtype(config.precision.name, device)
    origin = {"checkpoint": str(path.resolve()), "overrides": overrides}
    compiling, rewriting = options["compile"] == "true", options["rewrite"] == "true"
    export_model(out, model, source, config.data, config.tasks, dtype, compiling, origin, rewriting)
    print(f"{config.model.name} of {path}: {out}")
    return out


def export_model(
    out: Path,
    model: PretrainedModel,
    source: Source,
    data: DataConfig,
    tasks: Mapping[str, Any],
    dtype: torch.dtype,
    compiling: bool = True,
    origin: Mapping[str, Any] | None = None,
    rewriting: bool = False,
) -> None:
    """Write a model, on the device where it is to be served, with the data that it was trained on and the losses of its
    tasks. Prints why, if it is served in eager PyTorch."""
    if rewriting and not isinstance(model.config, CustomConfig):
        raise ValueError(
            f"rewrite=true is for a model of your own (model=custom); model.name={model.config.name} copies no request "
            "to its candidates: use rewrite=false"
        )
    device = next(model.arch.parameters()).device
    model.save_pretrained(out)
    keep_reader(data, source, out)
    for old in (ABOUT, PROGRAM):
        (out / old).unlink(missing_ok=True)
    found = traced(model, source, dtype, rewriting)
    compiled = not isinstance(found, str) and device.type == "cuda" and compiling
    if not isinstance(found, str):
        write_program(found[0], out / PROGRAM, compiled)
    about = {
        "program": None if isinstance(found, str) else PROGRAM,
        "eager": found if isinstance(found, str) else None,
        "compiled": compiled,
        "operators": [] if isinstance(found, str) else operator_modules(found[0]),
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "tasks": {task: _known(chosen) for task, chosen in tasks.items()},
        "data_fingerprint": source.fingerprint,
        "checkpoint": None,
        "overrides": [],
        "files": {str(file.relative_to(out)): summed(file) for file in _written(out)},
    }
    write_json(out / ABOUT, about | dict(origin or {}))
    if isinstance(found, str):
        print(f"{model.config.name} cannot be traced and is served in eager PyTorch ({found})")
    elif compiled:
        check(out, model, dtype, found[1])


def _written(out: Path) -> list[Path]:
    """The files of an export, beside which there may be others; the mapping has sums of those that go with it."""
    names = (CONFIG, WEIGHTS, DESCRIPTION, PROGRAM, f"{mapping.FOLDER}/{mapping.ABOUT}")
    return [file for name in names if (file := out / name).exists()]


def write_program(program: ExportedProgram, path: Path, compiled: bool) -> None:
    if not compiled:
        save(program, path)
        return
    # When Inductor decides on the padding of a matrix product, it assumes that what holds for the example's sizes holds
    # for all: with an example of two candidates, for up to 97. With 10,000 candidates, a grid then had more than the
    # 65,535 blocks that its second dimension allows, and the driver refused the launch.
    torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs={"triton.max_tiles": 1})


def _known(chosen: dict[str, Any]) -> dict[str, Any]:
    """What a scorer needs of a task's loss: not a function of your own, which it must not import; its prediction is its
    logit, like that of "squared"."""
    return {"loss": "squared"} if "." in chosen["loss"] else chosen


def example(source: Source) -> RequestBatch:
    """The training request with the most events of its rarest type, with two candidates or more.

    An export also works for sizes of 0 and 1, but has to be made from an example with larger ones. Requests are tried
    from the newest on, since the oldest hardly have a history yet.
    """
    best, most, end = 0, -1, source.num_requests("train")
    first, longest = max(0, end - MOST_LOOKED_AT), torch.zeros(len(source.spec.histories), dtype=torch.int64)
    while end > first and most < 2:
        numbers = np.arange(max(first, end - LOOKED_AT), end)
        batch = source.batch("train", numbers)
        lengths = batch.history_times.lengths().view(-1, len(numbers))
        longest = torch.maximum(longest, lengths.amax(1))
        least = lengths.amin(0) if len(lengths) else torch.full((len(numbers),), 2)
        least = torch.where(batch.candidate_offsets.diff() > 0, least, -1)
        if int(least.max()) > most:
            best, most = int(numbers[least.argmax()]), int(least.max())
        end = int(numbers[0])
    if most < 2:
        rare = [event.name for event, length in zip(source.spec.histories, longest, strict=True) if length < 2]
        raise ValueError(
            "an export is made from a training request with a candidate and two events of every type; none of the "
            f"newest {source.num_requests('train') - first:,} is one. Types that no request has two events of: "
            f"{', '.join(rare) or 'none'}; train without them, or on files in which they happen"
        )
    request = source.batch("train", np.array([best]))
    return with_candidates(request, max(2, request.num_candidates))


if __name__ == "__main__":
    errors.run(main)
