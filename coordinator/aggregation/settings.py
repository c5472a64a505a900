"""The `aggregation:` section of `workflow/federation.yml`."""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from coordinator.aggregation.rule_parameters import declared, unset, with_rule_parameters
from coordinator.aggregation.rules.contract import MOMENTUM, SQUARED_GRADIENTS
from coordinator.aggregation.rules.registry import RULES, fewest_updates
from coordinator.aggregation.server_optimizers.registry import SERVER_OPTIMIZERS
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.checkpoints.running_statistics import PATTERNS
from facility.exchange.errors import ConfigurationError
from facility.exchange.registry import Declaration, Value
from facility.exchange.text import Line, Pattern
from facility.exchange.validation import NonNegative, Share, ShareOrNone, validated

AUTOMATIC = -1.0
AUTO = "auto"
Weight = Annotated[float, Ge(1e-18), Le(1e18)]
"""Of one facility: sums of several are finite, and a share of them is more than nothing."""


def split_rule(rule: str) -> tuple[str, str]:
    """`mean`, `fedadam` or `median+nesterov` as (aggregation rule, server optimizer), dotted paths included.

    `auto`, where no federation's figures choose for it, is the mean and Nesterov's momentum.
    """
    if rule == AUTO:
        return "mean", "nesterov"
    rules: list[str] = []
    optimizers: list[str] = []
    for part in rule.split("+"):
        if part in RULES.names():
            rules.append(part)
        elif part in SERVER_OPTIMIZERS.names():
            optimizers.append(part)
        elif ("." in part or ":" in part) and not part.startswith((".", ":")):
            (optimizers if _is_optimizer(part) else rules).append(part)
        else:
            rules += [part, part]  # no such name: refused below
    if len(rules) > 1 or len(optimizers) > 1:
        raise ConfigurationError(
            f"rule is {rule!r}, expected one of {', '.join(RULES.names())}, one of "
            f"{', '.join(SERVER_OPTIMIZERS.names())}, or one of each joined by '+' (or the dotted path of your own)",
            key="rule",
        )
    return (rules or ["mean"])[0], (optimizers or ["plain"])[0]


def _is_optimizer(path: str) -> bool:
    """Whether a dotted path leads to a server optimizer. Raises `ConfigurationError` where it leads nowhere."""
    if SERVER_OPTIMIZERS.declares(path):
        return True
    RULES.get(path, "rule")
    return False


@validated(frozen=True, kw_only=True)
class ScreenSettings:
    """Outlier detection: which updates are unlike the others, and what happens to them."""

    action: Literal["auto", "off", "report", "quarantine"] = "auto"
    """`report` names outliers in round.json; `quarantine` also excludes them from the round; `auto` excludes those
    far out (twice `norm_ratio`, or below `cosine_minimum`) unless they are half of all or more."""
    norm_ratio: NonNegative[float] = 5.0
    """An update is an outlier if its norm exceeds this multiple of the median norm, or is below 1/this; 0: off."""
    cosine_minimum: Annotated[float, Ge(-1), Le(1)] = -0.5
    """An update whose median cosine to the others is lower is an outlier; -1: off."""
    minimum_updates: Annotated[int, Ge(2)] = 3
    """Fewer updates than this have no majority: outliers are reported only, nothing is clipped or capped."""

    def __post_init__(self) -> None:
        if self.norm_ratio and self.norm_ratio <= 1:
            raise ConfigurationError(f"norm_ratio is {self.norm_ratio}, expected more than 1, or 0 for off")


@validated(frozen=True, kw_only=True)
@with_rule_parameters
class AggregationSettings:
    """What the coordinator does with the updates of a round."""

    rule: str = AUTO
    """Aggregation rule, server optimizer, or both joined by `+`: `mean`, `fedadam`, `median+nesterov`; your own by the
    dotted path of its module. Parameters of the shipped ones stand beside this key. `auto` takes the server optimizer
    and its parameters from a table of measured federations, by facilities, rounds, steps a round and whether the model
    was trained before; `crossfed check` and the report show the choice and its reason."""
    guard: bool = True
    """After a round whose model is worse than the one before (mean validation loss over the facilities that reported
    both), say so and halve the server learning rate, to an eighth of its value at the least; three rounds that improve
    in a row double it again, up to its value. A rise to no more than 0.01 % above the least loss so far, or that the
    noise of differential privacy explains, is reported and halves nothing. Each round file records the factor."""
    server_decay_share: ShareOrNone = 0.0
    """Last share of the federation's rounds over which the server learning rate falls linearly; 0: it stays constant.
    Without effect on a single `python -m coordinator.aggregate`, which knows no number of rounds."""
    server_decay_to: Share = 0.65
    """What the server learning rate is multiplied by in the last round, where it falls."""
    incomplete_rate: Literal["auto", "full", "share"] = AUTO  # type: ignore[assignment]
    """The server learning rate of a round that some facilities miss: `share`, times the weights that are there over
    those of all facilities that delivered in the last five rounds (an update that is left out, as an outlier or
    refused, is not there); `full`, as in every round; `auto`: `share` where `rule` is `auto`, chooses a momentum, and
    late updates are not carried over into later rounds."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Parameters of a rule or optimizer that is not shipped, by name."""
    weights: Literal["tokens", "samples", "equal"] | dict[str, Weight] = "tokens"
    """What an update counts: its report's tokens or samples, the same for all, or numbers by facility. Tokens are those
    of the blocks that were trained on: what fills them and what bears no loss count as well."""
    clip_norm: NonNegative[float] = 0.0
    """Updates with a larger L2 norm are scaled down to it; 0: off."""
    clip_ratio: Annotated[float, Ge(AUTOMATIC)] = AUTOMATIC
    """Steps longer than this multiple of the round's median norm are scaled down to it; 0: off; -1: automatic, which is
    1 for three updates and more (a facility that moves further than half of the others then counts no more than they
    do), else off."""
    maximum_share: Share = 0.5
    """Largest share of the mean that one of three or more facilities may have; the excess goes to the others in
    proportion. 0.5: none outweighs all others together; 1: off."""
    maximum_staleness: NonNegative[int] = 0
    """Rounds an update may be late; 0 refuses every update of another round. Without effect on a single
    `python -m coordinator.aggregate`, which refuses them: it is given no model but the round's own."""
    staleness_exponent: Annotated[float, Ge(0), Le(64)] = 0.5
    """An update s rounds late is worth (1 + s) ** -exponent of one in time: to `rounds.grace: auto`, and as its weight
    unless `rounds.late_weight` is `participation`."""
    accumulate: Literal["float32", "float64"] = "float32"
    """Dtype of the sum."""
    output_dtype: Literal["keep", "bfloat16", "float16", "float32"] = "keep"
    """Dtype of the next model's floating-point tensors, which its config.json then states; `keep`: each as in the base
    model. Of adapters it is that of their own tensors alone."""
    include: list[Pattern] = field(default_factory=list)
    """Glob patterns of the tensors that are federated; none: all."""
    exclude: list[Pattern] = field(default_factory=list)
    """Glob patterns of tensors that are not averaged: they stay as in the base model, and personal at each facility."""
    batch_norm: Literal["averaged", "personal"] = "averaged"
    """Running statistics of batch normalisation: their mean whatever the server optimizer, or each facility's own,
    which never leave it (Andreux et al. 2020, arXiv 2008.07424)."""
    lora: Literal["factors", "product"] = "factors"
    """LoRA updates: mean of the factors, or the exact mean of the products factorised again at the same rank."""
    statistics: Literal["exact", "sample", "off"] = "exact"
    """Norms and cosines in round.json: over every element, over one piece in sixteen, or none."""
    allowed_signers: Line = ""
    """File at the coordinator (ssh-keygen(1), ALLOWED SIGNERS) with a key for each facility's name; empty: updates need
    no signature."""
    screen: ScreenSettings = field(default_factory=ScreenSettings)
    """Outlier detection: updates unlike the others."""

    def __post_init__(self) -> None:
        self._check_parameters()
        if self.clip_ratio < 0 and self.clip_ratio != AUTOMATIC:
            raise ConfigurationError(f"clip_ratio is {self.clip_ratio}, expected 0 or more, or -1 for automatic")
        if self._turns_to_momentum and SERVER_OPTIMIZERS.get(self.server_optimizer).slots[:1] != ("velocity",):
            raise ConfigurationError(
                f"{self.aggregation_rule} turns late updates towards the server optimizer's momentum, and rule is "
                f"{self.rule!r}; expected {self.aggregation_rule}+nesterov or {self.aggregation_rule}+fedavgm",
                key="rule",
            )
        if self.lora == "product" and (self.aggregation_rule, self.server_optimizer) != ("mean", "plain"):
            raise ConfigurationError(
                f"lora is 'product', which is a mean of its own; rule is {self.rule!r}, expected 'mean'"
            )
        if self.screen.action == "quarantine" and self.statistics != "exact":
            raise ConfigurationError("screen.action is 'quarantine', which needs statistics 'exact'")

    def _check_parameters(self) -> None:
        """Check every parameter; one that is unset takes the default of the server optimizer."""
        optimizer = SERVER_OPTIMIZERS.get(self.server_optimizer)
        own = {parameter.name: parameter for parameter in optimizer.parameters if not isinstance(parameter, str)}
        for name, by_owner in declared().items():
            value = getattr(self, name)
            if unset(name) is not None and value == unset(name):
                value = own[name].default if name in own else value
            else:
                value = next(iter(by_owner.values())).check(value, name)
            object.__setattr__(self, name, value)
        entries = (RULES.get(self.aggregation_rule), optimizer)
        known = {p.name for entry in entries for p in entry.parameters if not isinstance(p, str)}
        if strangers := sorted(set(self.parameters) - known):
            raise ConfigurationError(
                f"parameters.{strangers[0]} is unknown to {self.rule}, expected "
                f"{'one of ' + ', '.join(sorted(known)) if known else 'none'}",
                key="parameters",
            )
        for entry in entries:
            self.values_of(entry)

    def values_of(self, entry: Declaration) -> dict[str, Value]:
        """All parameters of a rule or optimizer: those given, and its defaults."""
        names = {parameter.name for parameter in entry.parameters if not isinstance(parameter, str)}
        shipped = any(entry is registry.built_in.get(entry.name) for registry in (RULES, SERVER_OPTIMIZERS))
        beside = {name: getattr(self, name) for name in names} if shipped else {}
        given = {name: value for name, value in self.parameters.items() if name in names}
        return entry.values(beside | given)

    @property
    def fewest_updates(self) -> int:
        """Updates that the aggregation rule needs at least."""
        return fewest_updates(self.aggregation_rule, self.values_of(RULES.get(self.aggregation_rule)))

    def without_optimizer(self) -> AggregationSettings:
        """These settings without a server optimizer: the step is added to the model as it is.

        A rule that turns updates towards the optimizer's momentum is then the mean, as it is before there is any.
        """
        rule = "mean" if self._turns_to_momentum else self.aggregation_rule
        names = {p.name for p in RULES.get(rule).parameters if not isinstance(p, str)}
        changes: dict[str, Any] = {
            "rule": rule,
            "server_learning_rate": 1.0,
            "parameters": {name: value for name, value in self.parameters.items() if name in names},
        }
        return dataclasses.replace(self, **changes)

    @property
    def personal(self) -> list[str]:
        """Patterns of all tensors that are not federated: `exclude`, and the statistics that are personal."""
        return [*self.exclude, *(PATTERNS if self.batch_norm == "personal" else ())]

    @property
    def federated(self) -> Patterns:
        """Which tensors are federated."""
        return Patterns(tuple(self.include), tuple(self.personal))

    @property
    def aggregation_rule(self) -> str:
        """Name or dotted path of the rule that combines the updates."""
        return split_rule(self.rule)[0]

    @property
    def _turns_to_momentum(self) -> bool:
        return MOMENTUM in RULES.get(self.aggregation_rule).needs

    @property
    def weighs_rows(self) -> bool:
        """Whether the rule looks at the updates' second moments."""
        return SQUARED_GRADIENTS in RULES.get(self.aggregation_rule).needs

    @property
    def server_optimizer(self) -> str:
        """Name or dotted path of the optimizer that moves the master."""
        return "plain" if self.rule == AUTO and self.lora == "product" else split_rule(self.rule)[1]
