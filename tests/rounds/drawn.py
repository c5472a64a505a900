"""Federations drawn at random: any settings beside any others, as no page of the documents puts them together."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from facility.exchange.task_words import Task
from tests.federations import write_federation
from tests.masking.federation import ssh_keys
from tests.rounds.drawn_kinds import draw_kind, write_kind

Table = Mapping[str, tuple[float, Sequence[Any]]]
"""Of each key: how often it is given, and its values."""
TRAINING: Table = {
    "micro_batch_sequences": (0.3, [1, 2]),
    "schedule": (0.3, ["linear", "constant"]),
    "warmup_steps": (0.3, [1, 3]),
    "weight_decay": (0.2, [0.1]),
    "chunked_loss": (0.3, ["always", "never"]),
    "clip_norm": (0.3, [0.0, 0.5]),
    "proximal": (0.2, [0.01]),
    "compute_dtype": (0.3, ["bfloat16", "float16"]),
    "export_dtype": (0.4, ["float16", "float32"]),
    "evaluation_sequences": (0.3, [1, 5]),
    "optimizer": (0.4, ["adafactor", "muon"]),
    "optimizer_state": (0.5, ["personal", "shared"]),
    "optimizer_state_form": (0.4, ["blocks", "int8", "full"]),
    "optimizer_state_every": (0.2, [2]),
    "first_moments": (0.2, ["mean"]),
    "keep_optimizer": (0.1, [False]),
    "drift_correction": (0.2, [True]),
    "freeze": (0.2, [["*embed*"], ["*layers.0*"], ["*norm*"]]),
    "unsent_share": (0.2, [0.25, 1.0]),
    "sparse_density": (0.2, [0.1, 1.0]),
}
LORA: Table = {
    "rank": (1.0, [2, 4]),
    "trained_rank": (0.3, [1]),
    "dropout": (0.3, [0.1]),
    "rslora": (0.3, [True]),
    "dora": (0.2, [True]),
    "modules_to_save": (0.2, [["lm_head"]]),
    "freeze_a": (0.2, [True]),
}
LAYOUTS: Sequence[dict[str, Any]] = [
    {"layout": {"activation_checkpointing": "full"}},
    {"layout": {"sharding": "NO_SHARD"}},
    {"layout": {"offload": True}},
    {"ranks": 2},
    {"ranks": 2, "layout": {"stages": 2}},
    {"ranks": 2, "layout": {"stages": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b"}},
    {"ranks": 2, "layout": {"replicas": 2}},
]
ROUNDS: Table = {"steps": (0.15, ["auto"]), "late": (0.2, ["carry", "drop"]), "quorum": (0.2, [1, 0.5])}
RULES = (
    *("mean", "fedavgm", "nesterov", "fedadam", "fedyogi", "fedadagrad", "slowmo", "fisher", "heloco+nesterov"),
    *("median", "trimmed_mean", "krum", "multi_krum", "bulyan", "geometric_median", "ties", "dare"),
    *("radial_directional", "ties+fedavgm", "auto"),
)
AGGREGATION: Table = {
    "rule": (0.7, RULES),
    "weights": (0.3, ["samples", "equal"]),
    "guard": (0.2, [False]),
    "server_decay_share": (0.2, [0.5]),
    "clip_norm": (0.15, [1.0]),
    "clip_ratio": (0.15, [0.0, 1.5]),
    "maximum_share": (0.15, [1.0]),
    "accumulate": (0.2, ["float64"]),
    "output_dtype": (0.3, ["bfloat16", "float16", "float32"]),
    "exclude": (0.2, [["*norm*"], ["*embed*"], ["*layers.1*"]]),
    "include": (0.1, [["*layers*"]]),
    "lora": (0.3, ["product"]),
    "statistics": (0.3, ["sample", "off"]),
    "screen": (0.2, [{"action": "off"}, {"action": "quarantine"}]),
    "incomplete_rate": (0.15, ["full", "share"]),
    "momentum": (0.2, [0.0, 0.5]),
}
WHOLE: Table = {
    "sending": (0.4, [{"encoding": one} for one in ("changed", "delta-int4", "delta-int8", "sparse")]),
    "keep_rounds": (0.3, [0, 1]),
    "final_evaluation": (0.2, [False]),
    "pretrained": (0.2, [True, False]),
    "evaluation": (0.3, [{"matrix": True}, {"matrix": True, "alone": True}, {"last_models": 2}]),
    "privacy": (0.1, [{"differential": {"epsilon": 8.0, "delta": 1e-3, "unit": "block"}}]),
}
OWN: Sequence[dict[str, Any]] = [
    {"steps": 4},
    {"batch_sequences": 3},
    {"learning_rate": 2e-3},
    {"encoding": "delta-int8", "export_dtype": "float32"},
    {"micro_batch_sequences": 1},
]
"""Of one facility, beside what all train by."""
ENCODINGS = ("delta-int4", "delta-int8", "sparse")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """One federation."""

    names: list[str]
    training: dict[str, Any]
    settings: dict[str, Any]
    size: dict[str, Any]
    own: dict[str, Any]
    """What facility b trains by beside that."""
    late: dict[tuple[int, str], int] = field(default_factory=dict)
    """Round and name of facilities whose updates are so many rounds late."""
    masked: bool = False
    """Under secure aggregation."""
    kind: tuple[Task, str] | None = None
    """Task and family of the model; None: a Llama on blocks of tokens."""
    absent: set[tuple[int, str]] = field(default_factory=set)
    """Round and name of facilities that leave no update."""

    @property
    def task(self) -> Task:
        """What its datasets were prepared for."""
        return self.kind[0] if self.kind else "causal-lm"

    @property
    def same_every_time(self) -> bool:
        """Whether nothing of it depends on clocks or on noise that nobody may know."""
        noised = "differential" in self.settings.get("privacy", {})
        return not noised and self.settings["rounds"].get("steps") is None

    def write(self, root: Path, keys: Path | None = None, **training: Any) -> Path:
        """Its federation.yml, whose `training` has these settings as well."""
        root.mkdir(parents=True, exist_ok=True)
        file = write_federation(root, self.names, training=self.training | training, size=self.size, **self.settings)
        described = yaml.safe_load(file.read_text())
        for facility in described["facilities"]:
            if facility["name"] == "b" and self.own:
                facility["training"] = self.own
        if self.masked:
            signers = ssh_keys(keys or root / "keys", self.names)
            described["privacy"]["peer_signers"] = str(signers)
            described["aggregation"]["allowed_signers"] = str(signers)
            for facility in described["facilities"]:
                key = {"signing_key": str((keys or root / "keys") / facility["name"])}
                facility["training"] = facility.get("training", {}) | key
        file.write_text(yaml.safe_dump(described, sort_keys=False))
        if self.kind is not None:
            write_kind(root, self.names, self.kind)
        return file


def some_of(table: Table, chance: random.Random) -> dict[str, Any]:
    """Some of the keys with a value each."""
    return {key: chance.choice(values) for key, (often, values) in table.items() if chance.random() < often}


def draw(seed: int) -> Drawn:
    """The federation of a seed; many are such as CrossFed refuses."""
    chance = random.Random(seed)
    names = ["a", "b", "c"][: chance.choice([1, 2, 2, 3])]
    count = chance.choice([1, 2, 3])
    training: dict[str, Any] = {
        "steps": chance.choice([2, 3]),
        "batch_sequences": chance.choice([2, 4, 5]),
        "learning_rate": chance.choice([1e-3, 1e-2]),
    }
    training |= some_of(TRAINING, chance)
    if chance.random() < 0.35:
        training |= {"encoding": chance.choice(ENCODINGS), "export_dtype": "float32"}
    if chance.random() < 0.3:
        training["lora"] = some_of(LORA, chance)
    if chance.random() < 0.4:
        training |= chance.choice(LAYOUTS)
    settings: dict[str, Any] = {
        "rounds": {"count": count} | some_of(ROUNDS, chance),
        "seed": chance.choice([0, 7]),
        "aggregation": some_of(AGGREGATION, chance),
    } | some_of(WHOLE, chance)
    rarely = chance.choice([0.0, 0.0, 0.2])
    found = Drawn(
        names=names,
        training=training,
        settings=settings,
        size=chance.choice([{}, {}, {"tie_word_embeddings": True}]),
        own=chance.choice(OWN) if chance.random() < 0.3 else {},
        absent={(number, name) for number in range(count) for name in names if chance.random() < rarely},
    )
    if "alone" in settings.get("evaluation", {}):  # of a facility that was in no round there is nothing to train alone
        never = {name for name in names if {(number, name) for number in range(count)} <= found.absent}
        found.absent.difference_update({(number, name) for number in range(count) for name in never})
    return found


def of_a_kind(drawn: Drawn, seed: int) -> Drawn:
    """The same federation with another family of models, or another task."""
    kind = draw_kind(random.Random(f"kind {seed}"))
    first = kind[0] == "preference" and "lora" not in drawn.training  # then they keep what the model says in round 0
    absent = {(number, name) for number, name in drawn.absent if number or not first}
    return dataclasses.replace(drawn, kind=kind, size={}, absent=absent)


def with_late(drawn: Drawn, seed: int) -> Drawn:
    """The same federation in rounds that wait for one facility, with updates that are one round late or two."""
    chance = random.Random(f"late {seed}")
    count = chance.choice([3, 4])
    rounds = {"count": count, "quorum": 1, "late": "carry"} | some_of({"late_weight": (0.5, ["participation"])}, chance)
    late = {(number, name): chance.choice([1, 2]) for number in range(count) for name in drawn.names[1:]}
    late = {key: value for key, value in late.items() if chance.random() < 0.5}
    aggregation = drawn.settings["aggregation"] | some_of({"staleness_exponent": (0.5, [0.0, 1.0])}, chance)
    return dataclasses.replace(
        drawn, settings=drawn.settings | {"rounds": rounds, "aggregation": aggregation}, late=late
    )


def under_masks(drawn: Drawn, seed: int) -> Drawn:
    """The same federation with secure aggregation: of three or four facilities, without what that excludes for sure."""
    chance = random.Random(f"masked {seed}")
    names = ["a", "b", "c", "d"][: chance.choice([3, 4])]
    without = ("encoding", "unsent_share", "sparse_density", "drift_correction", "export_dtype")
    training = {key: value for key, value in drawn.training.items() if key not in without}
    training |= {"export_dtype": "float32", "optimizer_state_form": "factors"}
    rule = chance.choice(["mean", "fedavgm", "nesterov", "fedadam", "fedyogi", "fedadagrad", "slowmo", "auto"])
    kept = ("server_decay_share", "maximum_share", "accumulate", "output_dtype", "guard", "momentum", "exclude")
    aggregation = {key: value for key, value in drawn.settings["aggregation"].items() if key in kept}
    aggregation |= {"rule": rule, "clip_ratio": 0} | some_of({"weights": (0.5, ["samples", "equal"])}, chance)
    privacy = drawn.settings.get("privacy", {}) | {"secure_aggregation": True, "minimum_sum": 2}
    privacy |= some_of({"bits": (0.5, [32]), "clip_norm": (0.3, [0.05])}, chance)
    settings = {key: value for key, value in drawn.settings.items() if key not in ("sending", "rounds", "evaluation")}
    count: int = drawn.settings["rounds"]["count"]
    settings |= {"aggregation": aggregation, "privacy": privacy, "rounds": {"count": count}}
    lost = {(number, chance.choice(names)) for number in range(count) if chance.random() < 0.4}
    return dataclasses.replace(
        drawn, names=names, training=training, settings=settings, own={}, absent=lost, late={}, masked=True
    )
