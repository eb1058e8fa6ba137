"""`python -m tools.pictures`: docs/pictures/speed.svg, the contests of the README as bars.

Other pictures are drawn by hand, on light cards of their own as this one, for light and dark pages.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from tools.tables import CONTESTS

FILE = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "speed.svg"
INK, FAINT, CARD = "#1f2933", "#52606d", "#fbfcfd"
OURS, THEIRS = "#c9e8c4", "#e4e7eb"
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


class Picture:
    """Boxes and texts in pixels; the origin is the upper left corner."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="{FONT}" font-size="14" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="10" fill="{CARD}" stroke="#cbd2d9"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{fill}" stroke="{FAINT}"/>'
        )

    def text(self, x: float, y: float, text: str, *, bold: bool = False, small: bool = False) -> None:
        style = ' font-weight="600"' if bold else ""
        size, fill = (' font-size="12"', FAINT) if small else ("", INK)
        self.parts.append(f'<text x="{x:g}" y="{y:g}" fill="{fill}"{size}{style}>{escape(text)}</text>')

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


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
        bars = [("ours", contest.ours, OURS)]
        bars += [(contest.named(rival).replace("`", ""), rival, THEIRS) for rival in contest.rivals[:1]]
        for line, (label, contender, fill) in enumerate(bars):
            length = width * result.tflops_of(contender)
            picture.box(420, y + 23 * line, length, 20, fill)
            picture.text(428 + length, y + 15 + 23 * line, f"{result.tflops(contender)} {label}", small=True)
        if not contest.rivals:
            picture.text(420, y + 38, "no other one in FP8 ran", small=True)
    picture.text(24, 70 + 62 * len(CONTESTS), "Each row's contenders took turns in one process.", small=True)
    return picture


if __name__ == "__main__":
    FILE.write_text(speed().svg(), encoding="utf-8")
