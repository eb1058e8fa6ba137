"""Models compute what belongs to a request at the request, and allocate no copy of it for candidates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from kernels.core import dispatch
from modules.batch import RequestBatch
from modules.broadcast import CandidateRows
from modules.config import ModelConfig
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.models import baselines, build
from modules.models.baselines import DIN, DLRM, DCNv2
from modules.models.gem import GEM
from modules.models.hstu import HSTU
from modules.models.interformer import InterFormer
from modules.models.interformer.arches import WukongStackConfig
from modules.models.kunlun import Kunlun
from modules.models.sasrec import SASRec
from modules.models.sequential import SequentialConfig
from modules.models.wukong import Wukong
from tests.modules.factories import random_batch, random_spec, vendor_spec
from tests.modules.models.test_models import GEM_SMALL, KUNLUN, SMALL, VARIANTS
from tests.modules.models.test_models import WUKONG as WUKONG_MODEL
from tests.modules.models.test_sequential import SPEC

# As many tokens out of the first layer as into it, so that the shared ones are added to the result themselves.
WUKONG = {"interaction": "wukong", "wukong": WukongStackConfig(num_fmb=8, num_lcb=5)}
LATER = ("mixing-add", "mixing-revert", "mixing-newest", "mixing-heads", "mixing-attention", "onetrans-pyramid")
CANDIDATES = (4, 0, 3, 4)  # together a number that no other size is


class Copies(TorchDispatchMode):
    """Records the number of elements of every floating result whose rows are those of requests, once a candidate."""

    def __init__(self, batch: RequestBatch) -> None:
        super().__init__()
        self.owner = batch.owner
        self.first = batch.candidate_offsets[self.owner]
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            self.look(str(func), x)
        return result

    def look(self, name: str, x: Any) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape[:1] != self.owner.shape:
            return
        rows = x.detach().flatten(1) if x.dim() > 1 else x.detach()[:, None]
        if torch.equal(rows, rows[self.first]) and not torch.equal(rows, rows[:1].expand_as(rows)):
            self.found.append((name, x.numel()))


@pytest.fixture
def opaque(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a backend allocates inside is its own: on the CPU the references copy rows where kernels read them."""
    choose = dispatch.choose

    def chosen(op: str, *args: Any, **facts: Any) -> Callable[..., Any]:
        backend = choose(op, *args, **facts)

        class Opaque(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, structure: TreeSpec, *inputs: Any) -> Any:
                with _disable_current_modes(), torch.enable_grad():
                    ctx.leaves = [
                        x.detach().requires_grad_() if isinstance(x, Tensor) and x.requires_grad else x for x in inputs
                    ]
                    ctx.out = backend(*tree_unflatten(ctx.leaves, structure))
                return ctx.out.detach()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Any:
                wanted = [x for x in ctx.leaves if isinstance(x, Tensor) and x.requires_grad]
                with _disable_current_modes():
                    gradients = iter(torch.autograd.grad(ctx.out, wanted, grad, allow_unused=True))
                given = [isinstance(x, Tensor) and x.requires_grad for x in ctx.leaves]
                return None, *(next(gradients) if each else None for each in given)

        def apply(*inputs: Any) -> Any:
            leaves, structure = tree_flatten(inputs)  # autograd sees no tensors inside lists
            return Opaque.apply(structure, *leaves)

        # Operators that return more than a tensor, or take lists of them, are those of sequences, or compress.
        several = ("jagged_concat", "jagged_index_select", "add_rms_norm", "place_rows", "rotate_qkv", "project_qkv")
        if op in (*several, "gdpa_layer_norm", "gdpa_add_norms"):
            return lambda *inputs: _outside(backend, inputs)
        if op == "rms_norm":  # a tuple where it is for several readers
            return lambda *inputs: _outside(backend, inputs) if True in inputs[-2:] else apply(*inputs)
        if op == "linear_compression":
            return backend
        return apply

    monkeypatch.setattr(dispatch, "choose", chosen)


def _outside(backend: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    with _disable_current_modes():
        return backend(*inputs)


def found(model: nn.Module, batch: RequestBatch, embedding: FeatureEmbedding) -> list[tuple[str, int]]:
    tokens = embedding(batch)
    copies = Copies(batch)
    with copies:
        model(tokens, batch).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return copies.found


ALL_OF_REQUESTS: list[ModelConfig] = [
    *(InterFormer.Config(**SMALL | changed) for changed in ({}, {"num_layers": 3}, {"head_hidden": []}, WUKONG)),
    Wukong.Config(**WUKONG_MODEL),
    Kunlun.Config(**KUNLUN),
    Kunlun.Config(**KUNLUN, comp_skip=False, num_layers=3),
    GEM.Config(**GEM_SMALL, num_layers=3),
    DIN.Config(dim=8, hidden=[16]),
    DIN.Config(dim=8, hidden=[]),
    DCNv2.Config(dim=8, rank=4, hidden=[16]),
    DCNv2.Config(dim=8, rank=4, hidden=[16, 16], num_layers=1),
    DLRM.Config(dim=8, hidden=[16]),
    DLRM.Config(dim=8, hidden=[]),
    SASRec.Config(dim=8),
    HSTU.Config(dim=8),
    *(VARIANTS[name] for name in LATER),
]


@pytest.mark.usefixtures("opaque")
@pytest.mark.parametrize("config", ALL_OF_REQUESTS, ids=lambda config: config.name)
def test_no_request_is_copied_to_its_candidates(config: ModelConfig) -> None:
    torch.manual_seed(0)
    spec = SPEC if isinstance(config, SequentialConfig) else random_spec()
    embedding = FeatureEmbedding(spec, config.dim, device="cpu")
    assert found(build(config, spec), random_batch(spec, CANDIDATES, [5] * 4), embedding) == []


@pytest.mark.usefixtures("opaque")
def test_copies_are_seen_where_a_model_makes_them() -> None:
    torch.manual_seed(0)
    spec, dim = random_spec(), 8
    model = build(DIN.Config(dim=dim, hidden=[16]), spec)
    model.heads.first[0].own.register_forward_hook(lambda *_: None)  # must now be called, on all features
    batch, embedding = random_batch(spec, CANDIDATES), FeatureEmbedding(spec, dim, device="cpu")
    assert max(size for _, size in found(model, batch, embedding)) == sum(CANDIDATES) * 2 * dim  # two request tokens


OTHERS = ("sasrec", "hstu", "interformer of vendors", "kunlun of vendors")


class Sizes(TorchDispatchMode):
    """Remembers how many elements results have."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.found[x.numel()] = f"{func} {list(x.shape)}"
        return result


@pytest.mark.usefixtures("opaque")
@pytest.mark.parametrize("variant", [*(name for name in VARIANTS if name != "interformer-candidate"), *OTHERS])
def test_nothing_is_made_for_each_pair_of_candidate_and_event(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ratio, length, dim = 16, 192, 8
    monkeypatch.setattr(baselines, "LEAST_PAIRS", 0)
    monkeypatch.setattr(baselines, "UNIT_HIDDEN", [dim])
    torch.manual_seed(0)
    name, _, vendors = variant.partition(" of ")
    if name in VARIANTS:
        config, spec = VARIANTS[name], (vendor_spec if vendors else random_spec)(max_length=length)
    else:
        (event,) = SPEC.histories
        config = (SASRec if variant == "sasrec" else HSTU).Config(dim=dim)
        spec = dataclasses.replace(SPEC, histories=(dataclasses.replace(event, max_length=length),))
    spec = dataclasses.replace(spec, max_candidates=ratio)
    model, embedding = build(config, spec), FeatureEmbedding(spec, dim, device="cpu")
    sizes = []
    for each in (1, ratio):
        batch = random_batch(spec, (each, each), [length] * 2)
        tokens = embedding(batch)
        with Sizes() as made:
            model(tokens, batch).square().sum().backward()
        sizes.append(made.found)
    alone, together = sizes  # scores of all pairs of events are large, but not larger with more candidates
    pairs = 2 * ratio * length * dim
    assert {size: name for size, name in together.items() if size >= pairs and size not in alone} == {}


def test_rows_combine_with_candidates_in_the_wider_dtype() -> None:
    rows = CandidateRows(torch.tensor([0, 0, 2]), torch.tensor([0, 2, 2, 3]))
    x, shared = torch.randn(3, 4, 2).bfloat16(), torch.randn(3, 4, 2)
    assert torch.equal(rows.add(x, shared), x + shared[rows.owner])
    assert torch.equal(rows.multiply(x, shared), x * shared[rows.owner])
