"""The first documents of a dataset as the trainer reads them, with the tokens that bear loss marked."""

from __future__ import annotations

import numpy

from facility.dataset import LOSS, START, PreparedDataset
from facility.exchange.logs import escape_controls
from facility.preparing.tokenizer import load_tokenizer

COLOURED = ("\033[30;42m", "\033[0m")
PLAIN = ("\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}", "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}")


def preview_documents(dataset: PreparedDataset, count: int, *, colour: bool) -> str:
    """The first `count` documents of the training split (without marks: blocks); tokens that bear loss are coloured,
    or stand in white brackets. Documents come from anywhere: what would move a cursor is written as in Python."""
    tokenizer = load_tokenizer(dataset.tokenizer_directory)
    begin, end = COLOURED if colour else PLAIN
    blocks = dataset.split("train")
    shown: list[str] = []
    for number in range(len(blocks)):
        ids = numpy.asarray(blocks[number])
        marks = numpy.asarray(dataset.marks("train")[number]) if dataset.marked else numpy.full(len(ids), LOSS)
        starts = sorted({0, *numpy.flatnonzero(marks & START).tolist()}) if dataset.marked else [0]
        for first, last in zip(starts, [*starts[1:], len(ids)], strict=True):
            bears = (marks[first:last] & LOSS).astype(bool)
            if not bears.any() or len(shown) == count:
                continue
            cuts = [0, *(numpy.flatnonzero(numpy.diff(bears)) + 1).tolist(), last - first]
            runs = [
                (bears[a], escape_controls(tokenizer.decode(ids[first + a : first + b])))
                for a, b in zip(cuts, cuts[1:], strict=False)
            ]
            text = "".join(f"{begin}{run}{end}" if loss else run for loss, run in runs)
            shown.append(f"--- block {number}, tokens {first} to {last - 1}, {int(bears.sum())} bear loss\n{text}")
        if len(shown) == count:
            break
    return "\n".join(shown)
