"""Make the file tree of CONTRIBUTING.md from the tracked files: `python -m tests.house.tree --write` inserts it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from tests.house.imports import parsed

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- tree -->\n```text\n", "```\n<!-- /tree -->"
FOLDERS = {
    "workflow": "what runs where: the one file a user edits, and what is rendered from it",
    "cwl": "what runs: main and one thin tool a step, by hand; round.cwl rendered",
    "facility": "Python package: everything that runs inside a facility, which installs only this",
    "coordinator": "Python package: everything that runs between facilities",
    "templates": "how a job is asked for: one file per site or scheduler",
    "examples": "trainers of your own, whole: plain PyTorch, Hugging Face's Trainer",
    "docs": "tutorials, how-to guides, reference, explanation; `make docs`",
    "tests": "laws, oracles, golden files; testbed/ (real sshd and Slurm), bench/ (JSON, side by side)",
    ".ci": "what the integration server calls",
}
OPENED = ("workflow", "cwl", "facility", "coordinator", "templates")


def tracked() -> list[str]:
    """Paths of the files that git tracks."""
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listing.stdout.splitlines()


def tree() -> str:
    """Top-level entries and what the opened folders hold, each with the first sentence of its documentation."""
    paths = tracked()
    lines = []
    for folder in FOLDERS:
        lines.append(f"{folder + '/':<26}{FOLDERS[folder]}")
        if folder in OPENED:
            children = sorted(
                {
                    path.split("/")[1] + ("/" if path.count("/") > 1 else "")
                    for path in paths
                    if path.startswith(folder + "/")
                }
            )
            lines += [
                f"  {child:<24}{_about(ROOT / folder / child)}".rstrip() for child in children if child != "__init__.py"
            ]
    lines += sorted(path for path in paths if "/" not in path)
    return "\n".join(lines) + "\n"


def _about(path: Path) -> str:
    if path.is_dir():
        path = path / "__init__.py"
    if path.suffix != ".py" or not path.exists():
        return ""
    text = (ast.get_docstring(parsed(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    sentence = text.split(". ")[0].rstrip(".")
    _, dash, rest = sentence.partition("`: ") if sentence.startswith("`") else ("", "", "")
    sentence = rest if dash else sentence
    return sentence if len(sentence) <= 110 else sentence[:107].rsplit(" ", 1)[0] + " ..."


def main() -> int:
    page = ROOT / "CONTRIBUTING.md"
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    text = before + BEGIN + tree() + END + after
    if "--write" in sys.argv:
        page.write_text(text)
        return 0
    return text != page.read_text()


if __name__ == "__main__":
    sys.exit(main())
