"""A simulated iteration to look at: Chrome trace events, and an HTML page with plotly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.simulation.pipelines.result import Span
from facility.exchange.errors import InputError
from facility.exchange.files.durable import write_json, write_text

COLOURS = {
    "F": "#4c78a8",
    "B": "#f58518",
    "I": "#f58518",
    "W": "#ffbf79",
    "a": "#9ecae9",
    "g": "#d8b5a5",
    "s": "#54a24b",
    "u": "#b279a2",
}
MEANING = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, weights",
    "a": "activations",
    "g": "gradients",
    "s": "synchronising",
    "u": "optimizer step",
}


def _lanes(spans: Sequence[Span]) -> list[str]:
    def key(lane: str) -> tuple[object, ...]:
        words = lane.split()
        return (("device", "link", "stage").index(words[0]), [int(w) for w in words if w.isdigit()])

    return sorted({span.lane for span in spans}, key=key)


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """Trace events for chrome://tracing or ui.perfetto.dev (microseconds)."""
    number = {lane: n for n, lane in enumerate(_lanes(spans))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": n, "name": "thread_name", "args": {"name": lane}} for lane, n in number.items()
    ]
    events += [
        {"ph": "M", "pid": 0, "tid": n, "name": "thread_sort_index", "args": {"sort_index": n}} for n in number.values()
    ]
    for span in sorted(spans, key=lambda s: s.start):
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": number[span.lane],
                "name": span.name,
                "cat": MEANING[span.name[0]],
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {"chunk": span.chunk, "replica": span.replica},
            }
        )
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    write_json(path, chrome_trace(spans))


def write_html(path: Path, spans: Sequence[Span], title: str) -> None:
    """A page that needs no network: lanes of devices and links over time. Raises `InputError` without plotly."""
    try:
        import plotly.graph_objects as graph
    except ImportError:
        raise InputError("an HTML timeline needs plotly, which is not installed: pip install plotly") from None
    figure = graph.Figure()
    lanes = _lanes(spans)
    for letter, meaning in MEANING.items():
        chosen = [span for span in spans if span.name[0] == letter and span.end > span.start]
        if not chosen:
            continue
        figure.add_bar(
            name=meaning,
            orientation="h",
            y=[span.lane for span in chosen],
            base=[span.start for span in chosen],
            x=[span.end - span.start for span in chosen],
            marker={"color": COLOURS[letter], "line": {"color": "white", "width": 0.5}},
            text=[span.name for span in chosen],
            customdata=[[span.start, span.end, span.chunk, span.replica] for span in chosen],
            hovertemplate="%{text}: %{customdata[0]:.4g} to %{customdata[1]:.4g} s, chunk %{customdata[2]}, "
            "replica %{customdata[3]}<extra>" + meaning + "</extra>",
        )
    figure.update_layout(
        title=title,
        barmode="overlay",
        height=max(400, 22 * len(lanes) + 160),
        xaxis={"title": "seconds"},
        yaxis={"categoryorder": "array", "categoryarray": lanes[::-1], "automargin": True},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
        bargap=0.15,
    )
    write_text(path, figure.to_html(include_plotlyjs=True, full_html=True))
