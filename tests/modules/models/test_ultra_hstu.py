"""HSTU as a ranking model: what a layer cuts off, and its keys."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from modules.layers.embedding.tokens import FeatureEmbedding
from modules.models import build
from modules.models.ultra_hstu import UltraHSTU, UltraHSTUConfig
from tests.modules.factories import random_batch, random_spec

# Without what depends on how long rows may be.
CONFIG = UltraHSTUConfig(dim=8, token_dim=8, num_heads=2, head_hidden=[8], position_bias=False, divide_by="length")


@pytest.mark.parametrize("lengths", [(0, 1, 2), (3, 1, 6)])
def test_a_layer_of_the_newest_events_differs_where_there_are_more(lengths: tuple[int, ...]) -> None:
    """Two event types of these lengths; 4 events go on."""
    spec = random_spec()
    batch = random_batch(spec, (2, 0, 3), lengths)
    torch.manual_seed(0)
    tokens = FeatureEmbedding(spec, 8, "cpu")(batch)
    all_events, newest = (
        UltraHSTU(spec, dataclasses.replace(CONFIG, layers=[{}, {"newest": count}], num_layers=2)).eval()
        for count in (0, 4)
    )
    newest.load_state_dict(all_events.state_dict())
    off = (newest(tokens, batch) - all_events(tokens, batch)).abs().max()
    assert off < 1e-6 if max(lengths) < 3 else off > 1e-4  # 4 events of both types together


def test_keys_are_checked() -> None:
    for changes, message in (
        ({"token_dim": 9}, r"model\.token_dim=9 must be a multiple of model\.num_heads=2"),
        ({"prefix": 3}, r"model\.prefix=3 says nothing without a window"),
        ({"window": -1}, r"model\.window=-1 must be at least 0"),
        ({"epsilon": 0.0}, r"model\.epsilon=0\.0 must be above 0"),
        ({"divide_by": "row"}, r"model\.divide_by=row"),
    ):
        with pytest.raises(ValueError, match=message):
            build(dataclasses.replace(CONFIG, **changes), random_spec())
