"""Which languages `federated_quality.py` federates, and which its base model is pretrained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy

from tests.bench.federated_learner import Text

LANGUAGES = ("it", "cs", "de", "fr")
"""Of the named experiments; one tokenizer for all four."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One facility a language."""

    languages: tuple[str, ...]
    """Of the federation."""
    base: tuple[str, ...] = ("de", "fr")
    """Of the base model; none: random weights."""
    dealt: bool = False
    """Each facility trains on an equal share of every language, in place of one language."""

    @property
    def all_languages(self) -> tuple[str, ...]:
        """What the tokenizer is trained on."""
        return LANGUAGES if {*self.languages, *self.base} <= {*LANGUAGES} else (*self.languages, *self.base)

    def place(self, out: Path) -> Path:
        """Where tokenizer, datasets and base model of these languages lie: one tokenizer, one directory."""
        return out if self.all_languages == LANGUAGES else out / "+".join(sorted({*self.all_languages}))


def dealt(texts: Mapping[str, Text], seed: int = 99) -> dict[str, Text]:
    """As many facilities with text alike: each trains on a share of every language; validation stays as it was.

    The blocks of each language are drawn without replacement, so that no block is at two facilities.
    """
    rng = numpy.random.default_rng(seed)
    drawn = [(text.train, rng.permutation(len(text.train))) for text in texts.values()]
    return {
        name: Text(
            train=numpy.concatenate([train[numpy.sort(order[place :: len(texts)])] for train, order in drawn]),
            validation=text.validation,
        )
        for place, (name, text) in enumerate(texts.items())
    }


DEALT = "dealt:"
"""Before an experiment's name: its text is dealt over its facilities."""
EXPERIMENTS = {
    "it-cs": Experiment(languages=("it", "cs")),
    "all-four": Experiment(languages=LANGUAGES),
    "random-it-cs": Experiment(languages=("it", "cs"), base=()),
}


def experiment_of(name: str) -> Experiment:
    """One of `EXPERIMENTS`, or `es+pl+nl`, `es+pl+nl@it+de` (with its base's languages), `es+pl+nl@` (random weights).

    `dealt:` before any of them deals the text over the facilities. Raises `ValueError` where fewer than two languages
    are named.
    """
    if name.startswith(DEALT):
        return replace(experiment_of(name.removeprefix(DEALT)), dealt=True)
    if name in EXPERIMENTS:
        return EXPERIMENTS[name]
    languages, at, base = name.partition("@")
    federated = tuple(filter(None, languages.split("+")))
    if len({*federated}) < 2 or len({*federated}) < len(federated):
        known = ", ".join(EXPERIMENTS)
        raise ValueError(f"experiment {name!r}: expected {known}, or two or more languages such as es+pl+nl@de+fr")
    if not at:
        return Experiment(languages=federated)
    return Experiment(languages=federated, base=tuple(filter(None, base.split("+"))))
