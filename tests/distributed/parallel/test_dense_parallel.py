"""`parallel.dense`, `parallel.expert_ranks`: how the dense part lies on the ranks changes speed and memory alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.distributed.checkpoint.test_resume import training
from tests.launching import TINY, TINY_DLRM, train_ranks

CONSTANT = ("optimizer.warmup_steps=0", "optimizer.min_lr=1", "checkpoint.keep=9", "runtime.eval_every=100")
EXPERTS = ("model=interformer_moe", "model.moe.num_shared_experts=1")
TOKENS = (*(each for each in TINY if "interaction" not in each and "dcn" not in each), *CONSTANT, "precision=fp32")
TOKENS += ("model=tokenmixer", "model.feed_forward=moe", "model.token_dim=16", "model.num_tokens=4")
EXACT = (*TINY, *CONSTANT, "precision=fp32", *EXPERTS, "optimizer.ema_decay=0.5")


def saved(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        name: torch.zeros(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


def distance(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of the second, which may be 0."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12)).item()


@pytest.mark.nightly
def test_a_run_that_changes_its_layout_at_every_checkpoint_is_one_under_ddp(tmp_path: Path) -> None:
    """Weights, averages, both optimisers' states and sums of an accumulation: each layout reads what another wrote."""
    options = ("optimizer.accumulate=2", "checkpoint.every=3")  # the third step is in the middle of an accumulation
    whole, changing = tmp_path / "whole", tmp_path / "changing"
    train_ranks(2, whole, *options, "runtime.steps=12", base=EXACT)
    shutil.copytree(whole / "checkpoints" / "step_00000003", changing / "checkpoints" / "step_00000003")
    layouts = (
        (2, "parallel.dense=fsdp"),
        (4, "parallel.dense=hsdp", "parallel.shard_ranks=2", "parallel.expert_ranks=2", "data.batch_size=8"),
        (2, "parallel.dense=ddp", "parallel.expert_ranks=2", "parallel.recompute=[arch.layers.0]"),
    )
    for index, (ranks, *layout) in enumerate(layouts):
        train_ranks(ranks, changing, *options, *layout, f"runtime.steps={3 * index + 6}", base=EXACT)
    expected = {record.step: record.values["loss"] for record in training(whole)}
    actual = {record.step: record.values["loss"] for record in training(changing)}
    # Sums over ranks are taken in another order, and AdamW's first steps are as long for gradients near 0.
    assert actual == pytest.approx({step: expected[step] for step in range(4, 13)}, rel=1e-3)
    old, new = (saved(path / "checkpoints" / "step_00000012") for path in (whole, changing))
    assert old.keys() == new.keys()
    weights = [name for name in old if name.startswith("model.") or name.endswith("average")]
    assert max(distance(new[name], old[name]) for name in weights if old[name].is_floating_point()) < 1e-2


def test_gradients_are_means_over_all_ranks(tmp_path: Path) -> None:
    """The first moments after a step are a tenth of the gradients: AdamW's own steps would hide their size."""
    moments = []
    layout = ("parallel.dense=fsdp", "parallel.expert_ranks=2")
    for name, options in (("replicated", ()), ("sharded", layout)):
        step = ("runtime.steps=1", "runtime.eval_steps=1", "optimizer.clip_norm=0", "data.batch_size=8")
        train_ranks(4, tmp_path / name, *step, *options, "model.num_layers=1", base=EXACT)
        tensors = saved(tmp_path / name / "checkpoints" / "step_00000001")
        moments.append({key: tensor for key, tensor in tensors.items() if key.endswith("exp_avg")})
    assert moments[0].keys() == moments[1].keys()
    for name, expected in moments[0].items():
        torch.testing.assert_close(moments[1][name], expected, rtol=1e-4, atol=1e-6)


def test_experts_of_each_token_are_shared_out_among_ranks(tmp_path: Path) -> None:
    """Token mixing: a rank holds the experts of some tokens, and all candidates send it those tokens."""
    losses = []
    for name, *options in (
        ("whole",),
        ("tokens", "parallel.expert_ranks=2"),
        ("fsdp", "parallel.expert_ranks=2", "parallel.dense=fsdp"),
    ):
        options += ["runtime.steps=2", "runtime.eval_steps=1"]
        train_ranks(2, tmp_path / name, *options, base=TOKENS)
        losses.append([record.values["loss"] for record in training(tmp_path / name)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # sums are taken in another order
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_experts_on_two_ranks_give_the_loss_of_whole_ones_or_one_close_by_for_tokens_in_mxfp8(tmp_path: Path) -> None:
    """Of DCNv2; `test_gradients_are_means_over_all_ranks` has those of InterFormer."""
    dcn = ["model=dcnv2" if override == "model=dlrm" else override for override in TINY_DLRM]
    losses = []
    for name, *options in (
        ("whole",),
        ("full", "parallel.expert_ranks=2"),
        ("mxfp8", "parallel.expert_ranks=2", "parallel.expert_payload=mxfp8"),
    ):
        options += ["runtime.steps=2", "precision=fp32", "model.feed_forward=moe"]
        train_ranks(2, tmp_path / name, *options, base=(*dcn, *CONSTANT))
        losses.append([record.values["loss"] for record in training(tmp_path / name)])
    whole, full, rounded = losses
    assert full == pytest.approx(whole, rel=1e-5)  # sums are taken in another order
    assert rounded != full
    assert rounded == pytest.approx(full, rel=1e-2)  # rows, a part of their tokens, are rounded by up to 2^-4


@pytest.mark.parametrize("precision", ["bf16", pytest.param("mxfp8", marks=pytest.mark.nightly)])
def test_layers_are_gathered_as_autocast_rounds_them(precision: str, tmp_path: Path) -> None:
    base = (*TINY, *CONSTANT, f"precision={precision}", "runtime.steps=2", "optimizer.frozen=[arch.layers.0.cross]")
    losses = []
    for dense in ("ddp", "fsdp"):
        train_ranks(2, tmp_path / dense, f"parallel.dense={dense}", base=base)
        losses.append([record.values["loss"] for record in training(tmp_path / dense)])
    assert losses[0] != losses[1]  # the parameters that autocast leaves in float32 are rounded, too: by up to 2^-9
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


def test_methods_that_a_model_calls_beside_forward_have_their_weights(tmp_path: Path) -> None:
    kunlun = ["model=kunlun" if override == "model=dlrm" else override for override in TINY_DLRM]
    losses = []
    for dense in ("ddp", "fsdp"):
        options = ("runtime.steps=2", "precision=fp32", f"parallel.dense={dense}")
        train_ranks(2, tmp_path / dense, *options, base=(*kunlun, *CONSTANT))
        losses.append([record.values["loss"] for record in training(tmp_path / dense)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # sums are taken in another order


def test_requests_dealt_by_cost_give_the_same_loss_from_more_even_ranks(tmp_path: Path) -> None:
    records = []
    for name, balance in (("order", 0), ("dealt", 2)):
        options = ("runtime.steps=3", f"parallel.balance={balance}", "precision=fp32", "model.num_layers=1")
        train_ranks(2, tmp_path / name, *options, base=(*TINY, *CONSTANT))
        records.append(training(tmp_path / name))
    for order, dealt in zip(*records, strict=True):
        assert dealt.values["loss"] == pytest.approx(order.values["loss"], rel=1e-4)  # sums are taken in another order
        assert dealt.values["imbalance"] < dealt.values["imbalance_in_order"]
        assert "imbalance" not in order.values


@pytest.mark.nightly
def test_layers_that_are_gathered_can_be_compiled(tmp_path: Path) -> None:
    losses = []
    for name, options in (("replicated", ()), ("sharded", ("parallel.dense=fsdp", "runtime.compile=true"))):
        train_ranks(2, tmp_path / name, "runtime.steps=3", "precision=fp32", *options, base=(*TINY_DLRM, *CONSTANT))
        losses.append([record.values["loss"] for record in training(tmp_path / name)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # sums are taken in another order
