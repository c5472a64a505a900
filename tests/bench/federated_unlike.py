"""How facilities of an experiment differ beside their text."""

from __future__ import annotations

import numpy

from tests.bench.federated_learner import Text

UNLIKE = ("", "steps", "sizes", "absent", "noise", "late")
"""How the first facility (for `absent`: each in turn; for `late`: every other one) differs; empty: it does not."""


def steps_of(unlike: str, facility: int, round: int, steps: int) -> int:
    """Local steps of a facility in a round: with `steps` the first makes a third, with `absent` each misses a third.

    With `late`, every other facility takes two rounds for one: it begins in one round and delivers in the next.
    """
    if unlike == "absent" and round % 3 == facility % 3:
        return 0
    if unlike == "late" and is_late(unlike, facility) and (round + facility // 2) % 2:
        return 0
    return max(1, steps // 3) if unlike == "steps" and facility == 0 else steps


def is_late(unlike: str, facility: int) -> bool:
    """Whether a facility's updates come one round after the model that they started from was replaced."""
    return unlike == "late" and facility % 2 == 0


def text_of(unlike: str, facility: int, text: Text, seed: int) -> Text:
    """A facility's text: with `sizes` the first has a tenth, with `noise` a fifth of its tokens are random."""
    if facility or unlike not in ("sizes", "noise"):
        return text
    if unlike == "sizes":
        return Text(train=text.train[: len(text.train) // 10], validation=text.validation)
    rng = numpy.random.default_rng(seed)
    train = numpy.array(text.train)
    wrong = rng.random(train.shape) < 0.2
    train[wrong] = rng.integers(0, train.max() + 1, size=int(wrong.sum()))
    return Text(train=train, validation=text.validation)
