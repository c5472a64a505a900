"""The `privacy:` section of federation.yml, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Literal

from annotated_types import Ge

from coordinator.aggregation.settings import AUTOMATIC, AggregationSettings
from coordinator.config.masked_moments import masked_moments_obstacle
from facility.exchange.errors import ConfigurationError
from facility.exchange.masking.smallest_sum import least_for
from facility.exchange.masking.walks import MOST_RATIO, MOST_STEPS_RATIO, far_apart, first_difference, sequences_of
from facility.exchange.messages.privacy import DifferentialSettings
from facility.exchange.messages.settings import TrainingSettings, check_differential
from facility.exchange.text import Line
from facility.exchange.validation import NonNegative, validated


@validated(frozen=True, kw_only=True)
class PrivacySettings:
    """What the coordinator cannot learn of a facility."""

    secure_aggregation: bool = False
    """The coordinator learns the weighted sum of the updates and no single one. Needs three facilities or more,
    `training.signing_key`, `aggregation.allowed_signers` and `privacy.peer_signers`."""
    bits: Literal[16, 32] = 16
    """Bits of each value that is sent: 16 are the bytes of bfloat16, 32 lose next to nothing."""
    threshold: Literal["auto"] | Annotated[int, Ge(2)] = "auto"
    """Facilities that must answer for the masks of a round to come off; any others may be lost at any time. More than
    half of all; auto: the least."""
    minimum_sum: Literal["auto"] | Annotated[int, Ge(2)] = "auto"
    """Fewest updates in a sum that is unmasked; with fewer the round stops. auto: 3 of three or four facilities, and of
    more as many as leave no sum of two within a coordinator's reach, of which each could subtract its own. A facility
    may demand more (CROSSFED_MINIMUM_SUM, or `minimum_sum` in the policy of its gate)."""
    clip_norm: NonNegative[float] = 0.0
    """L2 norm to which each facility scales its own step down before it is masked, and signs that it did; 0: off."""
    peer_signers: Line = ""
    """Allowed-signers file at every facility with a key for each facility's name; an entry of `facilities:` may name
    another. It is the facility's own: the coordinator must not be the one that writes it."""
    differential: DifferentialSettings | None = None
    """Differential privacy of every facility's training: what leaves it says almost the same with and without any one
    document. Absent: none."""

    def threshold_of(self, facilities: int) -> int:
        """The threshold for this number of facilities."""
        return facilities // 2 + 1 if self.threshold == "auto" else self.threshold

    def least_sum_of(self, facilities: int) -> int:
        """`minimum_sum` for this number of facilities."""
        if self.minimum_sum == "auto":
            return least_for(facilities, self.threshold_of(facilities))
        return self.minimum_sum


def check_switched(given: object) -> None:
    """Raise `ConfigurationError` where the section, as written, has settings of masks and does not say to mask."""
    if not isinstance(given, dict) or "secure_aggregation" in given:
        return
    for key in given:
        if key != "differential":
            raise _error(
                f"privacy.{key}",
                f"privacy.{key} is of secure aggregation, which is off: the coordinator would see every update; set "
                f"privacy.secure_aggregation to true, or to false to keep {key} for later",
            )


def check_privacy(
    privacy: PrivacySettings,
    aggregation: AggregationSettings,
    *,
    training: Mapping[str, TrainingSettings],
    peer_signers: Mapping[str, str],
    model_encoding: str,
    dataset_cards: Collection[str] = (),
) -> None:
    """Raise `ConfigurationError`, with the key, for settings that differential privacy or secure aggregation excludes.

    `training`, `peer_signers`: by facility. `dataset_cards`: facilities that publish counts of their datasets.
    """
    if privacy.differential is not None:
        for name, one in training.items():
            try:
                check_differential(one, dataset_card=name in dataset_cards)
            except ConfigurationError as error:
                raise _error("privacy.differential", f"training of {name!r}: {error.message}") from None
    if not privacy.secure_aggregation:
        return
    count, threshold = len(training), privacy.threshold_of(len(training))
    if count < 3:
        raise _error(
            "privacy.secure_aggregation",
            f"secure_aggregation needs three facilities or more, found {count}: of the sum of two, each can subtract "
            "its own update",
        )
    if not count / 2 < threshold <= count:
        raise _error(
            "privacy.threshold",
            f"threshold is {threshold}, expected {count // 2 + 1} to {count} of {count} facilities: with half or "
            "fewer, two sums of one round could be unmasked, and their difference is somebody's update",
        )
    if (least := privacy.least_sum_of(count)) > count:
        raise _error("privacy.minimum_sum", f"minimum_sum is {least}, expected at most the {count} facilities")
    if model_encoding != "full":
        raise _error(
            "sending.encoding",
            f"sending.encoding is {model_encoding!r}, expected 'full' with privacy.secure_aggregation",
        )
    _check_aggregation(aggregation)
    for name, one in training.items():
        _check_training(name, one, peer_signers[name], count)
    _check_alike(training)


def _check_aggregation(aggregation: AggregationSettings) -> None:
    sum_only = "privacy.secure_aggregation shows the coordinator the sum alone"
    refused: list[tuple[str, bool, str]] = [
        (
            "rule",
            aggregation.aggregation_rule != "mean",
            f"aggregation.rule is {aggregation.rule!r}: {aggregation.aggregation_rule} compares single updates, and "
            f"{sum_only}; expected mean or a server optimizer",
        ),
        (
            "screen.action",
            aggregation.screen.action in ("report", "quarantine"),
            f"screen.action is {aggregation.screen.action!r}: norms and cosines are of single updates, and {sum_only}",
        ),
        (
            "clip_norm",
            aggregation.clip_norm > 0,
            f"aggregation.clip_norm clips at the coordinator, and {sum_only}; set privacy.clip_norm: facilities clip",
        ),
        (
            "clip_ratio",
            aggregation.clip_ratio not in (0.0, AUTOMATIC),
            f"aggregation.clip_ratio needs the norm of each update, and {sum_only}; set privacy.clip_norm",
        ),
        (
            "lora",
            aggregation.lora == "product",
            f"aggregation.lora is 'product', which multiplies single updates, and {sum_only}; expected 'factors'",
        ),
        (
            "weights",
            isinstance(aggregation.weights, dict),
            "aggregation.weights are numbers by facility; with privacy.secure_aggregation each facility weighs itself, "
            "by what its signed keys claim: expected tokens, samples or equal",
        ),
        (
            "maximum_staleness",
            aggregation.maximum_staleness > 0,
            "aggregation.maximum_staleness lets updates of other rounds in, whose masks do not cancel: expected 0",
        ),
        (
            "allowed_signers",
            not aggregation.allowed_signers,
            "aggregation.allowed_signers is empty: keys and answers of secure aggregation are signed, and the "
            "coordinator checks them against that file",
        ),
    ]
    for key, wrong, message in refused:
        if wrong:
            raise _error(f"aggregation.{key}", message)


def _check_alike(training: Mapping[str, TrainingSettings]) -> None:
    """What every facility checks before it masks (`facility.exchange.masking.walks`)."""
    if (found := first_difference(training)) is not None:
        key, one, other = found
        raise _error(
            f"training.{key}",
            f"training.{key} differs between {one!r} and {other!r}: with privacy.secure_aggregation expected the same "
            "everywhere, for a sum of updates of unlike size shows the largest",
        )
    counts = {name: sequences_of(one) for name, one in training.items()}
    if far_apart(counts.values()):
        least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        raise _error(
            "training.steps",
            f"a round has {counts[most]} sequences (steps times batch_sequences) at {most!r} and {counts[least]} at "
            f"{least!r}: with privacy.secure_aggregation expected at most {MOST_RATIO} times as many",
        )
    counts = {name: one.steps for name, one in training.items()}
    if far_apart(counts.values(), MOST_STEPS_RATIO):
        least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        raise _error(
            "training.steps",
            f"a round has {counts[most]} steps at {most!r} and {counts[least]} at {least!r}: with "
            f"privacy.secure_aggregation expected at most {MOST_STEPS_RATIO} times as many, since an update grows with "
            "its steps and a sum of updates of unlike size shows the largest; give a slow facility a smaller "
            "batch_sequences instead",
        )


def _check_training(name: str, training: TrainingSettings, peer_signers: str, count: int) -> None:
    secure = "with privacy.secure_aggregation"
    if training.encoding != "full":
        raise _error(
            "training.encoding",
            f"training.encoding of {name!r} is {training.encoding!r}: masks cancel in sums of whole numbers, not of "
            f"codes; expected 'full' {secure} (16 bits are the bytes of bfloat16)",
        )
    if training.export_dtype != "float32":
        raise _error(
            "training.export_dtype",
            f"training.export_dtype of {name!r} is {training.export_dtype!r}, expected 'float32' {secure} (it does not "
            "travel, and half precision would round small steps away before they are masked)",
        )
    if training.optimizer_state == "shared" and (found := masked_moments_obstacle(training, count)) is not None:
        raise _error(f"training.{found[0]}", f"training.{found[0]} of {name!r} {found[1]}")
    if training.first_moments != "off":
        raise _error(
            "training.first_moments",
            f"training.first_moments of {name!r} is 'mean': a first moment for each value would double what is masked, "
            f"and it is not built; expected 'off' {secure}",
        )
    if training.lora.dora:
        raise _error(
            "training.lora.dora",
            f"training.lora.dora of {name!r} is true: the first round sends whole magnitudes, not steps, which the "
            f"clip of masked tensors would cut; expected false {secure}",
        )
    if training.sync.policy != "allreduce":
        raise _error(
            "training.sync.policy",
            f"training.sync.policy of {name!r} is {training.sync.policy!r}, whose number of samples is known only "
            f"after the round; expected 'allreduce' {secure}, where weights are agreed before",
        )
    if not training.signing_key:
        raise _error("training.signing_key", f"training.signing_key of {name!r} is empty: keys are signed {secure}")
    if not peer_signers:
        raise _error(
            "privacy.peer_signers",
            f"privacy.peer_signers is empty for {name!r}: without the others' signing keys, the coordinator could put "
            "its own keys in between and read every update",
        )


def largest_step(training: Mapping[str, TrainingSettings]) -> float:
    """The most that AdamW moves a value in a round, over all facilities; the clip of tensors nothing is known of.

    A step of AdamW moves a value by at most the learning rate where gradients are steady (D. Kingma, J. Ba, "Adam",
    ICLR 2015, section 2.1); twice that leaves room for weight decay and for what earlier rounds left.
    """
    return max(2 * one.steps * one.learning_rate for one in training.values())


def _error(key: str, message: str) -> ConfigurationError:
    return ConfigurationError(message, key=key)
