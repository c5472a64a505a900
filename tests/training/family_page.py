"""docs/reference/families.md, from what was found of each family."""

from __future__ import annotations

from typing import Any

TITLES = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "classes": "Sequence classification",
    "images": "Image classification",
}
COLUMNS = {
    "one": "whole",
    "lora": "LoRA",
    "sharded": "whole, 2 shards",
    "pipeline": "whole, 2 stages",
    "sharded-lora": "LoRA, 2 shards",
    "pipeline-lora": "LoRA, 2 stages",
}
KINDS = {"one": False, "lora": True}
"""Column of one process -> whether with adapters."""
WORDS = {"works": "yes", "refused": "no", "wrong": "WRONG"}
Row = dict[str, Any]
INTRODUCTION = """\
# Families of models

Every family of text models and image classifiers of transformers {version} that could be made tiny was trained for
one step, as a facility trains it: whole and with LoRA's defaults, by one process and, where that works, on two ranks
that share it by FSDP2 and in a pipeline of two stages. "yes": the weights of one process are those of a plain step of
transformers' own model (with adapters: of peft's) up to 2e-5, in a step of 1e-2, and the layouts' are those of the
one process. "no": refused before anything is trained, with the sentence in the last column. These were tiny models in
float32 on a CPU: the table says nothing of speed, of half precision, or of what a long training learns.

Image classifiers with batch norms differ in two points. Their norms over few numbers amplify rounding: "yes" of one
process allows twice what float32 differs from float64 in the plain step. On two shards each rank normalises by its
own images, so that no weights are compared.

Beside the rows, every family of text models is cut into two stages within one process: each has the logits and
gradients of the whole model, or is refused before it is cut (`tests/training/test_stages.py`).

Written by `python -m tests.training.family_table --write`."""


def page(rows: list[Row]) -> str:
    import transformers

    lines = INTRODUCTION.format(version=transformers.__version__).splitlines()
    for task, title in TITLES.items():
        own = sorted((row for row in rows if row["task"] == task), key=lambda row: row["family"])
        lines += ["", f"## {title}", "", counts(own), ""]
        lines += ["| family | " + " | ".join(COLUMNS.values()) + " | why not |", "|---" * (len(COLUMNS) + 2) + "|"]
        lines += [table_line(row) for row in own if row["one"][0] != "needs"]
        if needs := [row for row in own if row["one"][0] == "needs"]:
            lines += ["", "Not tried: the rules that make configurations small made none that runs."]
            lines += ["", *(f"- `{row['family']}`: {plain(row['one'][1])}" for row in needs)]
    return "\n".join(lines) + "\n"


def lines_of(text: str, task: str) -> dict[str, str]:
    """Family -> its line of the task's own table in `text`, a page; families stand in several tables."""
    own = text.split(f"## {TITLES[task]}\n")[1].split("\n## ")[0]
    return {line.split("|")[1].strip(" `"): line for line in own.splitlines() if line.startswith("| `")}


def untried_of(text: str, task: str) -> set[str]:
    """Families that the page lists below the task's table, as not tried."""
    own = text.split(f"## {TITLES[task]}\n")[1].split("\n## ")[0]
    return {line.split("`")[1] for line in own.splitlines() if line.startswith("- `")}


def counts(rows: list[Row]) -> str:
    words = [row["one"][0] for row in rows]
    told = f"{len(rows)} families: {words.count('works')} work, {words.count('refused')} are refused"
    wrong = f", {words.count('wrong')} WRONG" if "wrong" in words else ""
    return f"{told}{wrong}, {words.count('needs')} could not be made tiny."


def table_line(row: Row) -> str:
    cells = [WORDS[row[name][0]] if name in row else "" for name in COLUMNS]
    reasons: dict[str, list[str]] = {}
    for name, title in COLUMNS.items():
        if name in row and row[name][1]:
            reasons.setdefault(plain(row[name][1]), []).append(title)
    why = "; ".join(f"{', '.join(titles)}: {reason}" for reason, titles in reasons.items())
    return f"| `{row['family']}` | " + " | ".join(cells) + f" | {why} |"


def plain(reason: str) -> str:
    """A reason as a table's cell: one line, without paths of the machine that tried."""
    words = [word if not word.startswith("/") else "MODEL" for word in reason.split()]
    return " ".join(words).replace("|", "\\|").replace("<", "&lt;")[:300]
