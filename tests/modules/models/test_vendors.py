"""Vendors between requests and candidates: the batch, the models' equality with the expanded twin, and no copies."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modules.batch import RequestBatch, Vendors, with_candidates
from modules.broadcast import CandidateRows, VendorTokens
from modules.layers.embedding.local import LocalEmbedding
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.layers.interaction.lce import LCE
from modules.models import build
from modules.models.baselines import DLRM
from modules.models.scoring import arch_inputs, scoring_shapes
from tests.modules.factories import random_batch, random_spec, vendor_spec
from tests.modules.models.test_models import VARIANTS, DoubleLookup
from tests.modules.models.test_no_broadcast import CANDIDATES, Copies, opaque

__all__ = ["opaque"]  # a fixture

WITH_VENDORS = [
    "interformer",
    "interformer-candidate",
    "interformer-wukong",
    "kunlun",
    "kunlun-all-in-each",
    "gem",
    "wukong",
    "din",
    "dcnv2",
]
BATCHES: dict[str, tuple[list[int], list[list[int]]]] = {
    "mixed": ([2, 0, 1, 3, 1], [[1, 1], [], [1], [2, 0, 1], [0, 1]]),
    "one row": ([1], [[1]]),
    "requests and vendors without candidates": ([0, 2, 0], [[], [0, 2, 0], [0]]),
}


def double(batch: RequestBatch) -> RequestBatch:
    assert batch.vendors is not None
    numbers = {name: getattr(batch, name).double() for name in ("request_dense", "candidate_dense", "labels")}
    return dataclasses.replace(
        batch, **numbers, vendors=dataclasses.replace(batch.vendors, dense=batch.vendors.dense.double())
    )


class Ranking(nn.Module):
    def __init__(self, variant: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spec, config = vendor_spec(), VARIANTS[variant]
        self.embedding = FeatureEmbedding(self.spec, config.dim, device="cpu")
        self.arch = build(config, self.spec)

    def forward(self, batch: RequestBatch) -> Tensor:
        return self.arch(self.embedding(batch), batch)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("variant", WITH_VENDORS)
def test_a_batch_and_its_expanded_twin_agree_in_loss_and_every_gradient(variant: str, batch: str) -> None:
    model = Ranking(variant)
    model.embedding.collection = DoubleLookup(model.embedding.collection)
    model.double()
    candidates, vendors = BATCHES[batch]
    given = double(random_batch(model.spec, candidates, vendors=vendors))
    results = []
    for twin in (given, given.expand()):
        loss = nn.functional.binary_cross_entropy_with_logits(model(twin), twin.labels, reduction="sum")
        results.append((loss, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)))
    (loss, gradients), (twin_loss, twin_gradients) = results
    torch.testing.assert_close(loss, twin_loss, rtol=1e-12, atol=0)
    for (name, parameter), a, b in zip(model.named_parameters(), gradients, twin_gradients, strict=True):
        a, b = (torch.zeros_like(parameter) if x is None else x for x in (a, b))
        # Float64 sums in another order.
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}")
    if batch == "mixed":
        assert [n for (n, _), g in zip(model.named_parameters(), gradients, strict=True) if not g.any()] == []


@pytest.mark.parametrize("variant", ["interformer", "kunlun", "gem", "wukong", "din", "dcnv2"])
def test_a_batch_without_any_vendor_trains(variant: str) -> None:
    model = Ranking(variant)
    logits = model(random_batch(model.spec, (0, 0), vendors=[[], []]))
    assert logits.shape == (0, 2)
    logits.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.arch.parameters())


@pytest.mark.parametrize("variant", WITH_VENDORS)
def test_a_vendor_changes_the_logits_of_its_own_candidates_only(variant: str) -> None:
    model = Ranking(variant).eval()
    batch = random_batch(model.spec, (3, 2), (4, 4), vendors=[[2, 1], [2]])
    changed = pickle.loads(pickle.dumps(batch))
    changed.vendors.dense[0] += 1
    difference = (model(changed) - model(batch)).abs().amax(1)
    assert difference.gt(1e-6).tolist() == [True, True, False, False, False]


def test_models_that_read_no_vendors_say_which_do() -> None:
    with pytest.raises(ValueError, match="model.name=dlrm reads no features of vendors; choose .*interformer, kunlun"):
        build(DLRM.Config(dim=8), vendor_spec())
    spec = vendor_spec()
    batch = dataclasses.replace(random_batch(spec), vendors=None)
    with pytest.raises(ValueError, match="built for data with vendors; the batch has none"):
        LocalEmbedding(spec, 8)(batch)


class VendorCopies(Copies):
    """Also records those whose rows are those of vendors, once a candidate."""

    def __init__(self, batch: RequestBatch) -> None:
        super().__init__(batch)
        vendors = batch.vendors
        assert vendors is not None
        whose = CandidateRows.of_offsets(vendors.candidate_offsets, batch.num_candidates)
        self.first = vendors.candidate_offsets[whose.owner]


@pytest.mark.usefixtures("opaque")
@pytest.mark.parametrize("kind", [Copies, VendorCopies])
@pytest.mark.parametrize("variant", WITH_VENDORS)
def test_neither_requests_nor_vendors_are_copied_to_candidates(variant: str, kind: type[Copies]) -> None:
    model = Ranking(variant)
    batch = random_batch(model.spec, CANDIDATES, [5] * 4, vendors=[[2, 2], [], [3], [1, 3]])
    tokens = model.embedding(batch)
    with kind(batch) as copies:
        model.arch(tokens, batch).square().sum().backward()
    assert (copies.found == []) is (variant != "interformer-candidate")


def test_compression_of_three_levels_is_one_map_over_all_tokens() -> None:
    torch.manual_seed(0)
    layer = LCE(2, 5, num_request=3, num_vendor=4).double()
    candidate, vendor, request = (torch.randn(*s, 6, dtype=torch.float64) for s in ((5, 2), (3, 4), (2, 3)))
    of_request = CandidateRows.of_offsets(torch.tensor([0, 1, 3]), 3)
    of_candidate = CandidateRows.of_offsets(torch.tensor([0, 2, 2, 5]), 5)
    rows = CandidateRows.of_offsets(torch.tensor([0, 2, 5]), 5)
    tree = VendorTokens(vendor, of_request, of_candidate)
    assert layer.request is not None
    assert layer.vendor is not None
    whole = torch.cat([request[rows.owner], vendor[of_candidate.owner], candidate], dim=1)
    weight = torch.cat([layer.request.weight, layer.vendor.weight, layer.candidate.weight], dim=1)
    torch.testing.assert_close(layer(candidate, request, rows, tree), weight @ whole)
    layer.vendor.register_forward_hook(lambda *_: None)  # must now be called
    torch.testing.assert_close(layer(candidate, request, rows, tree), weight @ whole)
    with pytest.raises(ValueError, match="built for 4 tokens of a vendor, got none"):
        layer(candidate, request, rows)
    with pytest.raises(ValueError, match="built for no tokens of a vendor, got"):
        LCE(2, 5, num_request=3).double()(candidate, request, rows, tree)


class Compressing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = LCE(2, 5, num_request=3, num_vendor=4)

    def forward(self, request: Tensor, candidate: Tensor, offsets: Tensor, vendors: tuple[Tensor, ...]) -> Tensor:
        tokens, batch = arch_inputs(request, candidate, offsets, {}, vendors)
        assert tokens.vendor is not None
        vendor = VendorTokens.of(tokens.vendor, batch)
        return self.layer(candidate, request, CandidateRows.of(batch), vendor) + vendor.below(request).sum()


def test_one_program_serves_any_number_of_vendors() -> None:
    layer, spec = Compressing(), dataclasses.replace(vendor_spec(), histories=())

    def inputs(*sizes: int) -> tuple[Any, ...]:
        ends = torch.tensor([0, *sizes]).cumsum(0)
        vendors = torch.randn(len(sizes), 4, 6), torch.tensor([0, len(sizes)]), ends
        return torch.randn(1, 3, 6), torch.randn(sum(sizes), 2, 6), torch.tensor([0, sum(sizes)]), vendors

    request, candidate, offsets, _, *vendors = scoring_shapes(spec, 64)
    program = torch.export.export(layer, inputs(2, 3), dynamic_shapes=(request, candidate, offsets, *vendors)).module()
    for sizes in ((1,), (4, 0, 3), (2, 2)):
        given = inputs(*sizes)
        torch.testing.assert_close(program(*given), layer(*given))


def parts(batch: RequestBatch) -> list[Any]:
    return [[part.tolist()] if isinstance(part, Tensor) else [part.keys(), part.stride()] for part in batch._parts()]


def test_a_batch_moves_with_its_vendors() -> None:
    spec = vendor_spec()
    batch = random_batch(spec)
    for other in (batch.packed(), pickle.loads(pickle.dumps(batch.packed())), pickle.loads(pickle.dumps(batch))):
        assert parts(other) == parts(batch)
        assert torch.equal(other.lookup.values(), batch.lookup.values())
        assert torch.equal(other.lookup.lengths(), batch.lookup.lengths())
    assert {tensor.device.type for tensor in batch.to(torch.device("meta"))._tensors()} == {"meta"}
    assert batch.lookup.keys() == [name for name, _ in spec.lookups()]
    assert batch.lookup.stride() == batch.num_requests
    assert torch.equal(batch.lookup["shop"].values(), batch.vendors.sparse["shop"].values())
    assert random_batch(random_spec()).vendors is None


def test_expanding_twice_is_expanding_once() -> None:
    batch = random_batch(vendor_spec()).expand()
    assert isinstance(batch.vendors, Vendors)
    assert batch.vendors.num_vendors == batch.num_requests == batch.num_candidates
    assert parts(batch.expand()) == parts(batch)


def test_repeated_candidates_bring_their_vendors() -> None:
    spec = vendor_spec()
    batch = random_batch(spec, (3,), vendors=[[2, 0, 1]])
    given, twin = with_candidates(batch, 7), batch.expand()
    assert given.vendors.candidate_offsets.tolist() == [0, 2, 3, 5, 6, 7]
    assert given.vendors.offsets.tolist() == [0, 5]
    assert given.expand().vendors.dense.tolist() == twin.vendors.dense[torch.arange(7) % 3].tolist()
    assert with_candidates(batch, 1).vendors.candidate_offsets.tolist() == [0, 1]
