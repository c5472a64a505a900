"""What goes with updates that hold a few values of each step (`training.encoding: sparseloco`), in long federations.

A model that moves by the mean of such updates differs in few values from the one before: `sending.encoding: changed`
sends those alone. A server momentum would move every value, so `rule: auto` takes the mean there, times a server
learning rate: most values that travel are of one facility alone, and the mean divides them by the number of facilities.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from coordinator.aggregation.settings import AUTO, AggregationSettings
from coordinator.config.automatic import Choice
from coordinator.config.settings import SendingSettings
from facility.exchange.delta_codecs import FULL, declared_codec, fading_of
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.settings import TrainingSettings

LOSSLESS = "changed"
RATE = 2.5
"""Server learning rate: over two facilities 3.3 % lower perplexity than 1 after 300 rounds, and 2 is 0.7 % above it
(tests/bench/log/learning.md)."""
REASON = (
    "updates are sparse: their mean with server_learning_rate {rate:g}, since a momentum would move every value of the "
    "model (sending.encoding is {encoding!r})"
)


def check_rounds(training: Mapping[str, TrainingSettings], rounds: int) -> None:
    """Raise `ConfigurationError` where an encoding needs more rounds than there are."""
    for name, one in training.items():
        if one.encoding != FULL and (least := declared_codec(one.encoding).least_rounds) > rounds:
            raise ConfigurationError(
                f"training.encoding of {name!r} is {one.encoding!r} with {rounds} rounds, expected {least} or more: a "
                "value of the model is sent in few of them, and in fewer rounds most are hardly sent at all; take "
                "'sparse' or 'delta-int4' here",
                key="training.encoding",
            )


def are_sparse(training: Sequence[TrainingSettings]) -> bool:
    """Whether all updates hold few values of a step, and the rest of it fades; adapters travel whole."""
    return all(fading_of(one.encoding) and not one.lora.rank for one in training)


def for_sparse_updates(choice: Choice, settings: AggregationSettings, sending: SendingSettings) -> Choice:
    """The choice of `rule: auto` with the mean."""
    if settings.rule != AUTO:
        return choice
    aggregation = {"rule": "mean", "server_learning_rate": RATE}
    reason = REASON.format(rate=RATE, encoding=sending.encoding)
    return dataclasses.replace(choice, aggregation=aggregation, reason=reason)


def sending_of(
    sending: SendingSettings, given: Collection[str], training: Sequence[TrainingSettings]
) -> SendingSettings:
    """`sending` with a lossless encoding of what changed, where updates are sparse and no encoding is `given`."""
    if "encoding" in given or not are_sparse(training):
        return sending
    return dataclasses.replace(sending, encoding=LOSSLESS)
