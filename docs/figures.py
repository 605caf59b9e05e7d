# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of the documents: `python docs/figures.py` writes docs/images/*.svg.

Each figure has its own background in light and dark, so it reads on any page.
"""

from pathlib import Path

STYLE = """
.page{fill:#fff}.t,.s{fill:#1f2937;font-family:system-ui,sans-serif}.t{font-size:15px}
.s{font-size:12.5px;fill:#6b7280}.m{text-anchor:middle}.b{font-weight:600}
.box{fill:none;stroke:#9ca3af;rx:8px}.r0{fill:#2563eb}.r1{fill:#d97706}.r2{fill:#059669}
.no{fill:#e5e7eb}.w{fill:#fff;font-size:13px;font-weight:600;text-anchor:middle;
font-family:system-ui,sans-serif}.l{fill:none;stroke-width:1.8;opacity:.75}
.l0{stroke:#2563eb}.l1{stroke:#d97706}.lg{stroke:#9ca3af;stroke-dasharray:4 3}
@media(prefers-color-scheme:dark){.page{fill:#111827}.t{fill:#f3f4f6}.s{fill:#9ca3af}
.box{stroke:#4b5563}.no{fill:#374151}.r0{fill:#3b82f6}.l0{stroke:#60a5fa}
.l1{stroke:#fbbf24}}
"""
BLUE, ORANGE, GREEN, EMPTY = "r0", "r1", "r2", "no"


class Figure:
    """An SVG under construction."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size, self.title, self.parts = (width, height), title, []

    def text(self, x: float, y: float, text: str, kind: str = "t") -> None:
        self.parts.append(f'<text class="{kind}" x="{x}" y="{y}">{text}</text>')

    def frame(self, x: float, y: float, w: float, h: float, title: str) -> None:
        self.parts.append(
            f'<rect class="box" x="{x}" y="{y}" width="{w}" height="{h}"/>'
        )
        self.text(x + 10, y + 20, title, "t b")

    def cell(
        self, x: float, y: float, text: str, color: str, w: float = 34, h: float = 22
    ) -> None:
        self.parts.append(
            f'<rect class="{color}" rx="3" x="{x}" y="{y}" width="{w}" height="{h}"/>'
        )
        if text:
            self.text(x + w / 2, y + h - 7, text, "w")

    def curve(self, x0: float, y0: float, x1: float, y1: float, kind: str) -> None:
        middle = (x0 + x1) / 2
        self.parts.append(
            f'<path class="l {kind}" marker-end="url(#{kind})" '
            f'd="M{x0} {y0}C{middle} {y0} {middle} {y1} {x1} {y1}"/>'
        )

    def svg(self) -> str:
        width, height = self.size
        marker = (
            '<marker id="{0}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" '
            'markerHeight="5" orient="auto"><path class="{1}" d="M0 0L8 4L0 8z"/>'
            "</marker>"
        )
        markers = [("l0", BLUE), ("l1", ORANGE), ("lg", EMPTY)]
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} '
                f'{height}" width="{width}" height="{height}" role="img">',
                f"<title>{self.title}</title><style>{STYLE}</style><defs>",
                *(marker.format(*names) for names in markers),
                f'</defs><rect class="page" rx="10" width="{width}" '
                f'height="{height}"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def dispatch_combine() -> Figure:
    """Two ranks, five tokens, top-2 of four experts."""
    figure = Figure(900, 352, "Dispatch sorts tokens by expert, combine adds them up")
    choices = {"a": (0, 2), "b": (1, 2), "c": (2, 3), "d": (0, 3), "e": (1, 3)}
    at = {}
    columns = ((20, "tokens"), (720, "results"))
    for x, what in columns:
        for rank, names in enumerate(("abc", "de")):
            figure.frame(x, 20 + 160 * rank, 160, 140, f"rank {rank}: {what}")
            for i, name in enumerate(names):
                y = 52 + 160 * rank + 30 * i
                at[what, name] = y + 11
                prime = "" if what == "tokens" else "&#8242;"
                figure.cell(x + 63, y, name + prime, (BLUE, ORANGE)[rank])
    for rank in range(2):
        figure.frame(340, 20 + 160 * rank, 220, 140, f"rank {rank}: rows by expert")
        for expert in (2 * rank, 2 * rank + 1):
            y = 62 + 160 * rank + 46 * (expert % 2)
            figure.text(352, y + 16, f"E{expert}", "t")
            rows = [name for name in choices if expert in choices[name]]
            for i, name in enumerate(rows):
                color = BLUE if name in "abc" else ORANGE
                figure.cell(388 + 40 * i, y, name, color)
            for name in rows:
                color = "l0" if name in "abc" else "l1"
                figure.curve(119, at["tokens", name], 336, y + 11, color)
                figure.curve(562, y + 11, 781, at["results", name], color)
    for x, what in ((260, "dispatch"), (450, "your experts"), (640, "combine")):
        figure.text(x, 342, what, "t b m")
    return figure


def addressing() -> Figure:
    """One token of rank 0 with three experts, by rank and by expert."""
    figure = Figure(900, 300, "by_rank sends a token once a rank, by_expert once a row")
    for x, name, what in (
        (20, "by_rank", "one copy a rank, and a small entry a choice"),
        (460, "by_expert", "one copy a choice, into a slot of its expert"),
    ):
        figure.text(x + 4, 30, name, "t b")
        figure.text(x + 94, 30, what, "s")
        figure.frame(x, 110, 110, 70, "rank 0")
        figure.cell(x + 38, 142, "t", BLUE)
        for rank, y in ((1, 50), (2, 180)):
            figure.frame(x + 200, y, 220, 104, f"rank {rank}")
    figure.cell(236, 84, "t", BLUE)
    figure.text(280, 100, "tokens[rank 0][t]", "s")
    figure.curve(92, 150, 232, 95, "l0")
    figure.text(236, 140, "entries: t &#8594; E4, t &#8594; E5", "s")
    figure.cell(236, 214, "t", BLUE)
    figure.text(280, 230, "tokens[rank 0][t]", "s")
    figure.curve(92, 156, 232, 225, "l0")
    figure.text(236, 270, "entry: t &#8594; E8", "s")
    for y, expert, start in ((80, 4, 148), (114, 5, 154), (214, 8, 160)):
        figure.cell(676, y, "t", BLUE)
        figure.text(720, y + 16, f"slots[E{expert}][rank 0][0]", "s")
        figure.curve(532, start, 672, y + 11, "l0")
    return figure


def combining() -> Figure:
    """The way back of the same token, as rows and as sums."""
    figure = Figure(900, 300, "Rows cross one by one, or are added up where they are")
    for x, name, what in (
        (20, "rows", "every expert row crosses; the token's rank adds them"),
        (460, "sums", "each rank adds its own rows; one partial sum crosses"),
    ):
        figure.text(x + 4, 30, f'combine_mode="{name}"', "t b")
        figure.text(x + 4, 48, what, "s")
        figure.frame(x, 60, 170, 100, "rank 1")
        figure.frame(x, 180, 170, 90, "rank 2")
        figure.frame(x + 290, 110, 120, 90, "rank 0")
        figure.cell(x + 14, 92, "E4(t)", GREEN, 50)
        figure.cell(x + 14, 124, "E5(t)", GREEN, 50)
        figure.cell(x + 14, 220, "E8(t)", GREEN, 50)
        figure.cell(x + 310, 146, "&#931; w&#183;row", BLUE, 80)
    for y, end in ((103, 150), (135, 157), (231, 164)):
        figure.curve(86, y, 326, end, "l1")
    for y in (103, 135):
        figure.curve(526, y, 556, 119, "lg")
    figure.curve(526, 231, 556, 231, "lg")
    for y, end in ((108, 152), (220, 162)):
        figure.cell(558, y, "&#931; w&#183;row", ORANGE, 66)
        figure.curve(626, y + 11, 766, end, "l1")
    return figure


def layouts() -> Figure:
    """What dispatch delivers for three local experts."""
    figure = Figure(900, 210, "Packed rows stand together, padded ones by expert")
    rows = {"E0": "ad", "E1": "b", "E2": "ace"}
    figure.text(24, 32, "packed", "t b")
    figure.text(24, 52, "tokens [rows, hidden]", "s")
    x = 36.0
    for expert, names in rows.items():
        figure.text(x, 84, expert, "s")
        for name in names:
            figure.cell(x, 92, name, BLUE if name in "abc" else ORANGE)
            x += 38
    figure.text(36, 136, "row_offsets = [0, 2, 3, 6]", "s")
    figure.text(36, 156, "expert_ids = [0, 1, 2]", "s")
    figure.text(470, 32, "padded", "t b")
    figure.text(470, 52, "tokens [experts, capacity, hidden]", "s")
    for i, (expert, names) in enumerate(rows.items()):
        figure.text(478, 85 + 32 * i, expert, "s")
        for j in range(8):
            color = EMPTY
            if j < len(names):
                color = BLUE if names[j] in "abc" else ORANGE
            label = names[j] if j < len(names) else ""
            figure.cell(510 + 38 * j, 69 + 32 * i, label, color)
    figure.text(478, 186, "recv_counts = [2, 1, 3]", "s")
    return figure


FIGURES = (dispatch_combine, addressing, combining, layouts)

if __name__ == "__main__":
    for draw in FIGURES:
        path = Path(__file__).parent / "images" / f"{draw.__name__}.svg"
        path.write_text(draw().svg())
