"""`python -m tools.tables`: the rows of the README's and the documents' tables, made from the results.

A row is found by its first cell, which is written by hand like the rest of a page. The other cells are made from the
committed `results`, so that no number is copied by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernels.bench.report import number

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "kernels" / "bench" / "results" / "nvidia-h200"
FA4, TLX = "FlashAttention 4", "FBGEMM TLX"
VARLEN, CUDNN_FOLDED, BROADCAST = "torch", "cudnn, candidates folded", "cudnn, keys broadcast"
GROUPED_MM = "torch._grouped_mm bf16"
DIRECTIONS = {"forward": "fwd", "backward": "bwd"}
Row = tuple[str, list[str]]


class Result:
    """A case: the rows of its contenders that were timed, the first of which is ours."""

    def __init__(self, family: str, case: str) -> None:
        self.case = _cases(family)[case]
        self.rows = {name: row for name, row in self.case["contenders"].items() if "median_ms" in row}
        self.ours = next(iter(self.rows.values()))

    def ms(self, name: str | None = None) -> float:
        return float((self.rows[name] if name else self.ours)["median_ms"])

    def over(self, name: str, ours: str | None = None, digits: int = 2) -> str:
        """Time of a contender over ours; "cannot" for one that refused the case, and "not run" for one that was not
        there."""
        if name in self.rows:
            return f"{self.ms(name) / self.ms(ours):.{digits}f}x"
        row = self.case["contenders"].get(name, {"unavailable": "cannot be imported"})
        absent = any(
            words in row.get("unavailable", "") for words in ("cannot be imported", "GEMSMITH_PEER", "install")
        )
        return "not run" if absent else "cannot"

    def tflops(self, name: str | None = None) -> str:
        return number(self.tflops_of(name))

    def tflops_of(self, name: str | None = None) -> float:
        return float((self.rows[name] if name else self.ours)["tflops"])


@cache
def _cases(family: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{family}.json").read_text())["cases"])


OWN = {"hopper", "triton", "decode", "absorbed", "padded", "reference", "bf16", "mxfp8", "mxfp8_g128"}
"""Contenders that are ours; so is whatever a contest names as such."""
RIVALS = {
    ("jagged", "torch"): "`torch.nn.attention.varlen`",
    ("jagged", "sdpa on padded"): "padded `scaled_dot_product_attention`",
    ("jagged", "cudnn, nothing padded"): "cuDNN, nothing padded",
    ("ikbo", "torch"): "`torch.nn.attention.varlen`",
    ("ikbo", CUDNN_FOLDED): "cuDNN on one long query a user",
    ("ikbo", BROADCAST): "cuDNN on copied keys",
    ("lce", "torch"): "PyTorch's `bmm` on aligned rows",
    ("lce", "torch, bmm and sum"): "PyTorch's `bmm` and a sum",
    ("lce", "torch, @ and index"): "PyTorch's `@` and index",
    ("mxfp8", GROUPED_MM): "`torch._grouped_mm`",
    ("mxfp8", "quack bf16"): "quack",
    ("mxfp8", "torch._scaled_grouped_mm fp8"): "`torch._scaled_grouped_mm`, a scale a row",
    ("moe", "torch bf16"): "PyTorch's parts, compiled",
}
"""What a page calls a contender, by family; others by their own names."""
KNOWN = {
    "attention": (FA4,),
    "target_fwd": (FA4, TLX),
    "target_odd_fwd": (FA4, TLX),
    "self": ("ads_model_kernel_library",),
    "grouped_mxfp8": ("torch._scaled_grouped_mm fp8",),
}
"""Contenders that cases so named have where they are installed, and that a row must not leave out in silence."""


@dataclass(frozen=True)
class Contest:
    """A case of the README: ours, and all others of its precision that were timed, the fastest one first."""

    what: str
    family: str
    case: str
    ours: str

    @property
    def result(self) -> Result:
        return Result(self.family, self.case)

    @property
    def rivals(self) -> list[str]:
        """FP8 stands against FP8 only, and 16 bits against 16 bits."""
        rows = self.result.rows
        alike = [name for name in rows if name not in OWN | {self.ours} and _is_fp8(name) == _is_fp8(self.ours)]
        return sorted(alike, key=lambda name: float(rows[name]["median_ms"]))

    @property
    def missing(self) -> list[str]:
        names = (name for prefix, known in KNOWN.items() if self.case.startswith(prefix) for name in known)
        return [self.named(name) for name in names if name not in self.result.rows]

    def named(self, rival: str) -> str:
        return RIVALS.get(("lce" if self.case.startswith("lce") else self.family, rival), rival)


def _is_fp8(contender: str) -> bool:
    return "fp8" in contender


CONTESTS = (
    Contest("Linear compression, float16, 1,024 candidates, 70 a request, all gradients", "ikbo",
            "lce_bwd_B1024_ratio70", "hopper"),
    Contest("Target attention, 2,048 candidates, uneven over 32 users, 1,024 keys, forward", "ikbo",
            "target_odd_fwd_K1024", "hopper"),
    Contest("Jagged attention, 512 rows uniform in 1 to 1,024, forward", "jagged",
            "attention_fwd_B512_L1024_mean0.5_d128", "hopper"),
    Contest("the same attention, backward", "jagged", "attention_bwd_B512_L1024_mean0.5_d128", "hopper"),
    Contest("Routed experts, 16,384 x 7,168, 8 of 8, forward and backward", "moe",
            "layer_fwd_bwd_N16384_D7168_F2048_E8_k8", "bf16"),
    Contest("the same experts, `mxfp8_g128`", "moe", "layer_fwd_bwd_N16384_D7168_F2048_E8_k8", "mxfp8_g128"),
    Contest("Grouped product, 65,536 x 1,024 to 4,096, 32 experts", "mxfp8",
            "grouped_bf16_up_T65536_D1024_F2048_E32", "grouped_mm bf16"),
    Contest("GDPA, 1,152 rows of 2,048, forward", "gdpa", "self_dense_fwd_L2048", "hopper"),
)  # fmt: skip
"""The README's rows."""


def readme() -> Iterator[Row]:
    for contest in CONTESTS:
        result, ours = contest.result, contest.ours
        cells = [f"{result.over(rival, ours)} {contest.named(rival)}" for rival in contest.rivals[:2]]
        precision = "FP8" if _is_fp8(ours) else "this precision"
        nearest, other = [*(cells or [f"no other one in {precision} ran"]), "", ""][:2]
        if contest.missing:
            nearest += f"; {' and '.join(contest.missing)} did not run"
        yield contest.what, [result.tflops(ours), nearest, other]


def jagged_attention() -> Iterator[Row]:
    for rows, length in ((1024, 512), (256, 2048)):
        for mean in ("1.0", "0.5"):
            cells = []
            for short in DIRECTIONS.values():
                result = Result("jagged", f"attention_{short}_B{rows}_L{length}_mean{mean}_d128")
                others = [result.over(name) for name in (VARLEN, FA4, "sdpa on padded")]
                cells += [number(result.ms()), result.tflops(), *others]
            yield f"{rows} x {length:,}, {mean}", cells
    for what, case in {
        "2, 2 of 64 features, forward": "pooling_fwd_S2_d64",
        "2, 2 of 64 features, backward": "pooling_bwd_S2_d64",
    }.items():
        result = Result("jagged", case)
        speed = f"{result.ours['tb_per_s']:.2f}"
        yield what, [f"{result.ms():.3f}", speed, result.over(VARLEN)]


def jagged_operators() -> Iterator[Row]:
    names = ("jagged_dense_bmm", "jagged_jagged_bmm", "jagged_softmax", "jagged_jagged_bmm_jagged_out", "jagged_linear")
    for name in names:
        for direction, short in DIRECTIONS.items():
            result = Result("jagged", f"{name}_{short}_bf16")
            padded = result.rows["torch padded"]
            launches = "" if result.case["graph"] else " (with launches)"
            peer = result.over("FBGEMM Triton") if "FBGEMM Triton" in result.rows else "none"
            yield f"{name} {direction}{launches}", [
                f"{result.case['flops'] / 1e6:.0f}", f"{1e3 * result.ms():.1f}", f"{result.ours['peak_mib']:.0f}",
                result.over("torch padded"), f"{padded['peak_mib']:.0f}", peer, f"{result.ours['tb_per_s']:.2f}",
            ]  # fmt: skip


def gdpa() -> Iterator[Row]:
    kinds = {
        "self_dense": "self, dense",
        "self_ragged_queries": "self, queries uniform in 1..L",
        "cross_short_keys": "cross, 256 keys",
        "self_heavy_tailed": "self, heavy-tailed",
    }
    for kind, what in kinds.items():
        for length in (256, 2048):
            cells = []
            for short in DIRECTIONS.values():
                result = Result("gdpa", f"{kind}_{short}_L{length}")
                cells += [number(result.ms()), result.tflops(), result.over("ads_model_kernel_library")]
            yield f"{what}, {length:,}", cells
    for length in (1024, 4096, 8192):
        cells = []
        for short in DIRECTIONS.values():
            result = Result("gdpa", f"hstu_targets_{short}_d64_L{length}")
            cells += [number(result.ms()), result.tflops(), result.over("generative-recommenders")]
        yield f"HSTU, {length:,}", cells


def target_attention() -> Iterator[Row]:
    def cells(case: str) -> list[str]:
        result = Result("ikbo", case)
        over = [result.over(name) for name in (VARLEN, FA4, TLX, "triton", CUDNN_FOLDED)]
        over[2] = "none" if "_bwd_" in case else over[2]
        return [f"{result.ms():.3f}", result.tflops(), *over, result.over(BROADCAST, digits=1)]

    yield "forward, 512 keys", cells("target_fwd_K512")
    for length in (1024, 4096):
        yield f"forward, {length:,}", cells(f"target_fwd_K{length}")
    yield "forward, 1,024, uneven and odd numbers of candidates", cells("target_odd_fwd_K1024")
    yield "forward, 1,024, 32 query rows", cells("target_seeds32_fwd_K1024")
    for length in (512, 1024, 4096):
        yield f"backward, {length:,}", cells(f"target_bwd_K{length}")
    for direction, short in DIRECTIONS.items():
        result = Result("ikbo", f"tree_{short}_K1024")
        reference = f"{result.ms('reference'):.1f} ({result.over('reference', digits=0)})"
        yield f"tree, {direction}, 1,024 keys", [f"{result.ms():.3f}", reference]
        for length in (512, 4096):
            result = Result("ikbo", f"joint_{short}_K{length}")
            others = [f"{result.ms(name):.3f} ({result.over(name)})" for name in ("two launches", "separate")]
            yield f"joint, {direction}, {length:,} keys", [f"{result.ms():.3f}", *others]


def lce() -> Iterator[Row]:
    sizes = [(1024, 1), (1024, 70), (3072, 70), (1024, 1000)]
    for candidates, ratio in sizes:
        result = Result("ikbo", f"lce_fwd_B{candidates}_ratio{ratio}")
        names = ("hopper", "torch", "triton", "torch, @ and index", "FBGEMM Triton")
        cells = [f"{result.ms(name):.3f}" for name in names]
        yield f"{candidates:,}, {ratio:,}", [*cells, f"{result.ms(TLX):.3f}" if TLX in result.rows else "not run"]


def experts() -> Iterator[Row]:
    layers = {
        "layer_fwd_bwd_N32768_D1024_F2048_E32_k2": "32,768 x 1,024 x 2,048, 32, 2",
        "layer_fwd_bwd_N65536_D512_F1024_E16_k2": "65,536 x 512 x 1,024, 16, 2",
        "layer_fwd_bwd_N16384_D7168_F2048_E8_k8": "16,384 x 7,168 x 2,048, 8, 8",
    }
    for case, what in layers.items():
        result, torch = Result("moe", case), "torch bf16"
        for name in (torch, "bf16", "mxfp8", "mxfp8_g128"):
            memory = result.rows[name]["peak_mib"]
            yield f"{what}: {name}", [
                f"{result.ms(name):.2f}", result.tflops(name), result.over(torch, name), f"{memory:,.0f}",
                f"{memory / result.rows[torch]['peak_mib']:.2f}",
            ]  # fmt: skip
    shapes = {
        "T65536_D1024_F2048_E32": "65,536 x 1,024 x 2,048, 32",
        "T131072_D7168_F2048_E8": "131,072 x 7,168 x 2,048, 8",
    }
    for shape, what in shapes.items():
        for product in ("up", "wgrad_up"):
            cells = []
            for recipe in ("bf16", "mxfp8_g128", "mxfp8"):
                result = Result("mxfp8", f"grouped_{recipe}_{product}_{shape}")
                over = result.over(GROUPED_MM)
                if "alone_ms" in result.ours:
                    over += f" ({result.rows[GROUPED_MM]['alone_ms'] / result.ours['alone_ms']:.2f}x)"
                cells += [number(result.ms()), result.tflops(), over]
            yield f"{what}: {product.replace('_', ', ')}", cells


def tokens() -> Iterator[Row]:
    for name in ("rms_norm", "rotate"):
        for direction, short in DIRECTIONS.items():
            result = Result("tokens", f"{name}_{short}")
            others = [result.over(peer) for peer in ("PyTorch", "PyTorch, compiled")]
            cells = [f"{1e3 * result.ms():.1f}", f"{result.ours['tb_per_s']:.2f}", *others]
            yield f"`{name}` {direction}", cells


PAGES = {
    "README.md": readme,
    "docs/jagged_attention.md": jagged_attention,
    "docs/jagged.md": jagged_operators,
    "docs/gdpa.md": gdpa,
    "docs/target_attention.md": target_attention,
    "docs/lce.md": lce,
    "docs/moe.md": experts,
    "kernels/tokens/README.md": tokens,
}


def rewritten(text: str, rows: Iterator[Row]) -> str:
    """`text` with the cells of `rows` after their first ones. ValueError unless it has each row exactly once."""
    lines = text.splitlines(keepends=True)
    for first, cells in rows:
        places = [i for i, line in enumerate(lines) if line.startswith(f"| {first} |")]
        if len(places) != 1:
            raise ValueError(f"{len(places)} rows begin with the cell {first!r}; expected one")
        lines[places[0]] = f"| {' | '.join([first, *cells])} |\n"
    return "".join(lines)


if __name__ == "__main__":
    for page, rows in PAGES.items():
        path = ROOT / page
        path.write_text(rewritten(path.read_text(), rows()))
