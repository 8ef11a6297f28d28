"""Charts as SVG, drawn from numbers alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

Series = Mapping[str, Sequence[tuple[float, float]]]

WIDTH, HEIGHT = 680, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 44, 52
# Okabe and Ito's colours, which differ for everybody.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777")


def draw_lines(title: str, x_name: str, y_name: str, series: Series) -> str:
    """Lines over a logarithmic x axis and a y axis from zero.

    Args:
        title: above the chart.
        x_name: what x is, with its unit.
        y_name: what y is, with its unit.
        series: name -> points (x, y), x above 0.
    """
    points = [point for line in series.values() for point in line]
    least, most = (pick(x for x, _ in points) for pick in (min, max))
    highest = max(y for _, y in points)
    across = _scale(math.log2(least), math.log2(most), LEFT, WIDTH - RIGHT)
    up, ticks = _vertical(highest)
    parts = [_frame(title, y_name, up, ticks)]
    parts += [
        _text(across(math.log2(x)), HEIGHT - BOTTOM + 18, f"{x:.0f}", "middle")
        for x in sorted({x for x, _ in points})
    ]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_name, "middle"))
    for i, (name, line) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        places = [(across(math.log2(x)), up(y)) for x, y in sorted(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in places]
        parts.append(_key(i, name, colour))
    return _page(parts)


def draw_bars(title: str, y_name: str, groups: Mapping[str, Mapping[str, float]]) -> str:
    """Bars in groups.

    Args:
        title: above the chart.
        y_name: what a bar is, with its unit.
        groups: name of the group -> name of the bar -> height.
    """
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    up, ticks = _vertical(max(height for group in groups.values() for height in group.values()))
    parts = [_frame(title, y_name, up, ticks)]
    space = (WIDTH - LEFT - RIGHT) / len(groups)
    for place, (label, group) in enumerate(groups.items()):
        width = 0.8 * space / len(group)
        start = LEFT + space * (place + 0.1)
        for i, (name, height) in enumerate(group.items()):
            colour = COLOURS[names.index(name) % len(COLOURS)]
            x, y = start + i * width, up(height)
            parts.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{0.9 * width:.1f}" '
                f'height="{up(0) - y:.1f}" fill="{colour}"/>'
            )
            parts.append(_text(x + 0.45 * width, y - 4, f"{height:.0f}", "middle"))
        parts.append(_text(start + 0.4 * space, HEIGHT - BOTTOM + 18, label, "middle"))
    parts += [_key(i, name, COLOURS[i % len(COLOURS)]) for i, name in enumerate(names)]
    return _page(parts)


def _scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    """A linear map of [low, high] to pixels; a single value goes to the middle."""
    if high == low:
        return lambda _: (first + last) / 2
    return lambda value: first + (value - low) / (high - low) * (last - first)


def _vertical(highest: float) -> tuple[Callable[[float], float], list[float]]:
    """The y axis from zero to a round number above `highest`, and its ticks."""
    power = 10 ** math.floor(math.log10(highest))
    step = next(s * power for s in (0.2, 0.5, 1, 2, 5) if highest / (s * power) <= 6)
    count = math.ceil(1.02 * highest / step)
    up = _scale(0, count * step, HEIGHT - BOTTOM, TOP)
    return up, [i * step for i in range(count + 1)]


def _frame(title: str, y_name: str, up: Callable[[float], float], ticks: Sequence[float]) -> str:
    parts = [
        f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="{LEFT}" y="36" fill="#555">{escape(y_name)}</text>',
    ]
    for tick in ticks:
        y = up(tick)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        )
        parts.append(_text(LEFT - 8, y + 4, f"{tick:g}", "end"))
    return "\n".join(parts)


def _key(place: int, name: str, colour: str) -> str:
    x, y = WIDTH - RIGHT + 16, TOP + 10 + 20 * place
    return (
        f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>\n'
        + _text(x + 16, y, name, "start")
    )  # fmt: skip


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _page(parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])
