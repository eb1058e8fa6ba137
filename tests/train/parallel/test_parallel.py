"""How ranks are laid out, what runs again in the backward, and what is refused. Nothing here needs several ranks."""

from __future__ import annotations

import pytest
import torch

from modules.config import ModelConfig
from modules.layers.embedding.tokens import FeatureEmbedding
from modules.models import build
from modules.models.interformer.model import InterFormer
from modules.models.kunlun import Kunlun
from modules.models.onetrans import OneTransConfig
from modules.models.ranking import RankingModel
from modules.models.token_mixing import TokenMixingConfig
from modules.models.ultra_hstu import UltraHSTUConfig
from tests.modules.factories import random_batch, random_spec
from train.config.compose import to_config
from train.config.files import composed
from train.config.schema import ParallelConfig
from train.parallel.mesh import sizes, table_ranks
from train.parallel.recompute import recompute


@pytest.mark.parametrize(
    ("dense", "shard_ranks", "expert_ranks", "expected"),
    [
        ("ddp", 0, 0, (8, 1, 1)),
        ("ddp", 0, 2, (4, 1, 2)),
        ("fsdp", 0, 0, (1, 8, 1)),
        ("fsdp", 0, 2, (1, 4, 2)),
        ("hsdp", 0, 0, (2, 4, 1)),
        ("hsdp", 2, 2, (4, 1, 2)),
    ],
)
def test_sizes_of_the_axes(dense: str, shard_ranks: int, expert_ranks: int, expected: tuple[int, int, int]) -> None:
    parallel = ParallelConfig(dense=dense, shard_ranks=shard_ranks, expert_ranks=expert_ranks)
    assert sizes(parallel, ranks=8, node_ranks=4) == expected


@pytest.mark.parametrize(
    ("parallel", "named"),
    [
        (ParallelConfig(dense="hsdp", shard_ranks=3), r"shard_ranks=3 must divide the 8 ranks .*shard_ranks=8"),
        (ParallelConfig(expert_ranks=3), r"expert_ranks=3 must divide the 8 ranks"),
        (ParallelConfig(dense="hsdp", shard_ranks=2, expert_ranks=4), r"the 2 ranks that share .*expert_ranks=2"),
    ],
)
def test_ranks_that_cannot_be_laid_out_are_refused(parallel: ParallelConfig, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        sizes(parallel, ranks=8, node_ranks=4)


@pytest.mark.parametrize(("share", "ranks", "expected"), [(0, 8, 8), (2, 8, 2), (8, 8, 8), (2, 1, 1)])
def test_ranks_that_share_a_copy_of_the_tables(share: int, ranks: int, expected: int) -> None:
    assert table_ranks(ParallelConfig(table_ranks=share), ranks) == expected


def test_copies_of_tables_that_ranks_cannot_share_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match=r"table_ranks=3 must divide the 8 ranks .*table_ranks=8"):
        table_ranks(ParallelConfig(table_ranks=3), 8)


def _model(config: ModelConfig) -> RankingModel:
    torch.manual_seed(0)
    spec = random_spec()
    return RankingModel(FeatureEmbedding(spec, 8, "cpu"), build(config, spec))


def _step(model: RankingModel) -> tuple[int, dict[str, torch.Tensor]]:
    """Bytes that a forward keeps for its backward, those of parameters apart, and the logits and gradients."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(random_batch(random_spec()))
    logits.square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return sum(storage.nbytes() for storage in kept.values()), gradients | {"logits": logits.detach()}


INTERFORMER = InterFormer.Config(dim=8, num_layers=2, dropout=0.1)


@pytest.mark.parametrize(
    ("config", "globs"),
    [
        (INTERFORMER, ["arch.layers.*.sequence", "arch.layers.1"]),
        (Kunlun.Config(dim=8, dropout=0.1), ["arch.layers.*.experts", "arch.stacks.*.layers.*"]),
        (UltraHSTUConfig(dim=8, token_dim=8, event_stacks="own", dropout=0.1), ["arch.stacks.*.layers.*"]),
        (TokenMixingConfig(dim=8, token_dim=16, feed_forward="moe", dropout=0.1), ["*.block"]),
        (OneTransConfig(dim=8, token_dim=16, dropout=0.1), ["arch.layers"]),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_what_runs_again_keeps_less_and_has_the_same_dropout_and_gradients(
    config: ModelConfig, globs: list[str]
) -> None:
    plain, again = _model(config), _model(config)
    recompute(again, globs, compiled=False)
    names = set(plain.state_dict())
    (bytes_plain, expected), (bytes_again, gradients) = _step(plain), _step(again)
    assert bytes_again < 0.8 * bytes_plain
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert set(again.state_dict()) == names


@pytest.mark.parametrize(
    ("globs", "compiled", "named"),
    [
        (["arch.layer.*"], False, r"'arch\.layer\.\*' matches no module with a forward; closest are arch\.layers"),
        (["arch.layers.0.sequence.attention"], True, r"matches arch\.layers\.0\.sequence\.attention.* such as arch\."),
    ],
)
def test_what_cannot_run_again_is_refused(globs: list[str], compiled: bool, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        recompute(_model(INTERFORMER), globs, compiled=compiled)


@pytest.mark.parametrize(
    "overrides",
    [
        ("runtime.cuda_graphs=true", "parallel.dense=fsdp"),
        ("runtime.cuda_graphs=true", "parallel.expert_ranks=2"),
        ("runtime.cuda_graphs=true", "parallel.recompute=[arch]"),
        ("runtime.cuda_graphs=true", "parallel.prefetch_tables=true"),
        ("runtime.compile=true", "parallel.expert_ranks=2"),
        ("optimizer.dense=torch.optim.NAdam", "parallel.dense=fsdp"),
        ("parallel.expert_payload=mxfp8", "parallel.expert_ranks=1"),
    ],
)
def test_what_does_not_go_together_is_refused_by_both_keys(overrides: tuple[str, str]) -> None:
    with pytest.raises(ValueError) as error:
        to_config(composed(overrides))
    assert all(override.split("=")[0] in str(error.value) for override in overrides)
