"""nn.MultiheadAttention by operators that `modules.ikbo_rewrite` can follow, while a model is exported.

PyTorch's own forward puts sequences before the batch and folds heads into the batch, so that candidates are no longer
rows. This is the same computation with rows first and a dimension for heads. Attention weights, which a caller gets by
default and rarely reads, are computed separately and removed from the graph if nothing reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F


@contextmanager
def rows_first(model: nn.Module) -> Iterator[None]:
    """A context in which the model's nn.MultiheadAttention modules with `batch_first` compute in this order."""
    modules = [module for module in model.modules() if type(module) is nn.MultiheadAttention and _is_plain(module)]
    for module in modules:
        module.forward = partial(_forward, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def _is_plain(module: nn.MultiheadAttention) -> bool:
    same_width = module.in_proj_weight is not None
    if "forward" in vars(module):  # already replaced by someone else
        return False
    return module.batch_first and same_width and module.bias_k is None and not module.add_zero_attn


def _forward(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    dropped = module.dropout if module.training else 0.0
    masked = key_padding_mask is not None or attn_mask is not None or is_causal
    if masked or dropped or query.dim() != 3 or not average_attn_weights:
        return nn.MultiheadAttention.forward(
            module, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )
    width = module.embed_dim
    heads = []
    for index, x in enumerate((query, key, value)):
        part = slice(index * width, (index + 1) * width)
        bias = None if module.in_proj_bias is None else module.in_proj_bias[part]
        projected = F.linear(x, module.in_proj_weight[part], bias)
        heads.append(projected.unflatten(-1, (module.num_heads, -1)).transpose(1, 2))
    attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
    weights = None
    if need_weights:
        scores = heads[0] @ heads[1].transpose(-2, -1) * module.head_dim**-0.5
        weights = scores.softmax(-1).mean(1)
    return module.out_proj(attended), weights
