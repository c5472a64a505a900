"""The `aggregation:` section of `workflow/federation.yml`."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from annotated_types import Ge, Le, Lt

from facility.exchange.errors import ConfigurationError
from facility.exchange.text import Pattern
from facility.exchange.validation import NonNegative, Positive, Share, validated

COMBINERS = {
    "mean": "weighted mean (McMahan et al. 2017)",
    "median": "coordinate-wise median (Yin et al. 2018)",
    "trimmed_mean": "coordinate-wise trimmed mean (Yin et al. 2018)",
    "geometric_median": "smoothed geometric median (Pillutla et al. 2022)",
    "krum": "the update closest to its neighbours (Blanchard et al. 2017)",
    "multi_krum": "mean of the updates that Krum ranks first (Blanchard et al. 2017)",
    "bulyan": "multi-Krum selection, then a trimmed mean around the median (El Mhamdi et al. 2018)",
    "ties": "trim, elect sign, disjoint mean (Yadav et al. 2023)",
    "dare": "drop at random and rescale (Yu et al. 2024)",
}
"""How the updates of a round become one step."""
OUTERS = {
    "plain": "the step times the server learning rate",
    "fedavgm": "server momentum (Hsu et al. 2019)",
    "fedadam": "server Adam (Reddi et al. 2021)",
    "fedyogi": "server Yogi (Reddi et al. 2021)",
    "fedadagrad": "server Adagrad (Reddi et al. 2021)",
    "nesterov": "DiLoCo's outer Nesterov momentum (Douillard et al. 2023)",
    "slowmo": "slow momentum (Wang et al. 2020)",
}
"""How that step moves the float32 master."""
OUTER_NUMBERS = {
    "plain": (1.0, 0.0),
    "fedavgm": (1.0, 0.9),
    "fedadam": (0.01, 0.5),
    "fedyogi": (0.01, 0.5),
    "fedadagrad": (0.01, 0.5),
    "nesterov": (1.0, 0.8),
    "slowmo": (1.0, 0.9),
}
"""Server learning rate and momentum of each, unless the settings say otherwise."""


def split_rule(rule: str) -> tuple[str, str]:
    """`mean`, `fedadam` or `median+nesterov` as (combiner, outer step)."""
    parts = rule.split("+")
    combiners = [part for part in parts if part in COMBINERS]
    outers = [part for part in parts if part in OUTERS]
    if len(combiners) + len(outers) != len(parts) or len(combiners) > 1 or len(outers) > 1:
        raise ConfigurationError(
            f"rule is {rule!r}, expected one of {', '.join(COMBINERS)}, one of {', '.join(OUTERS)}, "
            "or one of each joined by '+'"
        )
    return (combiners or ["mean"])[0], (outers or ["plain"])[0]


@validated(frozen=True, kw_only=True)
class ScreenSettings:
    """Which updates look unlike the others, and what happens to them."""

    action: Literal["off", "report", "quarantine"] = "report"
    """`report` names them in round.json; `quarantine` also leaves them out of the round."""
    norm_ratio: NonNegative[float] = 5.0
    """An update whose norm is more than so many times the median norm, or less than its inverse, is out of line; 0: off."""
    cosine_minimum: Annotated[float, Ge(-1), Le(1)] = -0.5
    """An update whose cosine to the mean of the others is lower is out of line; -1: off."""
    minimum_updates: Annotated[int, Ge(2)] = 3
    """Fewer updates than this are not screened: there is no majority to be out of line with."""

    def __post_init__(self) -> None:
        if self.norm_ratio and self.norm_ratio <= 1:
            raise ConfigurationError(f"norm_ratio is {self.norm_ratio}, expected more than 1, or 0 for off")


@validated(frozen=True, kw_only=True)
class AggregationSettings:
    """What the coordinator does with the updates of a round."""

    rule: str = "nesterov"
    """How updates are combined, how the step is applied, or both joined by `+`: `mean`, `fedadam`, `median+nesterov`."""
    weights: Literal["tokens", "samples", "equal"] | dict[str, Positive[float]] = "tokens"
    """What an update counts: its report's tokens or samples, the same for all, or numbers by facility."""
    server_learning_rate: float = 0.0
    """Multiplies the combined step (eta in Reddi et al.; the outer learning rate in DiLoCo); 0: the rule's own, which is
    0.01 of fedadam, fedyogi and fedadagrad, and 1 of the others."""
    momentum: float = -1.0
    """Of fedavgm, nesterov and slowmo; beta1 of fedadam, fedyogi and fedadagrad; -1: the rule's own, 0.8 of nesterov, 0.9
    of fedavgm and slowmo, 0.5 of the others."""
    momentum_warmup: bool = True
    """nesterov: momentum t / (t + 3) in round t = 0, 1, ... until it reaches `momentum`; false: from the first round on."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.99
    """Of fedadam and fedyogi."""
    tau: Positive[float] = 1e-3
    """Adaptivity floor of fedadam, fedyogi and fedadagrad."""
    slowmo_learning_rate: Positive[float] = 1.0
    """The facilities' learning rate by which SlowMo divides the step (gamma); 1 leaves it as it is."""
    byzantine: NonNegative[int] = 0
    """Updates that may be hostile (f of Krum, multi-Krum and Bulyan)."""
    trim: Annotated[float, Ge(0), Lt(0.5)] = 0.2
    """Share of updates dropped at either end by trimmed_mean (at least one when above 0)."""
    iterations: Positive[int] = 8
    """Weiszfeld iterations of geometric_median."""
    density: Share = 0.2
    """Share of each update that ties and dare keep."""
    seed: int = 0
    """Of dare's random choice, mixed with round, facility and tensor."""
    clip_norm: NonNegative[float] = 0.0
    """Updates with a larger L2 norm are scaled down to it; 0: off."""
    clip_ratio: NonNegative[float] = 0.0
    """The same, as a multiple of the median norm of the round; 0: off."""
    maximum_staleness: NonNegative[int] = 0
    """Rounds an update may be late; 0 refuses every update of another round."""
    staleness_exponent: NonNegative[float] = 0.5
    """An update s rounds late counts (1 + s) ** -exponent of its weight."""
    accumulate: Literal["float32", "float64"] = "float32"
    """Dtype of the sum."""
    output_dtype: Literal["keep", "bfloat16", "float16", "float32"] = "keep"
    """Dtype of the next model's floating-point tensors; `keep`: each as in the base model."""
    include: list[Pattern] = field(default_factory=list)
    """Glob patterns of the tensors that are federated; none: all."""
    exclude: list[Pattern] = field(default_factory=list)
    """Glob patterns of the tensors that are not: they stay as in the base model, and personal at each facility."""
    lora: Literal["factors", "product"] = "factors"
    """LoRA updates: mean of the factors, or the exact mean of the products factorised again at the same rank."""
    statistics: Literal["exact", "sample", "off"] = "exact"
    """Norms and cosines in round.json: over every element, over one piece in sixteen, or none."""
    allowed_signers: str = ""
    """File at the coordinator (ssh-keygen(1), ALLOWED SIGNERS) with a key for each facility's name; empty: updates need
    no signature."""
    screen: ScreenSettings = field(default_factory=ScreenSettings)

    def __post_init__(self) -> None:
        own = OUTER_NUMBERS[self.outer]
        for name, unset, value in zip(("server_learning_rate", "momentum"), (0, -1), own, strict=True):
            if getattr(self, name) == unset:
                object.__setattr__(self, name, value)
        if self.server_learning_rate <= 0:
            raise ConfigurationError(f"server_learning_rate is {self.server_learning_rate}, expected more than 0")
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(f"momentum is {self.momentum}, expected 0 or more and less than 1")
        if self.lora == "product" and (self.combiner, self.outer) != ("mean", "plain"):
            raise ConfigurationError(
                f"lora is 'product', which is a mean of its own; rule is {self.rule!r}, expected 'mean'"
            )
        if self.screen.action == "quarantine" and self.statistics != "exact":
            raise ConfigurationError("screen.action is 'quarantine', which needs statistics 'exact'")

    @property
    def combiner(self) -> str:
        return split_rule(self.rule)[0]

    @property
    def outer(self) -> str:
        return split_rule(self.rule)[1]
