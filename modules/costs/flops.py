"""FLOPs of matrix products, counted while a model runs: PyTorch's own by its formulas, our operators' by theirs.

A model is run on a few small batches, in which every request has the same numbers of candidates and events. From these
follows what a batch of any size costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from kernels.core import dispatch
from kernels.core.rows import Rows
from modules.batch import FeatureSpec, RequestBatch, SparseFeature, Vendors
from modules.layers.embedding.tokens import JaggedSequence, Tokens

LONGEST = 2048
"""Events of a request of a small batch, at most: the references that serve there keep a matrix of all pairs."""


class Call(NamedTuple):
    """A call of an operator of `kernels` that multiplies matrices."""

    op: str
    module: str
    facts: dict[str, Hashable]  # as `dispatch.selection` takes them
    flops: float


class FlopCounter(TorchDispatchMode):
    """A context that counts forward FLOPs. In it, references serve all operators of `kernels`.

    `of_modules` has the FLOPs by the name of the innermost module that computes them, below the class of the outermost;
    `calls` are the calls of operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.of_modules: Counter[str] = Counter()
        self.calls: list[Call] = []
        self._tracker = ModuleTracker()
        self._within = False  # an operator whose formula has counted it

    def __enter__(self) -> FlopCounter:
        self._exit = ExitStack()
        self._exit.enter_context(self._tracker)
        self._exit.enter_context(dispatch.observed(self._observe))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._exit.close()

    @property
    def total(self) -> float:
        return sum(self.of_modules.values())

    @property
    def module(self) -> str:
        """The innermost module that runs."""
        return max(self._tracker.parents, key=len)

    def kept(self, tensors: Iterable[Any]) -> None:
        """What an operator of `kernels` reads and makes."""

    def _add(self, flops: float) -> None:
        self.of_modules[self.module] += flops  # type: ignore[assignment]

    def _observe(self, op: str, like: Tensor, facts: dict[str, Hashable]) -> dispatch.Backend:
        function, formula = dispatch.reference(op), dispatch.formula(op)

        def call(*arguments: Any, **named: Any) -> Any:
            if formula is None or self._within:
                return function(*arguments, **named)
            flops = formula(*arguments, **named)
            self._add(flops)
            self.calls.append(Call(op, self.module, dispatch.facts_of(like) | facts, flops))
            self._within = True
            try:
                out = function(*map(_as_long_as_there_is, arguments), **named)
            finally:
                self._within = False
            self.kept((*arguments, out))
            return out

        return dispatch.Backend("reference", call)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None and not self._within:
            self._add(formula(*args, **(kwargs or {}), out_val=out))
        return out


def _as_long_as_there_is(argument: Any) -> Any:
    """Rows bounded by their longest: a configured bound would make references pad a small batch to all its pairs."""
    if not isinstance(argument, Rows) or argument.offsets.shape[0] < 2:
        return argument
    return Rows(argument.offsets, min(max(int(argument.offsets.diff().max()), 1), argument.max_length))


@dataclass(frozen=True)
class BatchFlops:
    """Forward FLOPs of a batch: those of each request, event of a request, pair of its events, and of each candidate
    for itself, for each event and for each pair.

    Twice the batch has twice the FLOPs. Where a product of numbers of candidates and of events is needed, the two are
    taken to be independent; events are taken to be of each type in proportion to its `max_length`.
    """

    request: float
    event: float
    squared: float
    candidate: float
    candidate_event: float
    candidate_squared: float

    def __call__(
        self, num_requests: float, num_candidates: float, sum_lengths: float, sum_squared_lengths: float
    ) -> float:
        """`sum_lengths` and `sum_squared_lengths` are sums over requests of their events, and of that squared."""
        each = num_candidates / max(num_requests, 1)
        return (
            num_requests * self.request
            + num_candidates * self.candidate
            + sum_lengths * (self.event + each * self.candidate_event)
            + sum_squared_lengths * (self.squared + each * self.candidate_squared)
        )


def count_flops(arch: nn.Module, spec: FeatureSpec, dim: int) -> BatchFlops:
    """FLOPs of `arch` as a function of a batch's size, from seven small batches on the device of its parameters."""
    capacity = spec.max_events
    longest = min(capacity, LONGEST)
    sizes = [(2, 1, 0), (2, 2, 0), (4, 1, 0)]  # requests, candidates, events of a request
    sizes += [(2, candidates, length) for length in {longest // 2, longest} - {0} for candidates in (1, 2)]
    rows, flops = [], []
    for num_requests, num_candidates, length in sizes:
        candidates = tuple(int(request < num_candidates) for request in range(num_requests))
        lengths = [-(-event.max_length * length // capacity) if length else 0 for event in spec.histories]
        total = sum(lengths)
        of_requests, of_candidates = (
            [count * total**power for power in range(3)] for count in (num_requests, num_candidates)
        )
        rows.append([1, *of_requests, *of_candidates])
        flops.append(_run(arch, spec, dim, candidates, lengths).total)
    # Scaled, for the sums differ by many orders of magnitude; in float64 the solution is exact to rounding.
    table = torch.tensor(rows, dtype=torch.float64)
    scale = table.amax(0).clamp(min=1)
    solved = torch.linalg.lstsq(table / scale, torch.tensor(flops, dtype=torch.float64)[:, None], driver="gelsd")
    # What is computed once a batch, such as the projection of learned queries, comes first and is left out.
    return BatchFlops(*(solved.solution[1:, 0] / scale[1:]).tolist())


def _run(arch: nn.Module, spec: FeatureSpec, dim: int, candidates: tuple[int, ...], lengths: list[int]) -> FlopCounter:
    """The counter after a forward of requests with these numbers of candidates, each with these events of each type."""
    device = next(arch.parameters()).device
    tokens, batch = small_batch(spec, dim, candidates, lengths, device)
    training = arch.training
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.no_grad(), FlopCounter() as counter:
            arch.eval()(tokens, batch)
    finally:
        arch.train(training)
    return counter


def small_batch(
    spec: FeatureSpec, dim: int, candidates: tuple[int, ...], lengths: list[int], device: torch.device
) -> tuple[Tokens, RequestBatch]:
    """Requests with these numbers of candidates, each with `lengths` events of each type: random tokens, ids of 0."""
    num_requests, num_candidates = len(candidates), sum(candidates)

    def ids(features: tuple[SparseFeature, ...], rows: int) -> KeyedJaggedTensor:
        return _jagged([feature.name for feature in features], [1] * len(features), rows, device)

    def tokens(rows: int, *shape: int) -> Tensor:
        return torch.randn(rows, *shape, device=device)

    candidate_offsets = torch.tensor([0, *candidates], device=device).cumsum(0)
    vendors, vendor = None, None
    if spec.num_vendor_tokens:  # a request's one vendor: how many there are is not counted, so FLOPs are at least these
        offsets = torch.arange(num_requests + 1, device=device)
        dense = tokens(num_requests, len(spec.vendor_columns))
        vendors = Vendors(ids(spec.vendor, num_requests), dense, offsets, candidate_offsets)
        vendor = tokens(num_requests, spec.num_vendor_tokens, dim)

    events = list(zip(spec.histories, lengths, strict=True))
    fields = [(event.key(field), length) for event, length in events for field in event.fields]
    times = _jagged([event.name for event in spec.histories], lengths, num_requests, device)
    histories = {}
    for event, length in events:
        offsets = torch.arange(num_requests + 1, device=device) * length
        values = tokens(num_requests * length, len(event.fields) * dim)
        histories[event.name] = JaggedSequence(values, offsets, times[event.name].values())
    labels = torch.zeros(num_candidates, len(spec.tasks), device=device)
    rows = torch.zeros(num_candidates, dtype=torch.int64, device=device)
    batch = RequestBatch(
        request_sparse=ids(spec.request, num_requests),
        candidate_sparse=ids(spec.candidate, num_candidates),
        request_dense=tokens(num_requests, len(spec.request_columns)),
        candidate_dense=tokens(num_candidates, len(spec.candidate_columns)),
        histories=_jagged([key for key, _ in fields], [length for _, length in fields], num_requests, device),
        history_times=times,
        request_time=torch.ones(num_requests, dtype=torch.int64, device=device),
        candidate_offsets=candidate_offsets,
        labels=labels,
        weights=torch.ones_like(labels),
        group=rows,
        row=rows,
        vendors=vendors,
    )
    request = tokens(num_requests, spec.num_request_tokens, dim)
    candidate = tokens(num_candidates, spec.num_candidate_tokens, dim)
    return Tokens(request, candidate, histories, vendor), batch


def _jagged(keys: list[str], lengths: list[int], rows: int, device: torch.device) -> KeyedJaggedTensor:
    """`rows` rows of each key, all of its length, of zeros."""
    counts = torch.tensor(lengths, dtype=torch.int64, device=device).repeat_interleave(rows)
    values = torch.zeros(rows * sum(lengths), dtype=torch.int64, device=device)
    return KeyedJaggedTensor(keys=keys, values=values, lengths=counts, stride=rows)
