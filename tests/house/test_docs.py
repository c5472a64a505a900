"""The documentation is true: its commands run, its links lead somewhere, what it names exists."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config.federation import read_federation
from facility.exchange.scheduling.policies import POLICIES
from tests.conftest import ROOT
from tests.distributed import help_of
from tests.house.conftest import Demo, shell

DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "generated" not in path.parts)
EXECUTED = re.compile(r"<!-- executed -->\n```bash\n(.*?)```", re.S)
BASE = {"name": "demo", "model": "../model", "rounds": 30}
FACILITY: dict[str, Any] = {
    "dataset": "/data",
    "deployment": {
        "type": "slurm",
        "host": "h",
        "user": "u",
        "workdir": "/w",
        "template": "slurm",
        "fill": {"account": "a", "partition": "p"},
    },
}
BLOCK = re.compile(r"^( *)```(\w*)\n", re.M)


def test_every_block_of_commands_is_executed_or_says_what_it_needs():
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            before = text[: match.start()].rstrip().rsplit("\n", 1)[-1]
            if match[2] == "bash":
                assert before == "<!-- executed -->", f"{page}: a bash block that no test executes"
            if match[2] == "console":
                assert re.fullmatch(r"<!-- needs: .+ -->", before), f"{page}: a console block without `needs`"


def test_commands_and_options_named_in_the_pages_exist(tmp_path: Path):
    helps: dict[str, str] = {}

    def known(command: tuple[str, ...]) -> str:
        key = " ".join(command)
        if key not in helps and command[0] == "coordinator.cli":
            shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command[1:], "--help"])
            assert shown.exit_code == 0, f"{key}: {shown.output}"
            helps[key] = shown.output
        elif key not in helps:
            helps[key] = help_of(command[0], tmp_path, *command[1:])
        return helps[key]

    for page in PAGES:
        text = page.read_text()
        for line in re.findall(r"^(?:crossfed|python -m) .*$", text, re.M):
            if line.startswith("python -m facility.launch "):  # it starts ranks of another command
                options, separator, rank = line.partition(" -- ")
                assert separator and rank.startswith("-m "), f"{page}: {line}: expected -- -m MODULE"
                line = f"python {rank}"
                assert set(re.findall(r"--[a-z-]+", options)) <= set(known(("facility.launch",)).split()), page
            words = line.split()
            if words[0] == "crossfed":
                nested = words[2:3] if words[1] == "testbed" else []
                command = ("coordinator.cli", words[1], *nested)
            else:
                command = (words[2],)
            shown = known(command)
            for option in re.findall(r"(?<=\s)--[a-z-]+", line.split("&&")[0].split(" -- ")[0]):
                assert option in shown, f"{page}: {line}: no option {option}"


FRAGMENT = re.compile(r"^( *)```yaml\n(.*?)^ *```", re.S | re.M)
OTHER_FILES = {"epsilon", "encodings", "task"}
"""First keys of the fragments of a gate's policy and of a task of lm-eval."""
OTHER_PAGES = {"write-a-rule.md", "streamflow-output-path-traversal.md"}
"""Whose fragments name code of the reader's own (`tests/aggregation/test_own_rules.py` runs it), or are CWL."""


def fragments() -> list[tuple[str, str]]:
    """Page and line, and text, of each fragment of federation.yml; a facility's `deployment:` alone is put into one."""
    found = []
    for page in (one for one in PAGES if one.name not in OTHER_PAGES):
        text = page.read_text()
        for match in FRAGMENT.finditer(text):
            body = textwrap.dedent(match[2])
            if body.split(":")[0] not in OTHER_FILES:
                found.append((f"{page.relative_to(DOCS)}:{text[: match.start()].count(chr(10)) + 1}", body))
    return found


@pytest.mark.parametrize("fragment", [pytest.param(body, id=place) for place, body in fragments()])
def test_every_fragment_of_a_federation_loads(fragment: str, tmp_path: Path):
    """As it is written, with what it leaves out: `facilities:` behind a queue, a model, rounds."""
    if fragment.startswith("deployment:"):
        fragment = "facilities:\n- name: leonardo\n" + textwrap.indent(fragment, "  ")
    given = yaml.safe_load(fragment)
    missing = [f"{key}: {value}" for key, value in BASE.items() if key not in given]
    if "facilities" not in given:
        names = ("leonardo", "site-b", "site-c")
        missing.append(f"facilities: {json.dumps([{'name': name, **FACILITY} for name in names])}")
    else:
        for one in given["facilities"]:
            one.setdefault("dataset", FACILITY["dataset"])
            if "type" not in one.get("deployment", {}):
                one["deployment"] = FACILITY["deployment"] | one.get("deployment", {})
        fragment = yaml.safe_dump(given)
    file = tmp_path / "workflow" / "federation.yml"
    file.parent.mkdir()
    file.write_text("\n".join([fragment, *missing]))
    assert read_federation(file).facilities


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and Sphinx make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_links_to_a_heading_name_one_that_the_page_has():
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text()):
            aim = (page.parent / target).resolve() if target else page
            if aim.suffix == ".md":
                assert anchor in anchors(aim), f"{page}: {target}#{anchor}"


def test_every_policy_is_in_the_table_of_its_page():
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "explanation" / "synchronisation.md").read_text(), re.M)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(POLICIES.built_in)


def test_every_page_is_in_the_table_of_contents():
    index = (DOCS / "index.md").read_text()
    for page in PAGES:
        name = str(page.relative_to(DOCS).with_suffix(""))
        assert name == "index" or re.search(rf"^{re.escape(name)}$", index, re.M), name


@pytest.mark.readme
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if EXECUTED.search(page.read_text())], ids=lambda p: p.stem)
def test_the_commands_of_a_page_run_as_written(page: Path, tmp_path: Path, request: pytest.FixtureRequest):
    """All blocks of a page, one after the other, in an empty folder; the demo's where it has run, as the page says that
    nothing is left to do then."""
    script = "\n".join(EXECUTED.findall(page.read_text()))
    if "make demo" in script:
        demo: Demo = request.getfixturevalue("demo")
        assert "all 5 are done" in demo.run(script.replace(".venv/bin/", f"{sys.prefix}/bin/"))
    else:
        folder = tmp_path / "folder"
        folder.mkdir()
        shell(script, folder, {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)})
