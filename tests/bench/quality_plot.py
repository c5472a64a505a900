"""The curves of `federated_quality.py` as a small SVG, with no library: a panel for each federation."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Panel = tuple[str, int, str]
"""Experiment, width, schedule."""
COLOURS = ("#4269d0", "#ff725c", "#3ca951", "#a463f2", "#9c6b4e", "#6cc5b0")
WIDTH, HEIGHT, LEFT, TOP, GAP = 250, 170, 44, 44, 62
TICKS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
SIZES = {64: "0.16 M", 128: "0.53 M", 384: "11 M"}


def curves(rows: Sequence[Row], names: Mapping[str, Sequence[str]]) -> dict[Panel, dict[str, list[tuple[int, float]]]]:
    """By panel and name of arms: steps taken, and perplexity over pooled training with the same seed (seeds: mean)."""
    named = {arm: name for name, arms in names.items() for arm in arms}
    pooled = {_place(row["key"]): row["geometric_mean"] for row in rows if row["name"] == "pooled"}
    found: dict[Panel, dict[str, dict[int, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for row in rows:
        key = row["key"]
        against = pooled.get(_place(key))
        if row["name"] not in named or "x" not in key["schedule"] or against is None:
            continue
        steps = int(key["schedule"].partition("x")[2])
        place = key["experiment"], key["width"], key["schedule"]
        for number, values in zip(row["curve"]["rounds"], row["curve"]["perplexities"], strict=True):
            mean = math.exp(statistics.mean(map(math.log, values.values())))
            found[place][named[row["name"]]][number * steps].append(mean / against)
    return {
        panel: {name: [(x, statistics.mean(y)) for x, y in sorted(of.items())] for name, of in arms.items()}
        for panel, arms in sorted(found.items(), key=lambda pair: (pair[0][1], pair[0][0], pair[0][2]))
        if len(arms) > 1
    }


def _place(key: Mapping[str, Any]) -> tuple[Any, ...]:
    rounds, _, steps = key["schedule"].partition("x")
    total = f"{int(rounds) * int(steps)} steps" if steps else key["schedule"]
    return key["experiment"], total, key["seed"], key["width"]


def write_svg(rows: Sequence[Row], names: Mapping[str, Sequence[str]], file: Path, *, columns: int = 3) -> None:
    """Write the panels, `columns` a line; the last point of a curve is over all validation text, the others over 96
    blocks of it."""
    panels = curves(rows, names)
    lines = -(-len(panels) // columns)
    size = (min(columns, max(1, len(panels))) * (WIDTH + GAP), TOP + lines * (HEIGHT + GAP))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{size[0]}" height="{size[1]}" fill="white"/>',
        *_legend([*names]),
    ]
    for number, (panel, arms) in enumerate(panels.items()):
        x, y = LEFT + number % columns * (WIDTH + GAP), TOP + 20 + number // columns * (HEIGHT + GAP)
        parts += _panel(panel, arms, [*names], x, y)
    file.write_text("\n".join([*parts, "</svg>", ""]))


def _legend(names: Sequence[str]) -> list[str]:
    found = []
    for number, (name, colour) in enumerate(zip([*names, "pooled"], [*COLOURS[: len(names)], "#555"], strict=True)):
        x, y = LEFT + number % 3 * (WIDTH + GAP), 14 + 18 * (number // 3)
        dash = ' stroke-dasharray="4"' if name == "pooled" else ""
        found.append(f'<path d="M{x} {y}h18" stroke="{colour}" stroke-width="2"{dash}/>')
        found.append(f'<text x="{x + 23}" y="{y + 4}">{escape(name)}</text>')
    return found


def _panel(
    panel: Panel, arms: Mapping[str, Sequence[tuple[int, float]]], names: Sequence[str], x: int, y: int
) -> list[str]:
    """Perplexity over pooled training's (logarithmic) by local steps."""
    experiment, width, schedule = panel
    points = [point for of in arms.values() for point in of]
    most = max(step for step, _ in points)
    low = min(0.9, *(value for _, value in points)) / 1.02
    high = max(1.6, *(value for _, value in points)) * 1.02

    def at(step: float, value: float) -> str:
        up = math.log(value / low) / math.log(high / low)
        return f"{x + WIDTH * step / most:.1f} {y + HEIGHT * (1 - up):.1f}"

    found = [
        f'<text x="{x}" y="{y - 6}" font-weight="bold">{experiment}, {schedule}, {SIZES.get(width, width)}</text>',
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#ccc"/>',
        f'<path d="M{at(0, 1)}L{at(most, 1)}" stroke="#555" stroke-dasharray="4"/>',
        f'<text x="{x + WIDTH}" y="{y + HEIGHT + 14}" text-anchor="end">{most} local steps</text>',
    ]
    for tick in TICKS:
        if low <= tick <= high:
            left, height = at(0, tick).split()
            found.append(f'<text x="{float(left) - 4}" y="{float(height) + 4}" text-anchor="end">{tick:g}</text>')
    for name, colour in zip(names, COLOURS, strict=False):
        if name in arms:
            path = "L".join(at(step, value) for step, value in arms[name])
            found.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            last = at(*arms[name][-1]).split()
            found.append(f'<circle cx="{last[0]}" cy="{last[1]}" r="2.5" fill="{colour}"/>')
    return found
