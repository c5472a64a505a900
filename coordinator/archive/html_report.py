"""The federation as one HTML page that opens anywhere, without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as graph
import plotly.io
from markupsafe import Markup

from coordinator.archive.summary import number, remarks, shown
from facility.exchange.files.durable import write_text

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ data.federation }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; color: #1c2330 }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #d8dde6 }
th:nth-child(2), td:nth-child(2), th:nth-child(3), td:nth-child(3) { text-align: left }
.bad { color: #b3261e } .figures { display: flex; gap: 2rem }
.figures b { display: block; font-size: 1.6rem }
</style></head><body>
<h1>Federation {{ data.federation }}</h1>
{% if data.stopped %}<p class="bad">Stopped: {{ data.stopped | shown }}</p>{% endif %}
<div class="figures">
<div><b>{{ data.rounds | length }}</b>complete rounds</div>
<div><b>{{ "{:,}".format(tokens) }}</b>tokens trained on</div>
{% if first and last %}<div><b>{{ "%.2f" | format(first) }} &rarr; {{ "%.2f" | format(last)
}}</b>perplexity of the global model</div>{% endif %}
</div>
{{ perplexities }}
{{ seconds }}
<h2>Rounds</h2>
<table><tr><th>round</th><th>facility</th><th>status</th><th>tokens</th><th>seconds</th><th>tokens/s</th>
<th>weight</th><th>perplexity received</th><th>returned</th></tr>
{% for entry in data.rounds %}{% for row in entry.facilities %}<tr><td>{{ entry.round }}</td><td>{{ row.facility }}</td>
<td{% if row.status != "ok" %} class="bad"{% endif %}>{{ row.status
}}{% if row.reason %}: {{ row.reason | shown }}{% endif %}</td>
<td>{{ "{:,}".format(row.tokens) }}</td><td>{{ "%.1f" | format(row.seconds) }}</td>
<td>{{ "%.0f" | format(row.tokens_per_second) }}</td><td>{{ "%.3f" | format(row.weight) }}</td>
<td>{{ number(row.perplexity_received) }}</td><td>{{ number(row.perplexity_returned) }}</td></tr>
{%- endfor %}{% endfor %}
</table>
{% for line in remarks %}<p>{{ line }}</p>
{% endfor %}<p>Model: <code>{{ data.model }}</code>. Perplexities are of each facility's own validation split; the
global one is their geometric mean, and where facilities joined or were missing, goes on by the mean change of those
that reported before and after
{%- if data.rounds %}; the last one is over \
{{ data.rounds[-1].global_perplexity_over | join(", ") or "nobody yet" }}{% endif %}.</p>
</body></html>
"""


def write_page(data: dict[str, Any], path: Path) -> Path:
    """Write the page for `coordinator.archive.summary.summary`'s data plus `federation`; returns `path`."""
    known = [data["initial_perplexity"], *(entry["global_perplexity"] for entry in data["rounds"])]
    told = [value for value in known if value is not None]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["shown"] = shown
    text = environment.from_string(PAGE).render(
        data=data,
        remarks=remarks(data),
        tokens=sum(row["tokens"] for entry in data["rounds"] for row in entry["facilities"]),
        first=told[0] if told else None,
        last=told[-1] if told else None,
        number=number,
        perplexities=_markup(_perplexities(data, known), plotly_script=True),
        seconds=_markup(_seconds(data), plotly_script=False),
    )
    write_text(path, text)
    return path


def _markup(figure: graph.Figure, *, plotly_script: bool) -> Any:
    figure.update_layout(template="plotly_white", height=380, margin={"l": 60, "r": 20, "t": 50, "b": 50})
    return Markup(plotly.io.to_html(figure, include_plotlyjs=plotly_script, full_html=False))


def _perplexities(data: dict[str, Any], known: list[float | None]) -> graph.Figure:
    """What each facility received and returned, and the global model after each round."""
    figure = graph.Figure(
        layout={
            "title": "Perplexity after each round",
            "xaxis": {"title": "rounds completed", "dtick": 1},
            "yaxis": {"type": "log"},
        }
    )
    figure.add_scatter(x=list(range(len(known))), y=known, name="global model", line={"width": 4, "color": "#1c2330"})
    for name in _names(data):
        rows = [
            (entry["round"], row) for entry in data["rounds"] for row in entry["facilities"] if row["facility"] == name
        ]
        received = [(number, row["perplexity_received"]) for number, row in rows]
        received += [
            (len(data["rounds"]), row["perplexity_received"])
            for row in data["final_evaluation"]
            if row["facility"] == name
        ]
        figure.add_scatter(x=[x for x, _ in received], y=[y for _, y in received], name=f"{name}: global model there")
        figure.add_scatter(
            x=[number + 1 for number, _ in rows],
            y=[row["perplexity_returned"] for _, row in rows],
            name=f"{name}: its own update",
            mode="markers",
        )
    return figure


def _seconds(data: dict[str, Any]) -> graph.Figure:
    figure = graph.Figure(
        layout={"title": "Seconds at each facility", "xaxis": {"title": "round", "dtick": 1}, "barmode": "group"}
    )
    for name in _names(data):
        rows = [
            (entry["round"], row["seconds"])
            for entry in data["rounds"]
            for row in entry["facilities"]
            if row["facility"] == name
        ]
        figure.add_bar(x=[x for x, _ in rows], y=[y for _, y in rows], name=name)
    return figure


def _names(data: dict[str, Any]) -> list[str]:
    return sorted({row["facility"] for entry in data["rounds"] for row in entry["facilities"]})
