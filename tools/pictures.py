"""`python -m tools.pictures`: the drawings of the documentation, as SVG in docs/pictures.

Each stands on a light card of its own, so that it reads alike on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path

from tools.tables import CONTESTS

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
INK, FAINT, CARD = "#1f2933", "#52606d", "#fbfcfd"
REQUEST, CANDIDATE, EVENT, SUMMARY, PLAIN = "#bcd7f5", "#ffd9a8", "#c9e8c4", "#e3cdf3", "#e4e7eb"
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


class Picture:
    """Boxes, texts and arrows in pixels; the origin is the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="{FONT}" font-size="14" role="img">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{FAINT}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="10" fill="{CARD}" stroke="#cbd2d9"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str, text: str = "", note: str = "") -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{FAINT}"/>'
        )
        middle, center = x + width / 2, y + height / 2
        if text:
            self.text(middle, center + (-3 if note else 5), text, anchor="middle")
        if note:
            self.text(middle, center + 15, note, anchor="middle", small=True)

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", *, bold: bool = False, small: bool = False
    ) -> None:
        style = ' font-weight="600"' if bold else ""
        size, fill = (' font-size="12"', FAINT) if small else ("", INK)
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}"{size}{style}>{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float]) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{FAINT}" stroke-width="1.5" marker-end="url(#head)"/>'
        )

    def dashed(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{FAINT}" stroke-dasharray="4 4"/>'
        )

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def request_batch() -> Picture:
    picture = Picture(760, 300, "A request batch: three requests with their histories and candidates")
    for x, text in ((110, "request features"), (270, "history, oldest first"), (530, "candidates to score")):
        picture.text(x, 34, text, bold=True)
    for row, (events, candidates) in enumerate(((5, 3), (0, 1), (8, 5))):
        y = 52 + 58 * row
        picture.text(24, y + 25, f"request {row}")
        picture.box(110, y, 120, 38, REQUEST, "user, time")
        for event in range(events):
            picture.box(270 + 28 * event, y, 24, 38, EVENT)
        if not events:
            picture.text(270, y + 25, "no events: a row of length 0", small=True)
        for candidate in range(candidates):
            picture.box(530 + 38 * candidate, y, 34, 38, CANDIDATE)
    y = 250
    picture.text(110, y, "R = 3 rows")
    picture.text(270, y, "13 events, offsets [0, 5, 5, 13]")
    picture.text(530, y, "C = 9 rows, offsets [0, 3, 4, 9]")
    picture.text(
        24,
        y + 30,
        "Nothing is padded, and a request's features and history are stored once for all of its candidates.",
        small=True,
    )
    return picture


def interformer_layer() -> Picture:
    picture = Picture(760, 420, "A layer of InterFormer: two streams, each of which reads a summary of the other")
    picture.text(150, 32, "features", "middle", bold=True)
    picture.text(610, 32, "sequence", "middle", bold=True)
    picture.box(60, 46, 180, 50, CANDIDATE, "X", "[C, n, d] tokens")
    picture.box(520, 46, 180, 50, EVENT, "S", "jagged, [sum T, d]")
    picture.box(290, 130, 180, 50, SUMMARY, "X_sum", "compressed (LCE), gated")
    picture.box(290, 214, 180, 50, SUMMARY, "S_sum", "CLS, PMA, recent; gated")
    picture.box(60, 214, 180, 50, PLAIN, "Interaction Arch", "X + MLP(DHEN([X | S_sum]))")
    picture.box(520, 130, 180, 50, PLAIN, "PFFN", "weights made from X_sum")
    picture.box(520, 200, 180, 38, PLAIN, "self-attention")
    picture.box(520, 258, 180, 38, PLAIN, "feed-forward or experts")
    picture.box(60, 340, 180, 50, CANDIDATE, "X of the next layer")
    picture.box(520, 340, 180, 50, EVENT, "S of the next layer")
    picture.arrow((150, 96), (150, 214))
    picture.arrow((150, 155), (290, 155))
    picture.arrow((470, 155), (520, 155))
    picture.arrow((610, 96), (610, 130))
    picture.arrow((610, 112), (495, 112), (495, 239), (470, 239))
    picture.arrow((290, 239), (240, 239))
    picture.arrow((610, 180), (610, 200))
    picture.arrow((610, 238), (610, 258))
    picture.arrow((610, 296), (610, 340))
    picture.arrow((150, 264), (150, 340))
    picture.text(380, 370, "each reads a summary of the other", "middle", small=True)
    return picture


def training_step() -> Picture:
    picture = Picture(760, 250, "Training steps in time: the next batches are prepared while one is computed")
    lanes = ("read, pack", "copy to GPU", "exchange ids", "compute")
    for lane, text in enumerate(lanes):
        picture.text(24, 76 + 40 * lane, text)
    fills = (REQUEST, CANDIDATE, EVENT, SUMMARY, PLAIN)
    for step in range(4):
        x = 130 + 150 * step
        picture.text(x + 70, 34, f"step {step}", "middle", bold=True)
        for lane, ahead, start, width in ((0, 3, 0, 140), (1, 2, 0, 45), (2, 1, 50, 60)):
            batch = step + ahead
            picture.box(x + start, 54 + 40 * lane, width, 32, fills[batch % 5], f"{batch}")
        for start, width, text in ((0, 60, "forward"), (60, 80, "backward")):
            picture.box(x + start, 174, width, 32, fills[step % 5], text)
    picture.text(
        24,
        232,
        "A number and a colour are a batch: while 0 is computed, ids of 1 are exchanged and 2 is copied.",
        small=True,
    )
    return picture


def row_tiles() -> Picture:
    picture = Picture(760, 300, "Tiles of jagged rows in attention: those that no query may see are left out")
    cell, lengths = 34, (3, 1, 5)
    picture.text(24, 34, "causal attention in three rows, tiles of 64 queries x 64 keys", bold=True)
    x = 24
    for row, tiles in enumerate(lengths):
        for i in range(tiles):
            for j in range(i + 1):
                picture.box(x + cell * j, 60 + cell * i, cell - 3, cell - 3, SUMMARY if i == j else EVENT)
        picture.text(x, 52, f"row {row}", small=True)
        x += cell * max(tiles, 2) + 30
    x = 440
    for y, fill, text in (
        (70, EVENT, "all queries see all keys: no mask"),
        (110, SUMMARY, "masked: diagonal or end of a row"),
    ):
        picture.box(x, y, cell - 3, cell - 3, fill)
        picture.text(x + 44, y + 20, text)
    picture.text(x, 170, "not drawn, not computed: hidden keys,", small=True)
    picture.text(x, 188, "and whatever padding to the longest row adds", small=True)
    picture.text(
        24,
        262,
        "The list of tiles is made on the device from the offsets, once for all layers of a step, and dealt evenly:",
        small=True,
    )
    picture.text(24, 280, "a multiprocessor takes several short rows, or a part of a long one.", small=True)
    return picture


def house() -> Picture:
    floors = (
        ("launch", REQUEST, ("torchrun, Slurm, Kubernetes", "sweep", "scaling")),
        ("train", CANDIDATE, ("data", "loss", "optim", "parallel", "metrics", "checkpoint", "speedup", "commands")),
        ("modules", EVENT, ("embedding", "attention", "gdpa", "interaction", "lce", "moe", "rewrite", "models")),
        ("kernels", SUMMARY, ("attention", "gdpa", "jagged", "ikbo", "tokens", "moe", "mxfp8")),
        ("kernels/core", PLAIN, ("dispatch", "operators", "offsets", "scheduling", "Triton helpers")),
    )  # fmt: skip
    picture = Picture(900, 70 + 66 * len(floors), "The floors of the repository: imports run downwards only")
    for floor, (name, fill, rooms) in enumerate(floors):
        y, width = 24 + 66 * floor, 736 / len(rooms)
        picture.text(24, y + 28, name, bold=True)
        for room, text in enumerate(rooms):
            picture.box(140 + width * room, y, width - 6, 46, fill, text)
        if floor:
            picture.arrow((60, y - 28), (60, y + 8))
    picture.text(
        24,
        48 + 66 * len(floors),
        "Imports run downwards only; every operator has a plain PyTorch specification.",
        small=True,
    )
    return picture


def speed() -> Picture:
    picture = Picture(900, 84 + 62 * len(CONTESTS), "TFLOP/s of our kernels and of each one's strongest rival")
    picture.text(24, 34, "TFLOP/s on one H200: ours above, the strongest other contender below", bold=True)
    width = 270 / max(contest.result.tflops_of(contest.ours) for contest in CONTESTS)
    for number, contest in enumerate(CONTESTS):
        y, what, result = 54 + 62 * number, contest.what, contest.result
        if what.startswith("the same"):
            what = CONTESTS[number - 1].what.partition(",")[0] + "," + what.partition(",")[2]
        head, _, rest = what.replace("`", "").partition(", ")
        picture.text(24, y + 17, head)
        picture.text(24, y + 37, rest, small=True)
        bars = [("ours", contest.ours, EVENT)]
        bars += [(contest.named(rival).replace("`", ""), rival, PLAIN) for rival in contest.rivals[:1]]
        for line, (label, contender, fill) in enumerate(bars):
            length = width * result.tflops_of(contender)
            picture.box(420, y + 23 * line, length, 20, fill)
            picture.text(428 + length, y + 15 + 23 * line, f"{result.tflops(contender)} {label}", small=True)
        if not contest.rivals:
            picture.text(420, y + 38, "no other one in FP8 ran", small=True)
    picture.text(24, 70 + 62 * len(CONTESTS), "Each row's contenders took turns in one process.", small=True)
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "request_batch": request_batch,
    "interformer_layer": interformer_layer,
    "training_step": training_step,
    "row_tiles": row_tiles,
    "house": house,
    "speed": speed,
}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
