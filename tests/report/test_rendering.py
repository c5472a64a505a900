"""What stands in the report's page and Markdown is what was found: shades, digests, and text of facilities as text."""

from __future__ import annotations

import html
import re
from pathlib import Path

from markdown_it import MarkdownIt

from coordinator.report.data import gather
from coordinator.report.markdown import markdown, table
from coordinator.report.page import _matrix as matrix_of
from coordinator.report.page import page
from tests.report.made import made_archive


def test_the_matrix_is_shaded_within_each_row_where_rows_share_a_figure():
    """20 is the worst of one row and the best of the other."""
    values = {("a", "initial"): 20.0, ("a", "global"): 10.0, ("b", "initial"): 30.0, ("b", "global"): 20.0}
    cells = [{"data": row, "model": model, "perplexity": value} for (row, model), value in values.items()]
    drawn = matrix_of({"matrix": {"data": ["a", "b"], "models": ["initial", "global"], "cells": cells}})
    told = re.findall(r"fill-opacity:([0-9.]+)\".*?<title>(\w) / (\w+): ", drawn)
    expected = {("a", "initial"): "0.12", ("a", "global"): "0.90", ("b", "initial"): "0.12", ("b", "global"): "0.90"}
    assert {(row, model): shade for shade, row, model in told} == expected


def test_text_of_a_facility_is_no_markup_in_markdown():
    """`__main__` in a traceback was shown in bold type, without its underscores."""
    texts = ["No module named '__main__'", "_a_ ~~b~~ *c* a_b", "`d`", "<i>e</i> &lt; [f](g) ![h](i)", "j|k\\\\", "# l"]
    rendered = (
        MarkdownIt("commonmark")
        .enable(["table", "strikethrough"])
        .render("\n".join(table(["h"] * len(texts), [texts])))
    )
    assert [html.unescape(one) for one in re.findall("<td>(.*)</td>", rendered)] == texts


def test_digests_in_markdown_are_as_they_are(tmp_path: Path):
    """Code marks around them were escaped, and shown."""
    data = gather(made_archive(tmp_path / "a", facilities=2, rounds=1), federation="made", settings={})
    assert f"| global model after round 0 | {0:064x} |" in markdown(data)


def test_on_paper_nothing_is_cut_off(tmp_path: Path):
    """What scrolls on a screen ended at the paper's edge: the right of charts and the last columns of tables."""
    data = gather(made_archive(tmp_path / "a", facilities=2, rounds=1), federation="made", settings={})
    rules = page(data).split("@media print {")[1].split("</style>")[0]
    assert ".scroll, .chart { overflow: visible" in rules and "min-width: 0 !important" in rules


def test_a_facility_called_mean_keeps_its_cosines_apart_from_those_to_the_mean(tmp_path: Path):
    archive = made_archive(tmp_path / "a", facilities=3, rounds=2)
    for file in archive.path.rglob("*.json*"):
        file.write_text(file.read_text().replace("facility-01", "mean"))
    data = gather(archive, federation="made", settings={"rounds": 2})
    (one, other) = data["similarity"][-1]["participants"]
    assert other["facility"] == "mean" and one["cosine_to_mean"] != one["cosines"]["mean"]
    told = page(data)
    for column, value in (("the mean", one["cosine_to_mean"]), ("mean", one["cosines"]["mean"])):
        assert told.count(f"<title>{one['facility']} / {column}: {value:.2f}</title>") == 1
