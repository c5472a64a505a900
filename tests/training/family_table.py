"""Every family of text models and image classifiers that the pinned transformers knows, tried, and a table of them.

    python -m tests.training.family_table            try what build/families.jsonl does not hold of this code
    python -m tests.training.family_table --write    and write docs/reference/families.md

A family is made tiny from its configuration class alone (`tests.training.shrink`), trained for one step as users train
it, whole and with adapters, by one process, and compared to a plain step of transformers' or peft's own model; a sample
also on two ranks, sharded and as a pipeline, compared to the one process.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from tests.distributed import StayingRanks
from tests.training.family_page import COLUMNS, KINDS, TITLES, Row, page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "families.md"
SAMPLE = {
    "causal": (
        *("llama", "gpt2", "gpt_neox", "bloom", "falcon", "opt", "gemma2", "phi3", "mixtral", "qwen3_moe", "gpt_oss"),
        *("deepseek_v3", "mamba", "falcon_h1", "bart", "bert", "ctrl", "olmo"),
    ),
    "masked": ("bert", "deberta-v2", "modernbert", "roberta"),
    "classes": ("llama", "qwen3", "bert", "distilbert", "modernbert"),
    "images": ("vit", "resnet", "swin"),
}
"""Unlike families, and those that a pipeline once trained wrongly: also tried on two ranks, unless all are."""
SECONDS = 120
"""Limit of one family in one process."""
SILENT = f"no answer in {SECONDS} s"


def material(place: Path) -> dict[str, Path]:
    """A dataset for each task; `ended`: of rows that end in an end-of-text token."""
    from tests.training.federation import write_dataset, write_masked_words
    from tests.training.images import write_images
    from tests.training.shrink import SIDE
    from tests.training.test_tasks import write_classes

    return {
        "causal": write_dataset(place / "causal", validation=4),
        "masked": write_masked_words(place / "masked"),
        "classes": write_classes(place / "classes"),
        "ended": write_classes(place / "ended", end=1),
        "images": write_images(place / "images", side=SIDE),
    }


def datasets_in(place: Path) -> dict[str, Path]:
    return {path.name: path for path in (place / "data").iterdir()}


def tried(rank: int, world: int, place: Path, task: str, family: str) -> Row:
    """What one process makes of a family, whole and with adapters: for each a word and a reason."""
    import torch

    from tests.training.family_trial import verdict

    torch.set_num_threads(1)
    row: Row = {}
    for kind, lora in KINDS.items():
        found = verdict(place / f"{task}-{family}-{kind}", task, family, datasets_in(place), lora=lora)
        row[kind] = [found.word, found.reason]
        if found.word == "needs":
            break
    return row


def in_layouts(ranks: StayingRanks, place: Path, task: str, family: str, row: Row) -> Row:
    """`row`, and what two ranks make of the family where one process works."""
    from tests.training.family_layouts import LAYOUTS, layout_verdict
    from tests.training.family_trial import dataset_for

    for kind, lora in KINDS.items():
        trial = place / f"{task}-{family}-{kind}"
        for layout in LAYOUTS if row.get(kind, [""])[0] == "works" else ():
            dataset = dataset_for(task, trial / "model", datasets_in(place))
            more = layout_verdict(ranks, trial, dataset, layout, lora=lora)
            row[f"{layout}-lora" if lora else layout] = [more.word, more.reason]
    return row


class Trial(Protocol):
    """What is found of a family now; with `layouts`, also on two ranks."""

    def __call__(self, task: str, family: str, *, layouts: bool) -> Row: ...


@contextmanager
def trials() -> Iterator[Trial]:
    """Ranks that try one family after another; a crash or a long silence is a result too."""
    from tests.training.family_layouts import one_rank

    os.environ["HF_HUB_OFFLINE"] = "1"
    with TemporaryDirectory() as place, StayingRanks(tried) as one, StayingRanks(one_rank, 2) as two:
        (Path(place) / "data").mkdir()
        material(Path(place) / "data")

        def trial(task: str, family: str, *, layouts: bool) -> Row:
            begun = time.monotonic()
            row = one(Path(place), task, family, timeout=SECONDS).get(0, {"one": ["wrong", SILENT]})
            if layouts:
                row = in_layouts(two, Path(place), task, family, row)
            for kind in KINDS:
                shutil.rmtree(Path(place) / f"{task}-{family}-{kind}", ignore_errors=True)
            seconds = round(time.monotonic() - begun, 1)
            return {"task": task, "family": family} | row | {"seconds": seconds, "code": code_digest()}

        yield trial


@functools.cache
def code_digest() -> str:
    """A digest of all that a row depends on: the trainer, the trial itself, and the libraries below both."""
    digest = hashlib.sha256()
    for path in sorted((*(ROOT / "facility").rglob("*.py"), *Path(__file__).parent.glob("*.py"))):
        if not path.name.startswith("test_") or path.name == "test_tasks.py":
            digest.update(f"{path.relative_to(ROOT)}\n{path.read_text()}\n".encode())
    for name in ("torch", "transformers", "peft"):
        digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    return digest.hexdigest()[:16]


def rows_of(results: Path) -> list[Row]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.is_file() else []


def keep(row: Row, results: Path) -> None:
    """Append `row` in one write, since several processes may append to one file."""
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")


def try_all(results: Path, tasks: list[str], only: list[str], layouts: str) -> None:
    """Append a line to `results` for each family that has none of this code, or none of the layouts asked for."""
    from tests.training.family_trial import families

    known = {(row["task"], row["family"]): row for row in rows_of(results)}
    with trials() as trial:
        for task in tasks:
            for family in families(task):
                wanted = layouts == "all" or (layouts == "sample" and family in SAMPLE[task])
                if (only and family not in only) or (not only and enough(known.get((task, family)), layouts=wanted)):
                    continue
                row = trial(task, family, layouts=wanted)
                keep(row, results)
                words = " ".join(f"{name}={row[name][0]}" for name in COLUMNS if name in row)
                print(f"{task:8} {family:28} {words} {row['seconds']:.0f} s", file=sys.stderr)


def enough(row: Row | None, *, layouts: bool) -> bool:
    """Does this line answer what is asked, for the code as it is now?"""
    if row is None or row.get("code") != code_digest():
        return False
    return not layouts or "sharded" in row or row["one"][0] != "works"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.training.family_table", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--results", type=Path, default=Path("build/families.jsonl"), metavar="FILE")
    parser.add_argument("--task", choices=list(TITLES), action="append", help="default: all")
    parser.add_argument("--family", action="append", default=[], metavar="NAME", help="only these; tried again")
    parser.add_argument(
        "--layouts",
        choices=("none", "sample", "all"),
        default="sample",
        help="which families are also tried on two ranks (default: a sample of unlike ones; all takes hours)",
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} from the results")
    arguments = parser.parse_args()
    try_all(arguments.results, arguments.task or list(TITLES), arguments.family, arguments.layouts)
    rows = {(row["task"], row["family"]): row for row in rows_of(arguments.results)}
    if arguments.write:
        PAGE.write_text(page(list(rows.values())))
    wrong = [key for key, row in rows.items() if any(row.get(name, [""])[0] == "wrong" for name in COLUMNS)]
    print(json.dumps({"families": len(rows), "wrong": sorted(wrong)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
