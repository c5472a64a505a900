"""Which languages `federated_quality.py` federates, and which its base model is pretrained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LANGUAGES = ("it", "cs", "de", "fr")
"""Of the named experiments; one tokenizer for all four."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One facility a language."""

    languages: tuple[str, ...]
    """Of the federation."""
    base: tuple[str, ...] = ("de", "fr")
    """Of the base model; none: random weights."""

    @property
    def all_languages(self) -> tuple[str, ...]:
        """What the tokenizer is trained on."""
        return LANGUAGES if {*self.languages, *self.base} <= {*LANGUAGES} else (*self.languages, *self.base)

    def place(self, out: Path) -> Path:
        """Where tokenizer, datasets and base model of these languages lie: one tokenizer, one directory."""
        return out if self.all_languages == LANGUAGES else out / "+".join(sorted({*self.all_languages}))


EXPERIMENTS = {
    "it-cs": Experiment(languages=("it", "cs")),
    "all-four": Experiment(languages=LANGUAGES),
    "random-it-cs": Experiment(languages=("it", "cs"), base=()),
}


def experiment_of(name: str) -> Experiment:
    """One of `EXPERIMENTS`, or `es+pl+nl`, `es+pl+nl@it+de` (with its base's languages), `es+pl+nl@` (random weights).

    Raises `ValueError` where fewer than two languages are named.
    """
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
