"""Lines over one common axis in several small panels, as an SVG that any browser shows in its light or dark colours."""

import math
from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple

WIDTH, HEIGHT = 420, 190
LEFT, TOP, GAP = 56, 60, 44
COLOURS: Final = ("#2563eb", "#ea580c", "#16a34a", "#9333ea")
STYLE: Final = """
  text { font: 12px system-ui, sans-serif; fill: #334155 }
  .title { font-size: 15px; font-weight: 600 } .panel { font-weight: 600 }
  .axis { stroke: #94a3b8; stroke-width: 1 } .grid { stroke: #cbd5e1; stroke-width: 0.5 }
  .line { fill: none; stroke-width: 1.6 }
  svg { background: #ffffff }
  @media (prefers-color-scheme: dark) {
    svg { background: #0f172a } text { fill: #e2e8f0 } .grid { stroke: #334155 }
  }
"""


class Panel(NamedTuple):
    name: str
    lines: dict[str, list[float]]


def draw(title: str, along: str, places: Sequence[float], panels: Sequence[Panel]) -> str:
    """Two panels beside each other; each begins at zero, so that flat looks flat."""
    rows = math.ceil(len(panels) / 2)
    width = 2 * (LEFT + WIDTH) + 30
    height = TOP + rows * (HEIGHT + 2 * GAP) + 10
    parts = [f'<text class="title" x="{LEFT}" y="28">{escape(title)}</text>']
    for number, panel in enumerate(panels):
        x = LEFT + (number % 2) * (WIDTH + LEFT + 10)
        y = TOP + (number // 2) * (HEIGHT + 2 * GAP) + GAP
        parts += _panel(panel, along, places, x, y)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def _panel(panel: Panel, along: str, places: Sequence[float], x: float, y: float) -> list[str]:
    top = _round_up(max((value for line in panel.lines.values() for value in line), default=1.0))
    last = max(places[-1], 1)
    parts = [f'<text class="panel" x="{x}" y="{y - 26}">{escape(panel.name)}</text>']
    for step in range(5):
        level = y + HEIGHT - HEIGHT * step / 4
        parts.append(f'<line class="grid" x1="{x}" x2="{x + WIDTH}" y1="{level:.1f}" y2="{level:.1f}"/>')
        parts.append(f'<text x="{x - 6}" y="{level + 4:.1f}" text-anchor="end">{top * step / 4:g}</text>')
    parts.append(f'<line class="axis" x1="{x}" x2="{x + WIDTH}" y1="{y + HEIGHT}" y2="{y + HEIGHT}"/>')
    parts.append(f'<text x="{x}" y="{y + HEIGHT + 18}">0</text>')
    parts.append(f'<text x="{x + WIDTH}" y="{y + HEIGHT + 18}" text-anchor="end">{last:g} {escape(along)}</text>')
    across = x
    for (name, line), colour in zip(panel.lines.items(), COLOURS, strict=False):
        points = " ".join(
            f"{x + WIDTH * place / last:.1f},{y + HEIGHT - HEIGHT * value / top:.1f}"
            for place, value in zip(places, line, strict=True)
        )
        parts.append(f'<polyline class="line" stroke="{colour}" points="{points}"/>')
        parts.append(f'<circle cx="{across + 4}" cy="{y - 12}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{across + 12}" y="{y - 8}">{escape(name)}</text>')
        across += 24 + 7 * len(name)
    return parts


def _round_up(value: float) -> float:
    """To a number whose quarters are round too."""
    if value <= 0:
        return 1.0
    unit = 10 ** math.floor(math.log10(value))
    return float(next(step * unit for step in (1, 2, 4, 6, 8, 10, 20) if step * unit >= value))
