"""One family on two ranks, sharded and as a pipeline, against its own round on one rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from facility.exchange.errors import CrossFedError
from tests.distributed import StayingRanks
from tests.training.family_trial import SAME, TRAINING, Verdict, quiet, sentence
from tests.training.federation import largest_difference, weights
from tests.training.layouts import arguments

LAYOUTS: dict[str, dict[str, Any]] = {"sharded": {}, "pipeline": {"layout": {"stages": 2}}}
SECONDS = 200
OWN = "each rank normalises by its own images, so that weights are not those of one process"


def one_rank(rank: int, world: int, words: list[str]) -> tuple[str, str]:
    """What becomes of one round on this rank: a word and a reason."""
    from facility.train import main

    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    with quiet():
        try:
            code = main(words)
        except CrossFedError as error:
            return "refused", str(error)
        except Exception as error:
            return "wrong", f"ends in a traceback: {sentence(error)}"
    return ("wrong", f"ends with {code}") if code else ("works", "")


def layout_verdict(ranks: StayingRanks, place: Path, dataset: Path, layout: str, *, lora: bool = False) -> Verdict:
    """Compare a layout on `ranks` of `one_rank` to `place/round`, which `verdict` left there."""
    training = TRAINING | LAYOUTS[layout] | ({"lora": {"rank": 4}} if lora else {})
    words = arguments(place / layout, place / "model", dataset, **training)
    answers = ranks(words, timeout=SECONDS)
    if len({word for word, _ in answers.values()}) > 1:
        ranks.end()  # one rank stopped where another went on
    for worst in ("wrong", "refused"):
        for word, reason in answers.values():
            if word == worst:
                return Verdict(word, reason)
    if len(answers) < ranks.world:
        return Verdict("wrong", f"{ranks.world - len(answers)} of {ranks.world} ranks gave no answer in {SECONDS} s")
    if layout == "sharded" and any("running_mean" in name for name in weights(place / layout / "out")):
        return Verdict("works", OWN)
    apart = largest_difference(place / "round" / "out", place / layout / "out")
    return Verdict("works") if apart < SAME else Verdict("wrong", f"weights differ by {apart:.1e}")
