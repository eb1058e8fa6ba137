"""`python -m kernels.bench.summary`: the README's table, made from the results that are committed."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "nvidia-h200"
# What, family, case, our contender, peer, the peer's name for readers.
ROWS = (
    ("Jagged attention, 512 rows of 1,024, forward", "jagged", "attention_fwd_B512_L1024_mean1.0_d128", "gluon",
     "varlen", "`torch.nn.attention.varlen`"),
    ("the same, backward", "jagged", "attention_bwd_B512_L1024_mean1.0_d128", "gluon",
     "varlen", "`torch.nn.attention.varlen`"),
    ("the same, lengths uniform in 1 to 1,024, forward", "jagged", "attention_fwd_B512_L1024_mean0.5_d128", "gluon",
     "sdpa on padded", "padded `scaled_dot_product_attention`"),
    ("GDPA, 1,152 rows of 2,048, forward", "gdpa", "self_dense_fwd_L2048", "gluon",
     "ads_model_kernel_library", "ads_model_kernel_library"),
    ("the same, backward", "gdpa", "self_dense_bwd_L2048", "gluon",
     "ads_model_kernel_library", "ads_model_kernel_library"),
    ("Target attention, 2,048 candidates of 32 users, 4,096 keys, forward", "ikbo", "target_fwd_K4096", "gluon",
     "cudnn, keys broadcast", "cuDNN on broadcast keys"),
    ("Linear compression, 1,024 candidates, 70 a request, forward", "ikbo", "lce_fwd_B1024_ratio70", "gluon",
     "FBGEMM Triton", "FBGEMM's Triton kernel, untuned"),
    ("the same, all gradients", "ikbo", "lce_bwd_B1024_ratio70", "gluon",
     "torch, bmm and sum", "PyTorch's `bmm` and a segment sum"),
    ("Routed experts, 16,384 x 7,168, 8 of 8, bf16, forward and backward", "moe",
     "layer_fwd_bwd_N16384_D7168_F2048_E8_k8", "bf16", "torch bf16", "PyTorch's parts, compiled"),
    ("the same, `mxfp8_g128`", "moe", "layer_fwd_bwd_N16384_D7168_F2048_E8_k8",
     "mxfp8_g128", "torch bf16", "PyTorch's parts, compiled, bf16"),
    ("Grouped product, 131,072 x 7,168 x 2,048, `mxfp8_g128`", "mxfp8", "grouped_mxfp8_g128_up_T131072_D7168_F2048_E8",
     "grouped_mm mxfp8_g128", "torch._grouped_mm bf16", "`torch._grouped_mm`, bf16"),
)  # fmt: skip


def table() -> str:
    lines = ["| kernel | TFLOP/s | time of a peer over ours |", "|---|---|---|"]
    for what, family, case, ours, peer, name in ROWS:
        timed = json.loads((RESULTS / f"{family}.json").read_text())["cases"][case]["contenders"]
        ratio = timed[peer]["median_ms"] / timed[ours]["median_ms"]
        lines.append(f"| {what} | {timed[ours]['tflops']:,.0f} | {ratio:.2f}x {name} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
