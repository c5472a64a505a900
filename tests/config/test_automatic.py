"""Laws of `rule: auto`: what the table says, what a user's own words override, and where nothing may be shared."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.aggregation.settings import AggregationSettings
from coordinator.config.automatic import (
    TABLE,
    Choice,
    Measured,
    MeasuredFederation,
    Situation,
    choose_aggregation,
    read_table,
)
from coordinator.config.federation import Federation, read_federation
from coordinator.config.resolution import looks_pretrained, model_at, parameters_of, situation_of, with_measured
from facility.exchange.messages.settings import LoraSettings, TrainingSettings
from tests.pico import pico_config

ROOT = Path(__file__).resolve().parents[2]


def situation(facilities: int = 2, rounds: int = 30, steps: int = 10, pretrained: bool = True) -> Situation:
    return Situation(facilities=facilities, rounds=rounds, steps=steps, pretrained=pretrained)


def row(where: Situation, *, shared: float, personal: float) -> MeasuredFederation:
    def one(over: float, momentum: float) -> Measured:
        aggregation = {"rule": "nesterov", "server_learning_rate": 1.0, "momentum": momentum}
        return Measured(aggregation=aggregation, over_pooled=over, seeds=1)

    return MeasuredFederation(
        situation=where, mean=1.5, best={"shared": one(shared, 0.7), "personal": one(personal, 0.6)}
    )


SHARED = Measured(aggregation={"rule": "nesterov"}, over_pooled=0.9, seeds=1)
ROWS = (
    row(situation(2), shared=0.9, personal=1.0),
    row(situation(8, 30, 10), shared=0.8, personal=1.2),
    row(situation(2, 5, 20, False), shared=1.3, personal=1.2),
)


@pytest.mark.parametrize(
    ("asked", "may_share", "state", "momentum", "near"),
    [
        (situation(2), True, "shared", 0.7, 0),
        (situation(2), False, "personal", 0.6, 0),
        (situation(3, 40, 9), True, "shared", 0.7, 0),
        (situation(6, 40, 9), True, "shared", 0.7, 1),
        (situation(2, 6, 16, False), True, "personal", 0.6, 2),
    ],
)
def test_the_best_of_the_most_similar_federation_is_chosen(asked, may_share, state, momentum, near):
    choice = choose_aggregation(asked, may_share=may_share, table=ROWS)
    assert (choice.optimizer_state, choice.aggregation["momentum"]) == (state, momentum)
    assert choice.row == ROWS[near].situation and state in choice.reason and "mean" in choice.reason


OTHERS = tuple(
    row(dataclasses.replace(situation(2, 30, steps), **kind), shared=0.5, personal=1.0)  # type: ignore[arg-type]
    for kind, steps in (({"optimizer": "muon"}, 10), ({"optimizer": "muon"}, 30), ({"adapters": True}, 10))
)


@pytest.mark.parametrize(
    ("kind", "steps", "near"),
    [
        ({}, 10, ROWS[0]),
        ({"optimizer": "muon"}, 25, OTHERS[1]),
        ({"optimizer": "muon"}, 10, OTHERS[0]),
        ({"adapters": True}, 30, OTHERS[2]),
        ({"adapters": True, "optimizer": "muon"}, 30, OTHERS[2]),
        ({"optimizer": "adafactor"}, 10, ROWS[0]),
    ],
)
def test_another_optimizer_and_adapters_have_rows_of_their_own(kind: dict[str, Any], steps: int, near):
    asked = dataclasses.replace(situation(2, 30, steps), **kind)
    choice = choose_aggregation(asked, may_share=False, table=ROWS + OTHERS)
    assert choice.row == near.situation
    assert ("adapters" in choice.reason) == near.situation.adapters
    assert (near.situation.optimizer in choice.reason) == ("optimizer" in kind)
    assert "personal second moments" in choice.reason
    alone = dataclasses.replace(near, best={"personal": near.best["personal"]})
    assert "second moments" not in choose_aggregation(asked, may_share=True, table=(alone,)).reason


def test_what_trains_is_read_from_the_facilities():
    muon, adapters = TrainingSettings(optimizer="muon"), TrainingSettings(lora=LoraSettings(rank=4))
    known = {"pretrained": True, "parameters": None}

    def kind(*training: TrainingSettings) -> tuple[str, bool]:
        found = situation_of(training, 30, **known)
        return found.optimizer, found.adapters

    assert kind(muon, muon) == ("muon", False)
    assert kind(muon, TrainingSettings()) == ("adamw", False)
    assert kind(adapters, adapters) == ("adamw", True)


def test_of_two_rows_that_are_equally_far_the_one_with_most_rounds_counts():
    """Ten rounds of thirty steps and thirty of ten are as far from fewer of both, but for the last bits."""
    shape = {"facilities": 4, "pretrained": True}
    best = {"personal": Measured(aggregation={"rule": "mean"}, over_pooled=1.0, seeds=1)}
    table = tuple(
        MeasuredFederation(situation=Situation(rounds=rounds, steps=steps, **shape), mean=1.0, best=best)
        for rounds, steps in ((10, 30), (30, 10))
    )
    for facilities in range(2, 9):
        for rounds in range(1, 11):
            for steps in range(1, 11):
                asked = Situation(facilities=facilities, rounds=rounds, steps=steps, pretrained=True)
                row = choose_aggregation(asked, may_share=True, table=table).row
                assert row is not None and (row.rounds, row.steps) == (30, 10), asked


def test_one_facility_has_nothing_to_share():
    choice = choose_aggregation(situation(1), may_share=True, table=ROWS)
    assert choice.aggregation == {"rule": "mean"} and choice.optimizer_state == "personal"


def test_no_row_of_the_shipped_table_is_worse_than_the_plain_mean():
    rows = read_table()
    assert rows
    for one in rows:
        assert one.best["personal"].over_pooled <= one.mean
        for state, best in one.best.items():
            assert best.over_pooled <= one.mean, (one.situation, state)
            settings = AggregationSettings(**best.aggregation)  # every choice is one that the aggregation knows
            # Weights by row are of second moments that travel.
            assert settings.aggregation_rule == "mean" or (settings.aggregation_rule, state) == ("fisher", "shared")


@pytest.mark.slow
def test_the_shipped_table_is_what_the_command_makes_of_the_measurements(tmp_path: Path):
    made = tmp_path / "table.json"
    script = ROOT / "tests" / "bench" / "federated_quality_choose.py"
    subprocess.run([sys.executable, script, "--table", made], check=True, capture_output=True, cwd=tmp_path)
    assert json.loads(made.read_text()) == json.loads(TABLE.read_text())


FILE = """\
name: f
model: model
rounds: 30
training: {{steps: 10{training}}}
{more}
facilities:
  - {{name: a, dataset: a}}
  - {{name: b, dataset: b}}
"""


@pytest.mark.parametrize(
    ("parameters", "size"), [(160_000, 160_000), (1_000_000, 160_000), (2_000_000, 11_000_000), (10**10, 11_000_000)]
)
def test_the_shipped_table_has_rows_for_two_sizes_of_model_and_the_nearer_one_counts(parameters: int, size: int):
    for facilities, rounds, steps in ((2, 30, 10), (2, 10, 30), (4, 30, 10), (4, 10, 30)):
        asked = dataclasses.replace(situation(facilities, rounds, steps), parameters=parameters)
        found = choose_aggregation(asked, may_share=True).row
        assert found == dataclasses.replace(asked, parameters=size)


def test_a_model_that_cannot_be_read_takes_the_row_of_the_largest():
    assert choose_aggregation(situation(2), may_share=True).row == dataclasses.replace(
        situation(2), parameters=11_000_000
    )


def read(tmp_path: Path, more: str = "", training: str = "") -> Federation:
    file = tmp_path / "federation.yml"
    file.write_text(FILE.format(more=more, training=training))
    return read_federation(file)


def states(federation: Federation) -> set[str]:
    return {one.training.optimizer_state for one in federation.facilities}


def test_auto_is_replaced_everywhere_and_says_why(tmp_path: Path):
    federation = read(tmp_path)
    best = choose_aggregation(situation(2), may_share=True)
    assert states(federation) == {best.optimizer_state}
    for name, value in best.aggregation.items():
        assert getattr(federation.aggregation, name) == value
    assert federation.chosen.startswith(best.reason) and "some facilities miss" in federation.chosen


def test_settings_of_training_that_were_measured_with_the_choice_come_with_it(tmp_path: Path):
    adamw, adafactor = TrainingSettings(optimizer_state="shared"), TrainingSettings(optimizer="adafactor")
    own, personal = TrainingSettings(beta2=0.9, optimizer_state="shared"), TrainingSettings(optimizer_state="personal")
    choice = Choice(aggregation={}, optimizer_state="shared", reason="", training={"beta2": 0.99})
    given: list[set[str]] = [set(), set(), {"beta2"}, set()]
    found = with_measured([adamw, adafactor, own, personal], given, choice)
    assert [one.beta2 for one in found] == [0.99, 0.95, 0.9, 0.95]
    table = (dataclasses.replace(ROWS[0], best={"shared": dataclasses.replace(SHARED, training={"beta2": 0.99})}),)
    chosen = choose_aggregation(situation(2), may_share=True, table=table)
    assert chosen.training == {"beta2": 0.99} and "beta2 0.99" in chosen.reason


def test_parameters_of_the_optimizer_come_with_the_choice_but_for_those_that_a_facility_writes():
    muon = TrainingSettings(optimizer="muon", optimizer_state="shared")
    other = dataclasses.replace(muon, optimizer_parameters={"newton_schulz_steps": 6})
    own = dataclasses.replace(muon, optimizer_parameters={"momentum": 0.95})
    where = dataclasses.replace(situation(2), optimizer="muon")
    measured = {"beta2": 0.99, "optimizer_parameters": {"momentum": 0.8}}
    table = (
        MeasuredFederation(situation=where, mean=1.5, best={"shared": dataclasses.replace(SHARED, training=measured)}),
    )
    choice = choose_aggregation(where, may_share=True, table=table)
    assert "beta2 0.99, optimizer_parameters.momentum 0.8" in choice.reason
    written: list[set[str]] = [set(), {"optimizer_parameters"}, {"optimizer_parameters"}, set()]
    found = with_measured([muon, other, own, TrainingSettings()], written, choice)
    assert [one.optimizer_parameters for one in found] == [
        {"momentum": 0.8},
        {"momentum": 0.8, "newton_schulz_steps": 6},
        {"momentum": 0.95},
        {},
    ]


@pytest.mark.slow
def test_federations_over_other_languages_count_together(tmp_path: Path):
    """One language's seeds weigh as much as another's single one, and a way must have every run."""
    rows = []
    for experiment, seeds in (("all-four", (1, 2, 3)), ("es+id+nb+ru@de+fr", (1,))):
        for seed in seeds:
            for name, aggregation, beta2, over in (
                ("pooled", None, 0.95, 1.0),
                ("mean", {"rule": "mean"}, 0.95, 2.0),
                ("best here", {"rule": "nesterov", "momentum": 0.8}, 0.99, 1.1 if experiment == "all-four" else 1.3),
                *([("one only", {"rule": "fedadam"}, 0.95, 1.0)] if experiment == "all-four" else []),
            ):
                local = {"learning_rate": 2e-3} | ({"betas": [0.9, beta2]} if beta2 != 0.95 else {})
                arm = {"aggregation": aggregation, "local": local}
                schedule = "10x30" if aggregation else "300 steps"
                key = {"experiment": experiment, "schedule": schedule, "seed": seed, "width": 64, "arm": arm}
                rows.append({"name": name, "key": key, "geometric_mean": 30.0 * over})
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (tmp_path / "none.json").write_text('{"rows": []}')
    script = ROOT / "tests" / "bench" / "federated_quality_choose.py"
    command = [sys.executable, script, "--results", tmp_path / "results.jsonl", "--table", tmp_path / "table.json"]
    subprocess.run([*command, "--earlier", tmp_path / "none.json"], check=True, capture_output=True)
    (made,) = read_table(tmp_path / "table.json")
    assert made.situation == dataclasses.replace(situation(4, 10, 30), parameters=160_000) and made.mean == 2.0
    best = made.best["personal"]
    assert (best.over_pooled, best.seeds, best.training) == (1.2, 4, {"beta2": 0.99})


def test_what_the_user_wrote_is_kept(tmp_path: Path):
    assert read(tmp_path, "aggregation: {momentum: 0.33}").aggregation.momentum == 0.33  # type: ignore[attr-defined]
    median = read(tmp_path, "aggregation: {rule: median}")
    assert median.aggregation.rule == "median" and states(median) == {"personal"} and "median" in median.chosen
    assert states(read(tmp_path, training=", optimizer_state: personal")) == {"personal"}
    assert states(read(tmp_path, "aggregation: {rule: fedadam}", ", optimizer_state: shared")) == {"shared"}


@pytest.mark.parametrize("training", [", lora: {rank: 4}", ", keep_optimizer: false"])
def test_second_moments_stay_personal_where_they_cannot_be_shared_or_were_not_measured(tmp_path: Path, training: str):
    assert states(read(tmp_path, training=training)) == {"personal"}


def test_the_exact_mean_of_products_keeps_the_plain_mean(tmp_path: Path):
    assert read(tmp_path, "aggregation: {lora: product}", ", lora: {rank: 4}").aggregation.rule == "mean"


def test_a_new_model_is_told_from_a_trained_one(tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(pico_config(num_hidden_layers=1)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "new")
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if "norm" in n)[0] = 1.25
    model.save_pretrained(tmp_path / "trained")
    assert not looks_pretrained(model_at(tmp_path / "new"))
    assert parameters_of(model_at(tmp_path / "new")) == sum(p.numel() for p in model.parameters())
    assert parameters_of(model_at(tmp_path / "absent")) is None
    assert looks_pretrained(model_at(tmp_path / "trained")) and looks_pretrained(model_at(tmp_path / "absent"))


ABSENT = {
    "": "share",
    "aggregation: {incomplete_rate: full}": "full",
    "aggregation: {rule: nesterov}": "full",
    "aggregation: {rule: mean, incomplete_rate: share}": "share",
    "aggregation: {lora: product}": "full",
}


@pytest.mark.parametrize(("more", "rate"), ABSENT.items())
def test_the_rate_of_rounds_that_facilities_miss_goes_with_the_momentum_that_auto_chooses(
    tmp_path: Path, more: str, rate: str
):
    lora = ", lora: {rank: 4}" if "product" in more else ""
    assert read(tmp_path, more, lora).aggregation.incomplete_rate == rate


@pytest.mark.parametrize(("late", "rate"), [("carry", "full"), ("drop", "share"), ("wait", "share")])
def test_an_update_that_is_carried_over_is_not_missing(tmp_path: Path, late: str, rate: str):
    file = tmp_path / "federation.yml"
    rounds = f"rounds: {{count: 30, quorum: 1, late: {late}}}"
    file.write_text(FILE.format(more="", training="").replace("rounds: 30", rounds))
    assert read_federation(file).aggregation.incomplete_rate == rate
