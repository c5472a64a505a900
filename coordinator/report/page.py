"""The report as one self-contained HTML file: no script, no network, light and dark, readable on a phone."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from coordinator.archive.privacy import nothing_promised
from coordinator.archive.table import any_late, format_accuracies, has_accuracy, plain_number, seconds_of, status_of
from coordinator.durations import format_duration
from coordinator.report.charts import COLOURS, LONG, Bar, Series, heat, line_chart, timeline
from coordinator.report.many import MANY, for_display, lanes_of, least_alike
from coordinator.report.timeline import KINDS
from coordinator.shown_text import safe_line
from facility.exchange.sizes import format_bytes
from facility.exchange.task_words import TaskWords, capitalise, words_of

FEW = 8
"""Facilities that get a colour of their own in the legend."""
MOST_ROWS = 1000
"""Rows of the table of rounds, and updates in that of artefacts; with more, the last ones are listed."""
THE_MEAN = "the mean"
"""A column beside those of facilities, none of whose names holds a blank."""
MOST_POINTS = 8000
"""Of the chart of training losses."""
MOST_BARS = 6000
"""Spans drawn in the timeline; with more, those shorter than a pixel are left out."""


def page(data: Mapping[str, Any]) -> str:
    """HTML of `coordinator.report.data.gather`'s data."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["shown"] = safe_line
    similar = _last_with_cosines(data)
    whole, data = data, for_display(data)
    text = (files("coordinator.report") / "page.html.jinja").read_text(encoding="utf-8").replace("\\\n", "")
    return environment.from_string(text).render(
        data=data,
        whole=whole,
        lanes=len(lanes_of(data["facilities"], whole["timeline"]["totals"])),
        shown_updates=len(least_alike(similar.get("participants", []))),
        figures=figures(data),
        curves=_curves(data),
        training=_training(data),
        legend=_legend(data),
        matrix=_matrix(data),
        cells=lambda row: cells(data, row),
        normal_interval=normal_interval,
        timeline=_timeline(whole),
        kinds=KINDS,
        used=used_kinds(data),
        rounds=last_rounds(data),
        artefacts=last_artefacts(data),
        similarity=_cosines(similar),
        similar=similar,
        outliers=outliers(data),
        settings=json.dumps(data["settings"], indent=2, ensure_ascii=False),
        late=any_late(data),
        status_of=status_of,
        words=words_of(data.get("task", "")),
        accuracies=format_accuracies if has_accuracy(data) else None,
        capital=capitalise,
        seconds_of=seconds_of,
        speed=speed,
        nats_number=nats_number,
        waiting=any_waited(data),
        span=format_duration,
        size=format_bytes,
        nothing_promised=nothing_promised,
        number=number,
    )


def figures(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The headline: value and label."""
    head, words = data["headline"], words_of(data.get("task", ""))
    found = [(f"{words.count(head):,}", f"{words.unit} trained on")]
    if head["perplexity_first"] is not None:
        ends = [words.figure(head[key]) for key in ("perplexity_first", "perplexity_last")]
        change = " → ".join(f"{one:.4g}" for one in ends if one is not None)
        found.insert(0, (change, f"{words.metric} of the global model"))
    found.append((format_duration(head["wall_seconds"]), "from the first job to the last result"))
    for key, label in (
        ("node_hours", "node-hours"),
        ("waited_node_hours", "node-hours of these in jobs that waited for a model"),
        ("gpu_hours", "GPU-hours"),
        ("kwh", "kWh"),
    ):
        if head.get(key) is not None:
            over = len(head["energy_over"])
            part = f" ({over} of {head['facilities']} facilities)" if key == "kwh" and over < head["facilities"] else ""
            found.append((number(head[key]), label + part))
    if head["co2e_kg"] is not None:
        found.append((f"{number(head['co2e_kg'])} kg", "CO₂e, by the factor in federation.yml"))
    found.append((format_bytes(head["bytes"]), "moved both ways"))
    found.append((str(head["failures"]), "failures and delays recorded"))
    if head["lost_seconds"]:
        found.append((format_duration(head["lost_seconds"]), "of job time lost"))
    return found


def any_waited(data: Mapping[str, Any]) -> bool:
    """Whether some job waited for its model."""
    return any(one.get("waited_node_hours") is not None for one in data["cost"]["facilities"].values())


def _style(place: int, count: int) -> str:
    return f"c{place % COLOURS}" + (" many" if count > FEW else "")


def _legend(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    names = data["facilities"]
    first = [("global", "global model")] if data["curves"]["global"] else []
    if len(names) > FEW:
        return [*first, ("c0", f"{len(names)} facilities: rest the pointer on a line for its name")]
    return [*first, *((f"c{place % COLOURS}", name) for place, name in enumerate(names))]


def _curves(data: Mapping[str, Any]) -> Markup:
    curves, names, words = data["curves"], data["facilities"], words_of(data.get("task", ""))
    series = []
    for place, name in enumerate(names):
        own, style = curves["facilities"].get(name, {}), _style(place, len(names))
        received, returned = (points_of(words, own.get(kind, [])) for kind in ("received", "returned"))
        series.append(Series(name=f"{name}: as received", points=received, style=style))
        line = not received
        series.append(Series(name=f"{name}: own update", points=returned, style=f"{style} dashed", line=line))
    series.append(Series(name="global model", points=points_of(words, curves["global"]), style="global"))
    unit = "rounds completed" if data["mode"] == "rounds" else "rounds of the facility"
    return line_chart([one for one in series if one.points], x_label=unit, y_label=words.metric)


def points_of(words: TaskWords, pairs: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Points of a chart of what is shown of perplexities."""
    return [(pair[0], value) for pair in pairs if (value := words.figure(pair[1])) is not None]


def _training(data: Mapping[str, Any]) -> Markup:
    """Training loss by step, thinned out to `MOST_POINTS` points of all facilities together."""
    losses, names = data["training_losses"], data["facilities"]
    every = -(-sum(map(len, losses.values())) // MOST_POINTS)
    series = [
        Series(
            name=f"{name}: training loss",
            points=[tuple(pair) for pair in losses[name][:: max(1, every)]],
            style=_style(place, len(names)),
            marks=False,
        )
        for place, name in enumerate(names)
        if name in losses
    ]
    return line_chart(
        series, x_label="optimizer steps of the facility", y_label=words_of(data.get("task", "")).nats, height=260
    )


def _matrix(data: Mapping[str, Any]) -> Markup:
    """Shaded within each row: the best model darkest."""
    matrix = data["matrix"]
    if not matrix.get("cells"):
        return Markup("")
    words = words_of(data.get("task", ""))
    values = {(one["data"], one["model"]): words.figure(float(one["perplexity"])) or 0.0 for one in matrix["cells"]}
    ends = {}
    for row in matrix["data"]:
        own = [value for (name, _), value in values.items() if name == row]
        ends[row] = min(own), max(own)

    def shade(row: str, value: float) -> float:
        low, high = ends[row]
        return 0.12 + 0.78 * (high - value) / ((high - low) or 1.0)

    return heat(
        values,
        matrix["data"],
        matrix["models"],
        shade=shade,
        text_of=lambda value: f"{value:.0f}" if 1000 <= value < 10_000 else f"{value:.3g}",
    )


def cell(data: Mapping[str, Any], row: str, model: str) -> str:
    """What is shown of a loss, with its bootstrap interval."""
    words = words_of(data.get("task", ""))
    for one in data["matrix"].get("cells", []):
        if (one["data"], one["model"]) == (row, model):
            interval = one.get("interval")
            bounds = f" [{nats_number(words, interval[0])}, {nats_number(words, interval[1])}]" if interval else ""
            return nats_number(words, one["perplexity"]) + bounds
    return ""


def cells(data: Mapping[str, Any], row: str) -> list[tuple[str, str, str, str]]:
    """Rows for one data set: model, perplexity or loss, interval, and how its loss differs from the global model's.

    Among many facilities: the facility's own models, and the best of the others.
    """
    words = words_of(data.get("task", ""))
    found = {one["model"]: one for one in data["matrix"]["cells"] if one["data"] == row}
    shown_models = [model for model in data["matrix"]["models"] if model in found]
    if len(data["facilities"]) > FEW:
        own = next(iter(found.values())).get("facility", row)
        at_home = ("initial", "global", f"{own}'s update", f"{own} alone", "own update", "own alone", "final")
        others = sorted((one["perplexity"], model) for model, one in found.items() if model not in at_home)
        shown_models = [model for model in shown_models if model in (*at_home, *(name for _, name in others[:1]))]
    return [
        (
            model,
            nats_number(words, found[model]["perplexity"]),
            _ends(words, found[model].get("interval")),
            _difference((found[model].get("loss_less") or {}).get("global")),
        )
        for model in shown_models
    ]


def _ends(words: TaskWords, interval: Sequence[float] | None) -> str:
    return f"{nats_number(words, interval[0])} to {nats_number(words, interval[1])}" if interval else ""


def _difference(less: Sequence[float] | None) -> str:
    """Better is positive here: nats less."""
    return f"{-less[0]:+.4f} [{-less[2]:+.4f}, {-less[1]:+.4f}]" if less else ""


def normal_interval(score: Mapping[str, Any]) -> str:
    """95 % interval of a task's score by the normal distribution; '' where it has no standard error."""
    error = score.get("stderr")
    return f"{score['value'] - 1.96 * error:.3f} to {score['value'] + 1.96 * error:.3f}" if error is not None else ""


def used_kinds(data: Mapping[str, Any]) -> list[str]:
    found = {one["kind"] for one in data["timeline"]["segments"]}
    return [kind for kind in KINDS if kind in found]


def _timeline(data: Mapping[str, Any]) -> Markup:
    shown_lanes = lanes_of(data["facilities"], data["timeline"]["totals"])
    here = set(shown_lanes)
    segments = [one for one in data["timeline"]["segments"] if one["facility"] in here]
    if not segments:
        return Markup("")
    begin, end = min(one["begin"] for one in segments), max(one["end"] for one in segments)
    shortest = (end - begin) / 2000 if len(segments) > MOST_BARS else 0.0
    drawn = sorted((one for one in segments if one["end"] - one["begin"] >= shortest), key=lambda one: -_length(one))
    bars = [
        Bar(
            lane=one["facility"],
            kind=one["kind"],
            begin=one["begin"],
            end=one["end"],
            title=f"{one['facility']}: {one['kind']}, {format_duration(_length(one))}"
            + (f", round {one['round']}" if one["round"] is not None else ""),
        )
        for one in drawn[:MOST_BARS]
    ]
    days = end - begin > 86400

    def clock(moment: float) -> str:
        return time.strftime("%d %b %H:%M" if days else "%H:%M:%S", time.gmtime(moment))

    drawn_lanes = {one.lane for one in bars}
    lanes = [name for name in shown_lanes if name in drawn_lanes]
    return timeline(bars, lanes, clock=clock)


def last_rounds(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """As many as the page has room for, one at least."""
    most = max(1, MOST_ROWS // max(1, min(MANY, len(data["facilities"]))))
    return list(data["rounds"][-most:])


def last_artefacts(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Every model, and as many updates as the page has room for."""
    updates = [one for one in data["artefacts"] if one["name"].startswith("update of ")]
    left_out = {id(one) for one in updates[: max(0, len(updates) - MOST_ROWS)]}
    return [one for one in data["artefacts"] if id(one) not in left_out]


def _length(segment: Mapping[str, Any]) -> float:
    return segment["end"] - segment["begin"]


def _last_with_cosines(data: Mapping[str, Any]) -> dict[str, Any]:
    with_cosines = [one for one in data["similarity"] if any(part["cosines"] for part in one["participants"])]
    return with_cosines[-1] if with_cosines else {}


def _cosines(similar: Mapping[str, Any]) -> Markup:
    parts = least_alike(similar.get("participants", []))
    names = [one["facility"] for one in parts]
    shown_names = set(names)
    values = {
        (one["facility"], other): value
        for one in parts
        for other, value in (one["cosines"] or {}).items()
        if other in shown_names
    }
    to_mean = {one["facility"]: one["cosine_to_mean"] for one in parts if one["cosine_to_mean"] is not None}
    values |= {(name, THE_MEAN): value for name, value in to_mean.items()}
    columns = [*names, THE_MEAN] if to_mean else names
    return heat(values, names, columns, shade=lambda _, value: value, text_of=lambda value: f"{value:.2f}")


def outliers(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What aggregation did about updates that differ from the others, by round and facility."""
    done = {
        "quarantined": "left out of the round",
        "suspects": "reported, and took part",
        "dropped": "refused; the mean was made without it",
    }
    return [
        {"round": one["round"], "facility": name, "done": words, "reason": reason}
        for one in data["similarity"]
        for key, words in done.items()
        for name, reason in one[key].items()
    ]


def number(value: float | None) -> str:
    """At most three decimals, one from 100 on; '' for what is not known."""
    if value is None:
        return ""
    if value == 0:
        return "0"
    if 0 < abs(value) < 0.1:
        return f"{value:.3g}"
    if abs(value) >= LONG:
        return f"{value:.3g}"
    return plain_number(value) if value < 100 else f"{value:,.1f}" if value < 1e4 else f"{value:,.0f}"


def nats_number(words: TaskWords, perplexity: float | None) -> str:
    """What is shown in place of the perplexity `perplexity`: the loss with four decimals."""
    if words.exponential or perplexity is None:
        return number(perplexity)
    return words.text(perplexity)


def speed(words: TaskWords, row: Mapping[str, Any]) -> str:
    """Per second, in three digits or more; '' where it is not known."""
    value = words.speed(row)
    return (f"{value:.3g}" if value < 100 else f"{value:,.0f}") if value else ""
