"""The README is true: its federation is the shipped one, its commands run; CONTRIBUTING's tree is the disk's."""

from __future__ import annotations

import re
import sys
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from tests.conftest import ROOT
from tests.distributed import help_of
from tests.house import tree
from tests.house.conftest import Demo
from tests.house.imports import together

README = (ROOT / "README.md").read_text()
SHELL = re.findall(r"```bash\n(.*?)```", README, re.S)


@together
def test_the_tree_is_what_the_disk_holds():
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout: what is tracked cannot be listed")
    assert tree.BEGIN + tree.tree() + tree.END in (ROOT / "CONTRIBUTING.md").read_text(), (
        "stale: run `python -m tests.house.tree --write`"
    )


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w.]*\d)")
"""A figure: not a part of a name, a version or another figure."""


def _rounds_to(stated: str, figure: Decimal) -> bool:
    """Whether a page's figure, rounded half up, is the one that the README states."""
    digits = stated.replace(",", "")
    zeros = len(digits) - len(digits.rstrip("0")) if "." not in digits else 0
    unit = Decimal(1).scaleb(zeros - len(digits.partition(".")[2]))
    return (figure / unit).quantize(Decimal(1), ROUND_HALF_UP) * unit == Decimal(digits)


def test_every_figure_measured_is_on_the_pages_of_results():
    pages = "".join((ROOT / "docs" / "explanation" / name).read_text() for name in ("results.md", "gpus.md"))
    known = {Decimal(one.replace(",", "")) for one in NUMBER.findall(pages)}
    rows = re.findall(r"^\|(?!---).*\|$", README.partition("## Measured")[2].partition("## Status")[0], re.M)
    cells = [cell for row in rows for cell in row.split("|")[2:-1]]
    stated = {one for cell in cells for one in NUMBER.findall(re.sub(r"\(docs/[^)]*\)", "", cell))}
    assert len(stated) > 30
    assert [one for one in sorted(stated) if not any(_rounds_to(one, figure) for figure in known)] == []


def test_the_federation_shown_is_the_shipped_one():
    shipped = (ROOT / "workflow" / "federation.yml").read_text()
    shown = [block for block in re.findall(r"```yaml\n(.*?)```", README, re.S) if block.startswith("name: demo")]
    assert len(shown) == 1 and shown[0] in shipped


def test_every_command_named_in_the_text_exists(tmp_path: Path):
    text = help_of("coordinator.cli", tmp_path)
    for name in set(re.findall(r"`crossfed (\w+)", README)):
        assert re.search(rf"│ {name}\s", text), f"crossfed {name}"
    for module in set(re.findall(r"python -m ((?:facility|coordinator)[.\w]+)", README)):
        assert "--help" in help_of(module, tmp_path), module


@pytest.mark.readme
@pytest.mark.timeout(900)
def test_the_commands_of_the_readme_run_as_written(demo: Demo):
    """`make test` is this suite and is not started again."""
    first, second = SHELL[0].splitlines(), SHELL[1]
    assert first == ["make demo", "make test"]
    rounds = read_federation(demo.clone / "workflow" / "federation.yml").rounds
    last = f".crossfed/demo/archive/round-{rounds - 1:04d}/model"
    assert last in README
    assert f"all {rounds} rounds are done" in demo.output and "the model is" in demo.output
    perplexities = [float(x) for x in re.findall(r"│\s+([\d.]+) │$", demo.output, re.M)]
    assert len(perplexities) == rounds and perplexities == sorted(perplexities, reverse=True), demo.output
    rows = [
        row for entry in Archive(demo.clone / ".crossfed" / "demo" / "archive").history() for row in entry.facilities
    ]
    for name in {row.facility for row in rows}:  # no facility gets worse from one round to the next
        told = [row.perplexity_received for row in rows if row.facility == name]
        received = [one for one in told if one is not None]
        assert len(received) >= rounds and received == sorted(received, reverse=True), (name, received)
    assert "COMPLETED workflow execution" in demo.run(second.replace(".venv/", f"{sys.prefix}/"))
    assert f"{rounds} of {rounds} rounds" in demo.run("python -m coordinator.cli status")
    load = (
        "import sys; from transformers import AutoModelForCausalLM as M; "
        "print(M.from_pretrained(sys.argv[1]).num_parameters())"
    )
    assert int(demo.run(f'python -c "{load}" {last}').split()[-1]) > 100_000
