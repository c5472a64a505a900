"""One family on two ranks, sharded and as a pipeline, against its own round on one rank."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

from facility.exchange.errors import CrossFedError
from tests.distributed import run_distributed
from tests.training.family_trial import SAME, TRAINING, Verdict, sentence
from tests.training.federation import largest_difference
from tests.training.layouts import arguments

LAYOUTS: dict[str, dict[str, Any]] = {"sharded": {}, "pipeline": {"layout": {"stages": 2}}}
REFUSED, BROKEN = "<refused>", "<broken>"
SECONDS = 60


def one_rank(rank: int, world: int, words: list[str]) -> None:
    """One round; an error is raised with its kind, so that the other rank is not waited for."""
    from facility.train import main

    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            code = main(words)
    except CrossFedError as error:
        raise RuntimeError(f"{REFUSED}{error}{REFUSED}") from None
    except Exception as error:
        raise RuntimeError(f"{BROKEN}{sentence(error)}{BROKEN}") from error
    if code:
        raise RuntimeError(f"{BROKEN}ends with {code}{BROKEN}")


def layout_verdict(place: Path, dataset: Path, layout: str, *, lora: bool = False) -> Verdict:
    """Compare a layout to `place/round`, which `verdict` left there."""
    training = TRAINING | LAYOUTS[layout] | ({"lora": {"rank": 4}} if lora else {})
    words = arguments(place / layout, place / "model", dataset, **training)
    try:
        run_distributed(one_rank, 2, words, timeout=SECONDS)
    except AssertionError as error:
        for mark, word in ((REFUSED, "refused"), (BROKEN, "wrong")):
            if mark in str(error):
                return Verdict(word, str(error).split(mark)[1])
        return Verdict("wrong", sentence(error))
    except Exception as error:  # a rank that never answers
        return Verdict("wrong", f"no answer in {SECONDS} s ({type(error).__name__})")
    apart = largest_difference(place / "round" / "out", place / layout / "out")
    return Verdict("works") if apart < SAME else Verdict("wrong", f"weights differ by {apart:.1e}")
