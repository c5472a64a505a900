"""Charts as small SVG documents inside the page: no script; colours by CSS variable, so that dark mode needs nothing.

Every mark has a `<title>`, which browsers show where the pointer rests and screen readers read.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 40
HEADROOM = 14
"""For the label of the y axis."""
COLOURS = 8
"""Classes `c0` to `c7` of the page's style."""
MOST_TITLES = 2500
"""Marks of a chart that say what they are when the pointer rests on them. Where there are more, lines have none, and
bars of a kind or cells of a shade (of 21) are one path, so that the page stays small."""
STRONG = 0.72
"""Shade from which on a cell's text has the page's colour, to be read on it."""
LONG = 1e15
"""Numbers from here on are shown with an exponent."""
LABEL = 24
"""Characters of a label beside or above a matrix."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart."""

    name: str
    points: Sequence[Point]
    style: str
    """CSS classes."""
    line: bool = True
    """False: marks only."""
    marks: bool = True
    """False: the line only."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One span in a lane of a timeline."""

    lane: str
    kind: str
    """CSS class, after `k-`."""
    begin: float
    end: float
    title: str


def line_chart(series: Sequence[Series], *, x_label: str, y_label: str, height: int = 340) -> Markup:
    """Lines and marks over whole numbers; the y axis is logarithmic where values span more than a factor of 5."""
    points = [point for one in series for point in one.points]
    if not points:
        return Markup("")
    xs, ys = [x for x, _ in points], [y for _, y in points]
    log = min(ys) >= sys.float_info.min and max(ys) / min(ys) > 5
    y_ticks = log_ticks(min(ys), max(ys)) if log else ticks(min(ys), max(ys))
    low, high = min([*y_ticks, *ys]), max([*y_ticks, *ys])
    left, right = min(xs), max(xs)
    place_x = _scale(left, right, LEFT, WIDTH - RIGHT)
    place_y = _scale(_log(low, log), _log(high, log), height - BOTTOM, TOP + HEADROOM)
    parts = [_text(LEFT, height - 4, x_label, "axis"), _text(4, TOP - 1, y_label, "axis")]
    for value in y_ticks:
        y = place_y(_log(value, log))
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 6, y + 4, _short(value), "tick end"))
    for value in whole_ticks(left, right):
        parts.append(_text(place_x(value), height - BOTTOM + 18, f"{value:g}", "tick middle"))
    for one in series:
        placed = [(place_x(x), place_y(_log(y, log)), x, y) for x, y in one.points if y > 0 or not log]
        if one.line and len(placed) > 1:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in placed)
            parts.append(f'<polyline class="{one.style}" points="{path}"><title>{escape(one.name)}</title></polyline>')
        size = 3 if one.line else 3.5
        for px, py, x, y in placed if one.marks and len(points) <= MOST_TITLES else []:
            said = escape(f"{one.name}: {_short(y)} at {x:g}")
            style = f"{one.style} mark"
            parts.append(
                f'<circle class="{style}" cx="{px:.1f}" cy="{py:.1f}" r="{size}"><title>{said}</title></circle>'
            )
    return _svg(parts, height)


def timeline(bars: Sequence[Bar], lanes: Sequence[str], *, clock: Callable[[float], str]) -> Markup:
    """One lane per name, time to the right; `clock` writes a moment as text."""
    if not bars:
        return Markup("")
    begin, end = min(one.begin for one in bars), max(one.end for one in bars)
    lane_height: float = 22 if len(lanes) <= 16 else 12
    height = TOP + lane_height * len(lanes) + BOTTOM
    longest = max(map(len, lanes))
    left = min(220, 14 + 7 * longest)
    place = _scale(begin, end, left, WIDTH - RIGHT)
    parts = []
    for number in range(6):
        moment = begin + (end - begin) * number / 5
        x = place(moment)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>')
        anchor = "tick end" if number == 5 else "tick middle" if number else "tick"
        parts.append(_text(x, height - BOTTOM + 18, clock(moment), anchor))
    rows = {name: TOP + lane_height * number for number, name in enumerate(lanes)}
    for name, y in rows.items():
        parts.append(
            _text(
                left - 6,
                y + lane_height * 0.72,
                shortened(name, 28),
                "tick end" + (" small" if lane_height < 20 else ""),
            )
        )
    drawn: defaultdict[str, str] = defaultdict(str)
    for one in bars:
        x, wide = place(one.begin), max(0.8, place(one.end) - place(one.begin))
        y, tall = rows[one.lane] + 1.5, lane_height - 3.0
        if len(bars) > MOST_TITLES:
            drawn[one.kind] += f"M{x:.1f} {y:.1f}h{wide:.1f}v{tall}h{-wide:.1f}z"
            continue
        parts.append(
            f'<rect class="k-{one.kind}" x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall}">'
            f"<title>{escape(one.title)}</title></rect>"
        )
    parts += [f'<path class="k-{kind}" d="{d}"/>' for kind, d in drawn.items()]
    return _svg(parts, height)


def heat(
    values: Mapping[tuple[str, str], float],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    shade: Callable[[str, float], float],
    text_of: Callable[[float], str],
) -> Markup:
    """A matrix of cells; `shade` maps a row and a value in it to -1 ... 1 (two colours through none), `text_of` a value
    to its text."""
    if not values:
        return Markup("")
    left = min(180, 14 + 7 * max(map(len, rows)))
    side = max(9.0, min(64.0, (WIDTH - left - RIGHT) / len(columns)))
    tall = max(9.0, min(28.0, side))
    longest = max(map(len, columns))
    upright = side < 7 * longest
    head = min(170.0, 12 + 7 * longest) if upright else 22.0
    height = head + tall * len(rows) + 6
    parts: list[str] = []
    drawn: defaultdict[tuple[str, int], str] = defaultdict(str)
    for number, name in enumerate(columns):
        x = left + side * (number + 0.5)
        if upright:
            parts.append(
                f'<text class="tick{" small" if side < 16 else ""}" transform="translate({x + 3:.1f} {head - 4:.1f}) '
                f'rotate(-90)">{escape(shortened(name))}</text>'
            )
        else:
            parts.append(_text(x, head - 6, name, "tick middle"))
    for place, row in enumerate(rows):
        y = head + tall * place
        parts.append(_text(left - 6, y + tall * 0.72, shortened(row), "tick end" + (" small" if tall < 14 else "")))
        for number, column in enumerate(columns):
            if (value := values.get((row, column))) is None:
                continue
            level = max(-1.0, min(1.0, shade(row, value)))
            x, sign = left + side * number, "high" if level > 0 else "low"
            if len(values) > MOST_TITLES:
                drawn[sign, round(abs(level) * 20)] += f"M{x:.1f} {y:.1f}h{side - 1:.1f}v{tall - 1:.1f}h{1 - side:.1f}z"
                continue
            said = escape(f"{row} / {column}: {text_of(value)}")
            parts.append(
                f'<rect class="cell {sign}" style="fill-opacity:{abs(level):.2f}" x="{x:.1f}" y="{y:.1f}" '
                f'width="{side - 1:.1f}" height="{tall - 1:.1f}"><title>{said}</title></rect>'
            )
            if side >= 40:
                style = "cell-text middle" + (" strong" if abs(level) >= STRONG else "")
                parts.append(_text(x + side / 2, y + tall * 0.68, text_of(value), style))
    parts += [f'<path class="cell {sign}" style="fill-opacity:{at / 20}" d="{d}"/>' for (sign, at), d in drawn.items()]
    return _svg(parts, height, width=left + side * len(columns) + RIGHT)


def shortened(name: str, most: int = LABEL) -> str:
    """A label of at most so many characters; its middle goes, for names of models differ at their ends."""
    return name if len(name) <= most else f"{name[: most - 11]}…{name[-10:]}"


def ticks(low: float, high: float) -> list[float]:
    """Some five round numbers from below `low` to above `high`."""
    if high - low < 1e-11:  # which `round` below cannot tell apart
        high = low + (abs(low) if abs(low) > 1e-9 else 1.0) * 0.1
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, 12) for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten around the values; powers alone where they are many."""
    lowest, highest = sys.float_info.min_10_exp, sys.float_info.max_10_exp
    powers = range(max(lowest, math.floor(math.log10(low))), min(highest, math.ceil(math.log10(high))) + 1)
    factors = (1, 2, 5) if len(powers) <= 4 else (1,)
    found = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in found if low / 2.5 <= value <= min(high * 2.5, sys.float_info.max)]


def whole_ticks(low: float, high: float) -> list[float]:
    """At most thirteen whole numbers: multiples of 1, 2 or 5 times a power of ten."""
    raw = max(1, math.ceil((high - low) / 12))
    power = 10 ** (len(str(raw)) - 1)
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    return [float(value) for value in range(math.ceil(low / step) * step, math.floor(high) + 1, step)]


def _scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    span = high - low
    return lambda value: (first + last) / 2 if span <= 0 else first + (value - low) / span * (last - first)


def _log(value: float, log: bool) -> float:
    return math.log10(value) if log else value


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < LONG else f"{value:.4g}"


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(parts: Sequence[str], height: float, width: float = WIDTH) -> Markup:
    least = width if width > WIDTH + 1 else min(width, 760)
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" style="min-width:{least:.0f}px;max-width:{width:.0f}px"'
    return Markup(f'<div class="chart"><svg {size} role="img">{"".join(parts)}</svg></div>')
