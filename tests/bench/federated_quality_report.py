"""Table and plot of what `federated_quality.py` kept.

    python tests/bench/federated_quality_report.py --out /tmp/quality
    python tests/bench/federated_quality_report.py --results tests/bench/federated_quality.jsonl \\
        --svg docs/images/quality.svg

Prints a Markdown table per experiment and schedule (mean over seeds; perplexities over those of pooled training of the
same seed, as their geometric mean) and writes OUT/quality.html, the perplexity of the global model by round; with
`--svg` the curves of the main arms as the picture that the documentation shows.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.quality_arms import DEFAULT
from tests.bench.quality_plot import write_svg

CURVES = {
    "plain mean": ("mean",),
    "Nesterov": ("nesterov",),
    "Nesterov, shared second moments": (DEFAULT,),
    "the same, constant momentum": (f"{DEFAULT}, constant momentum",),
    "default (rule: auto)": (
        "fisher, momentum 0.8",
        "fisher, server rate 1.2",
        "fisher, server rate 1.4, constant momentum 0.7",
    ),
}
"""Arms of the plot by what it calls them: what `auto` takes depends on facilities and rounds."""
Rows = list[dict[str, Any]]


def read_rows(file: Path, names: set[str]) -> Rows:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row for row in rows if not names or row["name"] in names]


def total_steps(schedule: str) -> str:
    rounds, steps = map(int, schedule.split("x"))
    return f"{rounds * steps} steps"


def ratios(rows: Rows, baseline: str) -> dict[tuple[str, int, str, str], list[tuple[float, dict[str, float]]]]:
    """(experiment, width, schedule, arm) -> for every seed: geometric mean over pooled, and the perplexities."""
    pooled = {
        (r["key"]["experiment"], r["key"]["width"], r["key"]["schedule"], r["key"]["seed"]): r["geometric_mean"]
        for r in rows
        if r["name"] == baseline
    }
    found = defaultdict(list)
    for row in rows:
        key = row["key"]
        if key["arm"]["aggregation"] is None:
            continue
        against = pooled.get((key["experiment"], key["width"], total_steps(key["schedule"]), key["seed"]))
        if against is not None:
            place = (key["experiment"], key["width"], key["schedule"], row["name"])
            found[place].append((row["geometric_mean"] / against, row["perplexity"]))
    return found


def table(rows: Rows, baseline: str) -> str:
    lines: list[str] = []
    heading = None
    for (experiment, width, schedule, name), values in sorted(ratios(rows, baseline).items()):
        if (experiment, width, schedule) != heading:
            heading = (experiment, width, schedule)
            languages = " / ".join(values[0][1])
            lines += [
                "",
                f"{experiment}, width {width}, {schedule} (rounds x local steps)",
                "",
                f"| training | seeds | perplexity {languages} | over pooled | range |",
                "|---|---|---|---|---|",
            ]
            same = [
                r["perplexity"]
                for r in rows
                if r["name"] == baseline
                and r["key"]["experiment"] == experiment
                and r["key"]["width"] == width
                and r["key"]["schedule"] == total_steps(schedule)
            ]
            lines.append(f"| {baseline} | {len(same)} | {averages(same)} | 1.000 | |")
        over = [value for value, _ in values]
        lines.append(
            f"| {name} | {len(values)} | {averages([p for _, p in values])} | {statistics.mean(over):.3f} | "
            f"{min(over):.3f} to {max(over):.3f} |"
        )
    return "\n".join(lines)


def averages(perplexities: list[dict[str, float]]) -> str:
    return " / ".join(f"{math.exp(statistics.mean(math.log(p[n]) for p in perplexities)):.1f}" for n in perplexities[0])


def plot(rows: Rows, baseline: str, file: Path) -> None:
    """Geometric mean of the perplexities by steps taken, one panel per experiment and schedule, all seeds."""
    from plotly.subplots import make_subplots

    panels = sorted(
        {
            (r["key"]["experiment"], r["key"]["width"], r["key"]["schedule"])
            for r in rows
            if r["name"] != baseline and "x" in r["key"]["schedule"]
        }
    )
    figure = make_subplots(1, len(panels), subplot_titles=[f"{e}, width {w}, {s}" for e, w, s in panels])
    names = sorted({r["name"] for r in rows})
    colours = ["#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5"]
    shown: set[str] = set()
    for column, (experiment, width, schedule) in enumerate(panels, start=1):
        rounds, steps = map(int, schedule.split("x"))
        for row in rows:
            key = row["key"]
            here = key["experiment"] == experiment and key["width"] == width
            if not here or key["schedule"] not in (schedule, total_steps(schedule)):
                continue
            geometric = [math.exp(statistics.mean(map(math.log, p.values()))) for p in row["curve"]["perplexities"]]
            flat = row["name"] == baseline
            figure.add_scatter(
                x=[0, rounds * steps] if flat else [number * steps for number in row["curve"]["rounds"]],
                y=geometric * 2 if flat else geometric,
                name=row["name"],
                legendgroup=row["name"],
                showlegend=row["name"] not in shown,
                opacity=0.8,
                line={"color": colours[names.index(row["name"]) % len(colours)], "dash": "dash" if flat else "solid"},
                row=1,
                col=column,
            )
            shown.add(row["name"])
    figure.update_yaxes(type="log", title_text="perplexity (geometric mean)")
    figure.update_xaxes(title_text="local steps")
    figure.write_html(file, include_plotlyjs=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory given to federated_quality.py")
    parser.add_argument("--results", type=Path, help="file of its results (default: that of --out)")
    parser.add_argument("--svg", type=Path, help="write the curves of the main arms here")
    parser.add_argument("--pooled", default="pooled", help="name of the arm to compare with (default pooled)")
    parser.add_argument("--arms", nargs="*", default=[], help="names to show (default: all)")
    options = parser.parse_args()
    if options.out is None and options.results is None:
        parser.error("give --out or --results")
    file = options.results or options.out / "results.jsonl"
    rows = read_rows(file, {*options.arms, options.pooled} if options.arms else set())
    print(table(rows, options.pooled))
    if options.svg:
        write_svg(rows, CURVES, options.svg)
    if options.out is not None:
        plot(rows, options.pooled, options.out / "quality.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
