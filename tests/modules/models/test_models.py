"""What every model must do: run on odd batches, train every parameter, score a request as its expanded twin, learn."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

import kernels.attention
import kernels.gdpa
import kernels.ikbo.attention
import kernels.ikbo.lce
import kernels.jagged
import modules.broadcast
import modules.core.checks
from kernels.core import dispatch
from kernels.tokens import EPSILON
from modules.batch import FeatureSpec, RequestBatch, SparseFeature, VectorFeature
from modules.broadcast import CandidateRows
from modules.config import ModelConfig
from modules.costs.flops import FlopCounter, count_flops
from modules.layers.attention.target_attention import TargetAttention
from modules.layers.embedding.local import LocalEmbedding
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.layers.feed_forward.block import FeedForwardBlock
from modules.layers.interaction.jagged_feature_interaction import JaggedFeatureInteraction
from modules.layers.interaction.wukong import WukongConfig
from modules.layers.moe import MoE
from modules.layers.norms import rms_norm, row_norm
from modules.models import build
from modules.models.baselines import DIN, DLRM, DCNv2
from modules.models.gem import GEM
from modules.models.interformer import InterFormer
from modules.models.interformer.arches import WukongStackConfig
from modules.models.kunlun import Kunlun
from modules.models.onetrans import OneTransConfig
from modules.models.token_mixing import TokenMixingConfig
from modules.models.ultra_hstu import UltraHSTUConfig
from modules.models.wukong import Wukong
from modules.precision import apply_recipe, in_high_precision
from tests.modules.factories import random_batch, random_spec, vendor_spec

SMALL: dict[str, Any] = {
    "dim": 8,
    "interaction_hidden": [16],
    "head_hidden": [16],
    "feed_forward_dim": 16,
}
MOE = {"num_experts": 4, "top_k": 2, "expert_dim": 8}
EXPERTS: dict[str, Any] = {"feed_forward": "moe", "moe": MoE.Config(**MOE)}
WUKONG: dict[str, Any] = {
    "dim": 8,
    "wukong": WukongConfig(num_fmb=4, num_lcb=4, rank=3),
    "hidden": [16],
    "head_hidden": [16],
}
GEM_SMALL: dict[str, Any] = {
    "dim": 8,
    "wukong": WukongConfig(num_fmb=4, num_lcb=4, rank=3),
    "interaction_hidden": [16],
    "head_hidden": [16],
    "pffn_hidden": 8,
    "window": 3,
}
KUNLUN: dict[str, Any] = {
    "dim": 8,
    "wukong": WukongConfig(num_fmb=4, num_lcb=4, rank=3),
    "interaction_hidden": [16],
    "head_hidden": [16],
    "pffn_hidden": 8,
    "num_seeds": 6,
    "window": 3,
}
TOKEN_MIXING: dict[str, Any] = {"dim": 8, "token_dim": 16, "expansion": 2.0, "head_hidden": [16], "head_dim": 4}
ULTRA: dict[str, Any] = {"dim": 8, "token_dim": 8, "num_heads": 2, "head_hidden": [16]}
ONETRANS: dict[str, Any] = {"dim": 8, "token_dim": 16, "num_heads": 2, "num_tokens": 3, "head_hidden": [16]}
TOKEN_MIXERS: dict[str, dict[str, Any]] = {
    "add": {"mixing": "add", "norm": "post", "feed_forward": "gelu", "sequences": "target"},
    "revert": {"mixing": "revert", "global_token": True, "num_layers": 3, "interval": 2},
    "moe": {"mixing": "revert", "feed_forward": "moe", "num_layers": 1},
    "queries": {"sequences": "queries", "encoding": "attention"},
    "newest": {"sequences": "queries", "encoding": "newest", "num_newest": 3, "merge_events": True},
    "heads": {"sequences": "heads", "tokens": "split", "merge_events": True},
    "attention": {"mixing": "attention", "sequences": "heads", "norm": "post"},
}
VARIANTS: dict[str, Any] = {
    "interformer": InterFormer.Config(**SMALL),
    "interformer-candidate": InterFormer.Config(**SMALL, sequence_context="candidate", feed_forward="dense"),
    "interformer-moe": InterFormer.Config(**SMALL, **EXPERTS, num_layers=1),
    "interformer-layers": InterFormer.Config(
        **SMALL,
        layers=[
            {"num_heads": 1, "pffn": "gdpa", "pffn_hidden": 8, "information_flow": "s2n"},
            {"interaction": "wukong", "wukong": {"rank": 3}, "information_flow": "n2s"},
        ],
    ),
    "interformer-gdpa": InterFormer.Config(
        **SMALL, pffn="gdpa", pffn_hidden=8, sequence_attention="gdpa", jagged_interaction=True
    ),
    "interformer-separate": InterFormer.Config(
        **SMALL, layers=[{"interaction": "dot"}, {"interaction": "dcnv2"}], information_flow="none"
    ),
    "interformer-wukong": InterFormer.Config(
        **SMALL, interaction="wukong", wukong=WukongStackConfig(rank=3), num_layers=1
    ),
    "din": DIN.Config(dim=8, hidden=[16]),
    "dcnv2": DCNv2.Config(dim=8, rank=4, hidden=[16]),
    "dcnv2-moe": DCNv2.Config(dim=8, rank=4, hidden=[16], **EXPERTS, jagged_interaction=True),
    "dlrm": DLRM.Config(dim=8, hidden=[16]),
    "dlrm-interaction": DLRM.Config(dim=8, hidden=[16], jagged_interaction=True),
    "wukong": Wukong.Config(**WUKONG),
    "wukong-layers": Wukong.Config(
        **WUKONG,
        layers=[{"wukong": {"num_fmb": 3}, **EXPERTS}, {"hidden": []}, {"wukong": {"rank": 2}}],
    ),
    "gem": GEM.Config(**GEM_SMALL),
    "gem-layers": GEM.Config(
        **GEM_SMALL,
        layers=[
            {"num_heads": 1, "num_tokens": 3, "num_context": 3},
            {"window": 1, "num_target": 1, "wukong": {"num_fmb": 3}, "pffn_gdpa": {"activation": "silu"}, **EXPERTS},
            {"pffn_hidden": 4, "num_tokens": 2},
        ],
    ),
    "gem-deep": GEM.Config(**GEM_SMALL, num_layers=3, levels=[]),
    "kunlun": Kunlun.Config(**KUNLUN),
    "kunlun-all-in-each": Kunlun.Config(**KUNLUN, comp_skip=False, num_layers=1),
    "kunlun-merged": Kunlun.Config(
        **KUNLUN | {"window": 0}, event_stacks="merged", num_layers=3, pooling="pma", rotation="position"
    ),
    "kunlun-layers": Kunlun.Config(
        **KUNLUN,
        layers=[
            {"num_context": 3, "num_experts": 3},
            {"num_target": 3, "num_heads": 1},
            {"pffn": "linear", "num_summary": 4, **EXPERTS},
            {"window": 1, "num_target": 0, "pooling": "pma"},
        ],
        events={"event1": {"dim": 16, "layers": [{"num_tokens": 2}, {"num_seeds": 3}]}},
    ),
    "kunlun-events": Kunlun.Config(
        **KUNLUN, events={"event1": {"dim": 16, "num_tokens": 2, "num_layers": 2}}, num_layers=3, pffn="linear"
    ),
    "ultra-hstu": UltraHSTUConfig(**ULTRA, num_layers=2, window=2, prefix=2),
    "ultra-hstu-layers": UltraHSTUConfig(
        **ULTRA,
        request_tokens=2,
        time_buckets=5,
        divide_by="length",
        layers=[{"window": 1}, {"newest": 3}, {"newest": 1}],
    ),
    "ultra-hstu-stacks": UltraHSTUConfig(
        **ULTRA, event_stacks="own", events={"event1": {"layers": [{"window": 1}, {"newest": 2}]}}, num_layers=1
    ),
    **{f"mixing-{name}": TokenMixingConfig(**TOKEN_MIXING, **each) for name, each in TOKEN_MIXERS.items()},
    "onetrans": OneTransConfig(**ONETRANS, last_events=0, num_layers=2),
    "onetrans-pyramid": OneTransConfig(**ONETRANS, last_events=2, length_multiple=1, num_layers=3, request_tokens=2),
    "onetrans-plain": OneTransConfig(
        **ONETRANS,
        last_events=5,
        length_multiple=4,
        merge="types",
        without=["own_weights", "causality"],
        tokens="groups",
    ),
    "mixing-all-ways": TokenMixingConfig(**TOKEN_MIXING, one_way=False, sequences="queries"),
}


class Ranking(nn.Module):
    """Embedding and model, as the trainer joins them."""

    def __init__(self, variant: str | ModelConfig, spec: FeatureSpec, **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = dataclasses.replace(VARIANTS[variant] if isinstance(variant, str) else variant, **changes)
        self.embedding = FeatureEmbedding(spec, config.dim, device="cpu")
        self.arch = build(config, spec)

    def forward(self, batch: RequestBatch) -> Tensor:
        return self.arch(self.embedding(batch), batch)


class DoubleLookup(nn.Module):
    """EmbeddingCollection rounds what it looks up to float32; this is the same lookup in float64."""

    def __init__(self, collection: EmbeddingCollection) -> None:
        super().__init__()
        self.collection = collection

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        jagged, out = features.to_dict(), {}
        for config in self.collection.embedding_configs():
            table = self.collection.embeddings[config.name]
            for name in config.feature_names:
                out[name] = JaggedTensor(values=table(jagged[name].values()), lengths=jagged[name].lengths())
        return out


def double_model(variant: str | ModelConfig, spec: FeatureSpec) -> Ranking:
    model = Ranking(variant, spec)
    model.embedding.collection = DoubleLookup(model.embedding.collection)
    return model.double()


def loss_of(model: Ranking, batch: RequestBatch) -> Tensor:
    return binary_cross_entropy_with_logits(model(batch), batch.labels)


def double(batch: RequestBatch) -> RequestBatch:
    names = ("request_dense", "candidate_dense", "labels")
    return dataclasses.replace(batch, **{name: getattr(batch, name).double() for name in names})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("candidates", "lengths"),
    [((2, 0, 1, 3), None), ((1,), (6,)), ((1, 1, 1), (0, 0, 0)), ((4, 4), (0, 6)), ((0, 0), (3, 0))],
    ids=["mixed", "one", "no events", "some events", "no candidates"],
)
def test_odd_batches_run_forward_and_backward(variant, candidates, lengths):
    spec = random_spec()
    model, batch = Ranking(variant, spec), random_batch(spec, candidates, lengths)
    logits = model(batch)
    assert logits.shape == (sum(candidates), 2)
    assert logits.isfinite().all()
    (logits.square().sum() + model.arch.aux_loss()).backward()
    for name, parameter in model.arch.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert sum(candidates) or not parameter.grad.any(), name


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_events", [0, 1, 2])
def test_models_without_dense_features_and_with_any_number_of_event_types(variant, num_events):
    spec = dataclasses.replace(random_spec(num_events, tasks=("click",)), request_dense=(), candidate_dense=())
    changes = {"events": {}} if getattr(VARIANTS[variant], "events", None) else {}  # which name a type
    assert Ranking(variant, spec, **changes)(random_batch(spec)).shape == (7, 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_data_without_request_features_trains(variant):
    spec = dataclasses.replace(random_spec(), request=(), request_dense=())
    model, batch = Ranking(variant, spec), random_batch(spec, (2, 0, 3), [5] * 3)
    logits = model(batch)
    torch.testing.assert_close(logits, model(batch.expand()))
    logits.square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_vectors_of_requests_and_candidates_are_tokens_of_every_model(variant):
    text, image = VectorFeature("text", 3), VectorFeature("image", 5)
    spec = dataclasses.replace(random_spec(), request_vectors=(text,), candidate_vectors=(image, text))
    model, batch = double_model(variant, spec), double(random_batch(spec, (2, 0, 3), [5] * 3))
    logits = model(batch)
    torch.testing.assert_close(logits, model(batch.expand()))
    logits.square().sum().backward()
    for projection in (*model.embedding.assemble.request_vectors, *model.embedding.assemble.candidate_vectors):
        assert projection.weight.grad.any()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("candidates", [(1,), (2, 0, 3, 4)], ids=["one", "several"])
def test_every_parameter_gets_a_gradient(variant, candidates):
    # The last layer's arches are the ones at risk: the head must read their outputs, not their inputs.
    spec = random_spec()
    model = Ranking(variant, spec)
    model(random_batch(spec, candidates, [5] * len(candidates))).square().sum().backward()
    assert [name for name, p in model.arch.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_request_batch_and_its_expanded_twin_agree_in_loss_and_every_gradient(variant):
    spec = random_spec()
    model, batch = double_model(variant, spec), double(random_batch(spec))
    results = []
    for twin in (batch, batch.expand()):
        loss = loss_of(model, twin)
        results.append((loss, torch.autograd.grad(loss, list(model.parameters()))))
    (loss, gradients), (twin_loss, twin_gradients) = results
    torch.testing.assert_close(loss, twin_loss, rtol=1e-12, atol=0)
    for (name, _), a, b in zip(model.named_parameters(), gradients, twin_gradients, strict=True):
        # Float64 sums in another order.
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}")
    assert all(p.abs().sum() > 0 for p in gradients)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_request_is_scored_alike_in_any_batch(variant):
    spec = random_spec()
    model = double_model(variant, spec).eval()
    alone, together = double(random_batch(spec, (2,), (4,), seed=1)), double(random_batch(spec, (3, 1), (6, 0), seed=2))
    logits = model(_concatenated(together, alone))
    torch.testing.assert_close(logits, torch.cat([model(together), model(alone)]))


def _concatenated(a: RequestBatch, b: RequestBatch) -> RequestBatch:
    def joined(x: Any, y: Any) -> Any:
        if isinstance(x, Tensor):
            return torch.cat([x, y])
        keys = x.keys()
        pairs = [(x[key], y[key]) for key in keys]
        return KeyedJaggedTensor(
            keys=keys,
            values=torch.cat([part.values() for pair in pairs for part in pair]),
            lengths=torch.cat([part.lengths() for pair in pairs for part in pair]),
        )

    names = [f.name for f in dataclasses.fields(a) if f.name != "vendors"]
    fields = {name: joined(getattr(a, name), getattr(b, name)) for name in names}
    fields["candidate_offsets"] = torch.cat([a.candidate_offsets, b.candidate_offsets[1:] + a.num_candidates])
    return RequestBatch(**fields)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_candidate_changes_its_own_logits_only_and_every_event_counts(variant):
    spec = random_spec()
    model, batch = double_model(variant, spec).eval(), double(random_batch(spec, (3, 2), (4, 4)))
    before = model(batch)

    candidate = dataclasses.replace(batch, candidate_dense=batch.candidate_dense.clone())
    candidate.candidate_dense[1] += 1
    assert (model(candidate) - before).abs().amax(1).gt(1e-9).tolist() == [False, True, False, False, False]

    histories = batch.histories
    ids = histories.values().clone()
    ids[0] = (ids[0] + 1) % spec.tables["item"]
    histories = KeyedJaggedTensor(keys=histories.keys(), values=ids, lengths=histories.lengths())
    oldest = dataclasses.replace(batch, histories=histories)
    assert (model(oldest) - before).abs().amax(1).gt(1e-9).tolist() == [True, True, True, False, False]


PADS = (
    "kunlun",
    "gem",
    "onetrans",
    "ultra-hstu",
    *(f"mixing-{name}" for name in ("add", "queries", "newest", "heads", "attention", "all")),
)
"""Whose attention the reference gives a key more than there are, or pairs that a mask hides."""


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith(PADS)])
def test_flops_equal_the_counter_where_the_reference_pads_nothing(variant, monkeypatch):
    # The counter does not see into operators, but into references.
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "linear_compression=reference")
    monkeypatch.setattr(dispatch, "_chosen", {})
    spec = random_spec()
    model, batch = Ranking(variant, spec), random_batch(spec, (4, 4, 4), (6, 6, 6))
    tokens = model.embedding(batch)
    cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={cpu_attention: lambda *args, **kwargs: 0}) as counter:
        model.arch(tokens, batch)
    # The softmax attends to one padding key more, so its part is written out: 4 d for each pair.
    attention = 0
    if "interformer" in variant:
        num_layers, rows = VARIANTS[variant].num_layers, 12 if "candidate" in variant else 3
        length, seeds = 12 + 4, 2
        pooling = [module for module in model.arch.modules() if isinstance(module, TargetAttention)]
        assert len(pooling) == 1 + sum(layer.cross is not None for layer in model.arch.layers)
        # Each head of one that absorbs its projections is as wide as the model.
        heads = sum(each.num_heads if each.absorbs(torch.empty(0)) else 1 for each in pooling)
        pairs = heads * 12 * seeds * length
        if VARIANTS[variant].sequence_attention == "softmax":
            pairs += num_layers * rows * length**2
        attention = 4 * 8 * pairs
    expected = count_flops(model.arch, spec, 8)(3, 12, sum_lengths=3 * 12, sum_squared_lengths=3 * 12 * 12)
    assert counter.get_total_flops() + attention == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_flops_of_a_batch_follow_from_those_of_small_ones(variant):
    spec = random_spec()
    model = Ranking(variant, spec).eval()
    # With a candidate each, numbers of candidates and of events are independent, which the sums suppose.
    ones, lengths = (1,) * 6, (0, 1, 6, 4, 3, 6)
    batch, other = random_batch(spec, ones, lengths), random_batch(spec, (1, 1), (5, 6), seed=1)

    def count(batch: RequestBatch) -> float:
        with torch.no_grad():
            tokens = model.embedding(batch)
            with FlopCounter() as counter:
                model.arch(tokens, batch)
        return counter.total

    # Of a difference, so that what is computed once a batch does not count.
    counted = count(_concatenated(batch, other)) - count(other)
    totals = [2 * length for length in lengths]  # two event types
    predicted = count_flops(model.arch, spec, 8)(6, 6, sum(totals), sum(total**2 for total in totals))
    # Windows, and layers of the newest events only, are neither linear nor quadratic in length.
    near = {"kunlun": 0.05, "gem": 0.05, "mixing-newest": 0.1, "onetrans-": 0.1, "ultra-hstu": 0.1}
    tolerance = next((value for name, value in near.items() if variant.startswith(name)), 1e-9)
    assert predicted == pytest.approx(counted, rel=tolerance)


HOST_READS = (
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.is_nonzero,
    torch.ops.aten.equal,
    torch.ops.aten.nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten._unique2,
)


class NoHostSync(TorchDispatchMode):
    """Raises at operators that read a tensor's values to go on, which on a GPU waits for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = func.overloadpacket
        assert packet not in HOST_READS, func
        assert packet is not torch.ops.aten.repeat_interleave or kwargs.get("output_size") is not None
        assert packet is not torch.ops.aten.index or all(i is None or i.dtype != torch.bool for i in args[1])
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    "variant",
    [
        *(
            "interformer",
            "dcnv2",
            "dlrm",
            "wukong",
            "kunlun",
            "mixing-revert",
            "mixing-newest",
            "mixing-heads",
        ),
        *("interformer of vendors", "kunlun of vendors"),
    ],
)
def test_step_reads_nothing_from_the_device(variant, monkeypatch):
    # On the CPU the operators look at offsets to give errors; on a GPU they don't, so that is taken out here.
    packages = (
        kernels.attention,
        kernels.gdpa,
        kernels.jagged,
        kernels.jagged.reference,
        kernels.jagged.pointwise,
        kernels.ikbo.lce,
        kernels.ikbo.attention,
        modules.broadcast,
        modules.core.checks,
    )
    for package in packages:
        for check in ("check_offsets", "check_lengths"):
            monkeypatch.setattr(package, check, lambda *args: None, raising=False)
    name, _, vendors = variant.partition(" of ")
    spec = vendor_spec() if vendors else random_spec()
    model, batch = Ranking(name, spec), random_batch(spec)
    with NoHostSync():
        lookup = batch.lookup
    looked_up = model.embedding.collection(lookup)  # TorchRec's own on one process, which reads lengths
    with NoHostSync():
        model.arch(model.embedding.assemble(looked_up, batch), batch).sum().backward()
    with pytest.raises(AssertionError), NoHostSync():
        batch.labels.sum().item()


@pytest.mark.parametrize("kind", [InterFormer, Kunlun, GEM, Wukong, DCNv2])
def test_experts_of_every_large_model_are_balanced_and_run_on_mxfp8_operands(kind):
    """32 is a block of MXFP8."""
    batch = random_batch(random_spec())
    experts = {"feed_forward": "moe", "moe": MoE.Config(num_experts=4, top_k=2, expert_dim=32, aux_loss_weight=0.1)}
    config = kind.Config(dim=32, **{"hidden": [32]} if kind is DCNv2 else {"num_layers": 2}, **experts)
    assert "aux_loss_weight=0.1 gives that no gradient" in (config.graphs_refusal() or "")
    model = Ranking(config, random_spec())
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    rows = [row for row in apply_recipe(model, "mxfp8_g128", ["*.experts"]) if row.recipe == "mxfp8_g128"]
    assert len(rows) == len(layers) == 2 - (kind is DCNv2)
    logits = model(batch)
    assert min(layer.aux_loss for layer in layers) > 0.01
    torch.testing.assert_close(model.arch.aux_loss(), torch.stack([layer.aux_loss for layer in layers]).sum())
    model.arch.aux_loss().backward()
    assert all((layer.router.gate.weight.grad != 0).any() for layer in layers)
    with in_high_precision(model):
        assert 0 < (model(batch) - logits).abs().max() < 0.1  # operands are rounded by up to 2^-4


def test_jagged_feature_interaction_is_a_softmax_over_each_field_for_each_candidate():
    spec = random_spec()
    for sizes, lengths in (((3, 0, 2), (4, 3, 0)), ((4,), (5,)), ((2, 1), (0, 0))):
        batch = double(random_batch(spec, sizes, lengths))
        embedding = FeatureEmbedding(spec, 8, device="cpu")
        embedding.collection = DoubleLookup(embedding.collection)
        layer = JaggedFeatureInteraction(spec, 8, spec.histories).double()
        tokens = embedding.double()(batch)
        out, rows = layer(tokens, CandidateRows.of(batch)), []
        for candidate, owner in zip(tokens.candidate, batch.owner, strict=True):
            targets, made = layer.targets.candidate.weight @ row_norm(candidate), []
            for event in spec.histories:
                history = tokens.histories[event.name]
                first, end = history.offsets[owner : owner + 2]
                for field in history.values[first:end].unflatten(1, (-1, 8)).unbind(1):
                    weights = (row_norm(field) @ targets[len(made)] / 8**0.5).softmax(0)
                    made.append(weights @ field)
            rows.append(torch.cat([torch.stack(made), candidate]))
        expected = torch.stack(rows)
        torch.testing.assert_close(out, expected)
        inputs = [*layer.parameters(), *embedding.collection.parameters()]
        upstream = torch.randn_like(out)
        for actual, wanted in zip(
            torch.autograd.grad(out, inputs, upstream, allow_unused=True, retain_graph=True),
            torch.autograd.grad(expected, inputs, upstream, allow_unused=True), strict=True
        ):  # fmt: skip
            torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_feed_forward_block_is_a_residual_layer_between_norms(kind):
    config = Wukong.Config(feed_forward=kind, feed_forward_dim=5, moe=MoE.Config(**MOE))
    block, x = FeedForwardBlock(config, 8).double(), rms_norm(torch.randn(3, 4, 8).double())
    y = x + block.feed_forward(x)
    torch.testing.assert_close(block(x), y / (y.square().mean(2, keepdim=True) + EPSILON).sqrt())
    assert FeedForwardBlock(Wukong.Config(), 8)(x) is x
    with pytest.raises(ValueError, match=r"model\.moe\.top_k=5 must lie in 1\.\.model\.moe\.num_experts=4"):
        build(Wukong.Config(moe=MoE.Config(num_experts=4, top_k=5)), random_spec())


@pytest.mark.parametrize("variant", VARIANTS)
def test_bf16_autocast_stays_near_fp32(variant):
    spec = random_spec()
    model, batch = Ranking(variant, spec), random_batch(spec)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(batch)
    high = model(batch)
    assert low.dtype == torch.float32
    # Two dozen roundings of 2^-9 relative, on logits whose terms are of the size of the largest logit.
    assert (low - high).abs().max() < 24 * 2**-9 * high.abs().max()
    low.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_dropout_acts_in_training_only(variant):
    spec = random_spec()
    model, batch = Ranking(variant, spec, dropout=0.3), random_batch(spec)
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


@pytest.mark.parametrize("variant", VARIANTS)
def test_overfits_one_batch(variant):
    spec = random_spec()
    model, batch = Ranking(variant, spec), random_batch(spec, (2, 3, 1, 4, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        if loss.item() < 0.05:  # it starts near log 2 = 0.69
            break
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


def test_specs_that_no_model_can_be_built_for_are_named():
    spec = random_spec()
    bare = dataclasses.replace(spec, candidate=(), candidate_dense=())
    with pytest.raises(ValueError, match="candidates have no feature"):
        build(DIN.Config(), bare)
    for table, other in {"user.id": "user_id", "items": "items_", "train": "train_", "__len__": "__len___"}.items():
        named = dataclasses.replace(spec, tables={**spec.tables, table: 3}, request=(SparseFeature("user", table),))
        for embedding in (FeatureEmbedding, LocalEmbedding):
            with pytest.raises(ValueError, match=rf"\+data\.tables=\{{{re.escape(table)}: {other}\}}"):
                embedding(named, 8)


def test_unknown_model_is_an_error():
    with pytest.raises(ValueError, match="unknown model 'dcn'; choose one of .*din, dcnv2, dlrm, .*interformer"):
        build(DIN.Config(name="dcn"), random_spec())


PLAIN: dict[str, ModelConfig] = {
    "interformer": InterFormer.Config(**SMALL, plain_head=True),
    "interformer of candidates": InterFormer.Config(**SMALL, plain_head=True, sequence_context="candidate"),
    "kunlun": Kunlun.Config(**KUNLUN, plain_head=True),
    "gem": GEM.Config(**GEM_SMALL, plain_head=True),
}


@pytest.mark.parametrize("config", PLAIN.values(), ids=PLAIN)
def test_the_plain_head_learns_alone_and_reads_no_history_and_no_large_table(config: ModelConfig) -> None:
    spec = dataclasses.replace(random_spec(), tables={"user": 20, "item": 301, "tag": 10})
    model: Any = build(config, spec)
    embedding, batch = FeatureEmbedding(spec, config.dim, "cpu"), random_batch(spec)
    deep = model(embedding(batch), batch)
    ((share, plain),) = model.take_lower()
    assert model.take_lower() == []
    assert share == 1
    torch.testing.assert_close(model.eval()(embedding(batch), batch), (deep + plain) / 2)
    loss = plain.sum()
    grads = torch.autograd.grad(loss, [*model.plain_heads.parameters()], retain_graph=True)
    assert all(grad.abs().sum() > 0 for grad in grads)
    tables = embedding.collection.embeddings
    of_tables = torch.autograd.grad(loss, [table.weight for table in tables.values()], allow_unused=True)
    read = {name for name, grad in zip(tables, of_tables, strict=True) if grad is not None and grad.any()}
    assert read == {"user", "tag"}
    of_model = torch.autograd.grad(deep.sum(), [*model.parameters()], allow_unused=True)
    unread = {name for (name, _), grad in zip(model.named_parameters(), of_model, strict=True) if grad is None}
    assert unread == {name for name, _ in model.named_parameters() if name.startswith("plain_heads.")}
    ids = dataclasses.replace(spec, candidate=spec.candidate[:1], candidate_dense=())
    without: Any = build(config, ids)
    assert without.plain_heads is None
