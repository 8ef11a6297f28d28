"""Charts of a bundle as lists of SVG elements; colours and fonts are the page's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

_ROW, _GAP, _HEAD = 18, 8, 30  # heights: of a bar's row, between groups, of titles and axes
_LABEL, _PANEL, _VALUE = 214, 254, 66  # widths: of labels, of a panel, of the value behind a bar


class Mark(NamedTuple):
    """One SVG element: its tag, attributes, text, and what it says when pointed at."""

    tag: str
    attributes: dict[str, Any]
    text: str = ""
    tip: str = ""


@dataclass
class Chart:
    """A drawing.

    Attributes:
        title: what it shows.
        description: how to read it, and what a reader who does not see it should know.
        width: of its coordinates.
        height: of its coordinates.
        marks: in the order in which they are drawn.
        legend: names of colours, by class.
    """

    title: str
    description: str
    width: int = 0
    height: int = 0
    marks: list[Mark] = field(default_factory=list)
    legend: dict[str, str] = field(default_factory=dict)

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """Write text whose baseline begins, ends or is centred at a point."""
        place = {"x": _round(x), "y": _round(y), "text-anchor": anchor, "class": kind}
        self.marks.append(Mark("text", place, text))

    def bar(self, x: float, y: float, width: float, kind: str, tip: str) -> None:
        """A bar in the row that begins at y."""
        # What is too small to be seen is not nothing.
        size = {"width": max(_round(width), 1), "height": _ROW - 6, "rx": 1.5}
        place = {"x": _round(x), "y": _round(y + 3), **size, "class": kind}
        self.marks.append(Mark("rect", place, tip=tip))

    def line(self, x: float, top: float, bottom: float, kind: str, tip: str = "") -> None:
        """A vertical line."""
        place = {"x1": _round(x), "x2": _round(x), "y1": top, "y2": bottom, "class": kind}
        self.marks.append(Mark("line", place, tip=tip))

    def shape(self, path: str, kind: str, tip: str) -> None:
        """A path."""
        self.marks.append(Mark("path", {"d": path, "class": kind}, tip=tip))


class Panel(NamedTuple):
    """A column of bars: its title, a number for every row, and how numbers are written."""

    title: str
    values: Sequence[float]
    shown: Callable[[float], str]


def draw_panels(
    chart: Chart, labels: Sequence[str], groups: Sequence[str], panels: Sequence[Panel]
) -> Chart:
    """Bars side by side, one row for each label; rows of one group stand together."""
    places = _rows(groups)
    chart.width = _LABEL + _PANEL * len(panels)
    chart.height = places[-1] + _ROW + 4 if places else _HEAD
    for label, y in zip(labels, places, strict=True):
        chart.text(_LABEL - 10, y + 13, label, "label", "end")
    for i, panel in enumerate(panels):
        left = _LABEL + i * _PANEL
        largest = max(panel.values, default=0) or 1
        chart.text(left, 16, panel.title, "title")
        chart.line(left - 0.5, _HEAD - 4, chart.height, "axis")
        for label, value, y in zip(labels, panel.values, places, strict=True):
            width = (_PANEL - _VALUE - 12) * value / largest
            chart.bar(left, y, width, f"c{i}", f"{label}, {panel.title}: {panel.shown(value)}")
            chart.text(left + width + 5, y + 13, panel.shown(value), "value")
    return chart


class Stack(NamedTuple):
    """A bar of several parts, and what is said of it when pointed at."""

    label: str
    parts: Sequence[float]
    tip: str


def draw_stacks(
    chart: Chart, names: Sequence[str], stacks: Sequence[Stack], shown: Callable[[float], str]
) -> Chart:
    """Bars whose parts lie one behind the other, with their sums."""
    chart.width = _LABEL + 3 * _PANEL
    chart.height = 8 + len(stacks) * (_ROW + 4)
    chart.legend = {f"c{i}": name for i, name in enumerate(names)}
    longest = max((sum(stack.parts) for stack in stacks), default=0) or 1
    chart.line(_LABEL - 0.5, 0, chart.height, "axis")
    for i, stack in enumerate(stacks):
        y, x = 4 + i * (_ROW + 4), float(_LABEL)
        chart.text(_LABEL - 10, y + 13, stack.label, "label", "end")
        for k, part in enumerate(stack.parts):
            width = (chart.width - _LABEL - _VALUE - 12) * part / longest
            tip = f"{stack.label}, {names[k]}: {shown(part)}. {stack.tip}"
            chart.bar(x, y, width, f"c{k}", tip)
            x += max(width, 1)
        chart.text(x + 5, y + 13, shown(sum(stack.parts)), "value")
    return chart


class Point(NamedTuple):
    """A measured number, the largest that passes, and whether it did."""

    label: str
    group: str
    measured: float
    allowed: float
    passed: bool


def draw_points(chart: Chart, points: Sequence[Point]) -> Chart:
    """Measured numbers against the largest allowed ones, over powers of ten.

    What is 0 stands left of the axis, what is not finite at its right end.
    """
    numbers = [n for p in points for n in (p.measured, p.allowed) if 0 < n < math.inf]
    low = math.floor(math.log10(min(numbers, default=1e-9)))
    high = max(math.ceil(math.log10(max(numbers, default=1.0))), low + 1)
    places = _rows([point.group for point in points])
    chart.width = _LABEL + 3 * _PANEL
    chart.height = places[-1] + _ROW + 4 if places else _HEAD
    chart.legend = {"dot": "measured, passed", "cross": "measured, failed", "allowed": "allowed"}
    zero, left, right = _LABEL + 8, _LABEL + 44, chart.width - 24

    def across(value: float) -> float:
        if value == 0:
            return zero
        if not value < math.inf:  # NaN, too
            return right + 12
        return left + (right - left) * (math.log10(value) - low) / (high - low)

    chart.text(zero, 16, "0", "tick", "middle")
    chart.line(zero, _HEAD - 8, chart.height, "grid")
    every = -(-(high - low) // 12)
    for power in range(low, high + 1, every):
        chart.text(across(10.0**power), 16, f"1e{power}", "tick", "middle")
        chart.line(across(10.0**power), _HEAD - 8, chart.height, "grid")
    for point, y in zip(points, places, strict=True):
        x, limit, middle = across(point.measured), across(point.allowed), y + _ROW / 2
        tip = f"{point.label}: measured {point.measured:.3g}, allowed {point.allowed:.3g}"
        chart.text(_LABEL - 10, y + 13, point.label, "label" if point.passed else "bad", "end")
        chart.line(limit, y + 2, y + _ROW - 2, "allowed", tip)
        chart.shape(_dot(x, middle) if point.passed else _cross(x, middle),
                    "dot" if point.passed else "cross", tip)  # fmt: skip
    return chart


def _rows(groups: Sequence[str]) -> list[int]:
    """Where rows begin, with room between groups."""
    places = [_HEAD] if groups else []
    for before, group in pairwise(groups):
        places.append(places[-1] + _ROW + _GAP * (before != group))
    return places


def _dot(x: float, y: float) -> str:
    return f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0"


def _cross(x: float, y: float) -> str:
    return f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"


def _round(value: float) -> float:
    return round(value, 1)
