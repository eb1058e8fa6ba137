"""What each part of a model costs, and which backends serve it: a small batch that is run and watched."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from kernels.core import dispatch
from modules.batch import FeatureSpec
from modules.costs.flops import LONGEST, Call, FlopCounter, small_batch
from modules.precision import FP32Linear, Quantizable

LARGE = 0.05
"""Share of a model's FLOPs from which on a slow backend is worth a warning."""
KEYS = {
    "head_dim": "model.dim / model.num_heads",
    "num_out": "the tokens that the layer makes",
    "least_depth": "the tokens that the layer reads",
    "width": "model.dim",
    "inner": "model.dim",
    "in_features": "the layer's input width",
    "out_features": "the layer's output width",
    "dim": "model.dim",
    "expert_dim": "model.moe.expert_dim",
    "dtype": "precision=bf16",
    "activations": "the activation of model.*_gdpa",
}
"""What changes a fact of a call."""


class Cost(NamedTuple):
    """Of the modules of one name, whatever their place in a list, unless the configuration tells layers apart."""

    name: str
    modules: int
    parameters: int
    flops: float  # forward, an example
    activations: float  # bytes that the forward keeps for the backward, an example
    precision: str


class Served(NamedTuple):
    """Calls of one operator with the same facts, by modules of one name."""

    op: str
    module: str
    share: float  # of the model's FLOPs
    backend: str
    refusals: dict[str, str]  # preferred backend -> why it cannot serve
    faster: str  # one of these that a single other size, or dtype, would let serve; empty if there is none
    remedy: str  # which


@dataclass(frozen=True)
class Summary:
    events: int  # of a request of the batch that was run; it has one candidate
    costs: list[Cost]
    served: list[Served]
    layers: dict[str, str]  # layers that are alike -> what they have for themselves
    notes: Sequence[str] = ()  # `ModelConfig.notes`

    def __str__(self) -> str:
        costs: list[tuple[str, ...]] = [("module", "modules", "parameters", "MFLOP", "activations KiB", "precision")]
        for cost in self.costs:
            numbers = (
                f"{cost.modules}",
                f"{cost.parameters:,}",
                f"{cost.flops / 1e6:.2f}",
                f"{cost.activations / 1024:.0f}",
            )
            costs.append((cost.name, *numbers, cost.precision))
        served: list[tuple[str, ...]] = [("operator", "in", "FLOPs", "served by", "why no faster one")]
        for each in self.served:
            refusals = "; ".join(f"{name}: {why}" for name, why in each.refusals.items())
            served.append((each.op, each.module, f"{each.share:.1%}", each.backend, refusals))
        head = f"one candidate of a request with {self.events} events, forward:"
        lines = [head, *_aligned(costs), "", *_aligned(served)]
        if self.layers:
            layers = [(f"layers.{places}", own or "as the model") for places, own in self.layers.items()]
            lines += ["", *_aligned([("layers", "keys of their own"), *layers])]
        return "\n".join([*lines, *("" for _ in self.notes[:1]), *self.notes])

    def slow(self) -> Iterator[str]:
        """A sentence for each large part that another size or dtype would give a faster backend."""
        for served in self.served:
            if served.share >= LARGE and served.remedy:
                yield (
                    f"{served.op} of {served.module}, {served.share:.0%} of the model's FLOPs, is served by "
                    f"{served.backend} and not by {served.faster}, which {served.refusals[served.faster]}; it would "
                    f"serve with {served.remedy}"
                )


class _Watch(FlopCounter):
    """Also adds up what is kept for the backward: once for each piece of memory, at the module that keeps it first."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self._seen = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._alive: list[Tensor] = []  # so that no other tensor gets the place of one that was seen

    def kept(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, list | tuple):
                self.kept(tensor)
            elif isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.keep(tensor)

    def keep(self, tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if not self._within and tensor.is_floating_point() and place not in self._seen:
            self._seen.add(place)
            self._alive.append(tensor.detach())
            self.elements[self.module] += tensor.numel()
        return tensor.detach()  # a node that kept its own result with its history would never be freed


def summarise(
    arch: nn.Module,
    spec: FeatureSpec,
    dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    capability: tuple[int, int] | None = None,
    layers: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Summary:
    """The summary of `arch`, whose layers compute in `dtype` unless their own precision says otherwise.

    `capability`: of a GPU, also of one that is not there; without it backends are those of the parameters' device.
    `layers`, as `ModelConfig.describe_layers` gives it, are kept apart where they differ; `notes` are printed behind.
    """
    places: dict[str, list[str]] = {}
    for index, own in enumerate(layers):
        places.setdefault(own, []).append(str(index))
    alike = {",".join(same): own for own, same in places.items()}
    names = {place: ",".join(same) for same in places.values() for place in same}
    device = next(arch.parameters()).device
    longest = min(spec.max_events, LONGEST)
    lengths = [event.max_length * longest // spec.max_events for event in spec.histories]
    tokens, batch = small_batch(spec, dim, (1, 1), lengths, device)
    training = arch.training
    watch = _Watch(arch.parameters())
    try:
        devices = [device] if device.type == "cuda" else []
        keeping = saved_tensors_hooks(watch.keep, lambda tensor: tensor)
        asked = dispatch.asked_of(capability)
        with torch.random.fork_rng(devices), torch.enable_grad(), watch, keeping, asked:
            arch.eval()(tokens, batch)
    finally:
        arch.train(training)
    chip: dict[str, Hashable] = {} if capability is None else {"device": "cuda", "capability": capability}
    costs = list(_costs(arch, watch, dtype, names))
    return Summary(sum(lengths), costs, _served(watch.calls, watch.total, chip, dtype, names), alike, notes)


def _costs(arch: nn.Module, watch: _Watch, dtype: torch.dtype, layers: dict[str, str]) -> Iterator[Cost]:
    """Of the whole, and of its parts down to the second name below it."""
    root = type(arch).__name__
    modules: dict[str, list[tuple[str, nn.Module]]] = {"whole": [("", arch)]}
    for name, module in arch.named_modules():
        parts = [part for part in name.split(".") if not part.isdigit()]
        if name and len(parts) <= 2 and not isinstance(module, nn.ModuleList | nn.Dropout | nn.Identity):
            modules.setdefault(_starred(name, layers), []).append((name, module))
    for shown, same in modules.items():
        below = [_below(f"{root}.{name}".rstrip(".")) for name, _ in same]

        def total(counter: Counter[str], below: list[re.Pattern[str]] = below) -> float:
            return sum(value for name, value in counter.items() if any(each.match(name) for each in below)) / 2

        parameters = {id(p): p.numel() for _, module in same for p in module.parameters()}
        kept = total(watch.elements) * dtype.itemsize
        if parameters or kept:
            precision = ", ".join(
                sorted({_precision(layer, dtype) for _, m in same for layer in m.modules() if _holds(layer)})
            )
            yield Cost(shown, len(same), sum(parameters.values()), total(watch.of_modules), kept, precision)


def _below(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name) + r"(\.|$)")


def _starred(name: str, layers: dict[str, str]) -> str:
    """The name with stars for places in lists, but for those of layers that are told apart."""
    parts = name.split(".")
    for index, (before, part) in enumerate(zip(["", *parts], parts, strict=False)):
        if part.isdigit():
            parts[index] = layers.get(part, "*") if before == "layers" else "*"
    return ".".join(parts)


def _holds(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _precision(module: nn.Module, dtype: torch.dtype) -> str:
    if isinstance(module, Quantizable) and module.recipe != "none":
        return module.recipe
    return "float32" if isinstance(module, FP32Linear) else str(dtype).removeprefix("torch.")


def _served(
    calls: list[Call], total: float, chip: dict[str, Hashable], dtype: torch.dtype, layers: dict[str, str]
) -> list[Served]:
    flops: Counter[tuple[str, str, tuple[tuple[str, Hashable], ...]]] = Counter()
    for call in calls:
        computed = {name: dtype for name in ("dtype", "out_dtype") if call.facts.get(name) is torch.float32}
        facts = call.facts | chip | computed
        module = _starred(call.module.partition(".")[2], layers) or "the model"
        flops[call.op, module, tuple(facts.items())] += call.flops  # type: ignore[assignment]
    served = []
    for (op, module, facts_of_calls), each in flops.most_common():
        facts = dict(facts_of_calls)
        backend, refusals = dispatch.selection(op, **facts)
        faster, remedy = _remedy(op, facts, refusals)
        served.append(Served(op, module, each / max(total, 1), backend, refusals, faster, remedy))
    return served


def _remedy(op: str, facts: dict[str, Hashable], refusals: dict[str, str]) -> tuple[str, str]:
    """(a faster backend, the smallest change of one size, or of the dtype, that lets it serve), or empty strings."""
    for faster in refusals:
        for name, key in KEYS.items():
            for value in _alternatives(name, facts[name]) if name in facts else ():
                changed = {name: value} | ({"value_dim": value} if name == "head_dim" else {})
                if dispatch.selection(op, **facts | changed)[0] == faster:
                    new, old = (str(each).removeprefix("torch.") for each in (value, facts[name]))
                    return faster, f"{name}={new} instead of {old} ({key})"
    return "", ""


def _alternatives(name: str, value: Hashable) -> list[Hashable]:
    if name == "dtype":
        return [] if value is torch.bfloat16 else [torch.bfloat16]
    if isinstance(value, tuple):  # activations
        return [("gelu",) * len(value)]
    assert isinstance(value, int)
    sizes = sorted((abs(size - value), size) for size in (16, 32, 64, 128, 192, 256, 512))
    return [size for distance, size in sizes if distance]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
