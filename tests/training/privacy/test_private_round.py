"""Laws of a round with differential privacy, run as a command: what leaves it, what it costs, and where it stops."""

from __future__ import annotations

import json
import math
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from facility.exchange.errors import ConfigurationError
from facility.exchange.messages import loss_curve
from facility.exchange.messages.privacy import WITHHELD, privacy_of
from facility.exchange.messages.progress import FILE
from facility.exchange.messages.report import Report, read_report
from facility.exchange.privacy.accounting import epsilon_of
from facility.rounds.privacy_ledger import ReleaseLedger
from facility.train import parser
from facility.training.request import read_request
from tests.distributed import run_distributed
from tests.training.federation import largest_difference, started, train, write_dataset, write_settings
from tests.training.layouts import run_rounds

TOGETHER = {"layout": {"sharding": "NO_SHARD"}}


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data", validation=40)


def settings_of(path: Path, *, rounds: int = 3, differential: dict[str, Any] | None = None, **training: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = json.loads(write_settings(path, rounds=rounds, **training).read_text())
    raw["differential"] = {"epsilon": 8.0, "delta": 1e-3, "unit": "block"} | (differential or {})
    path.write_text(json.dumps(raw))
    return path


def arguments(place: Path, model: Path, dataset: Path, settings: Path, *, round: int = 0) -> list[str]:
    named = {"model": model, "dataset": dataset, "settings": settings, "round": round}
    named |= {"out": place / f"out{round}", "state": place / "state"}
    return [*(str(word) for name, value in named.items() for word in (f"--{name}", value)), "--progress"]


def rounds(cases: list[tuple[str, list[str]]], *, ranks: int = 1, quiet: bool = False) -> list[tuple[str, int, str]]:
    """(name, exit code, what the first rank said) of rounds in one start. `quiet`: all units and no noise."""
    return run_distributed(quiet_rounds if quiet else run_rounds, ranks, cases, timeout=240)[0]


def quiet_rounds(rank: int, world: int, cases: list[tuple[str, list[str]]]) -> list[tuple[str, int, str]]:
    import numpy as np

    from facility.training.privacy.randomness import SecretRandom

    SecretRandom.add_normal = lambda self, tensor, deviation: None  # type: ignore[method-assign]
    SecretRandom.chosen = lambda self, count, rate: np.arange(count)  # type: ignore[method-assign]
    return run_rounds(rank, world, cases)


@pytest.mark.slow
def test_without_noise_and_clipping_it_is_plain_training_on_any_number_of_ranks(
    tmp_path: Path, pico_llama: Path, dataset: Path
):
    """All 40 blocks in every step; each has the same number of predictions, so a mean of means is the mean."""
    plain = write_settings(tmp_path / "plain.json", batch_sequences=40, clip_norm=0.0)
    private = settings_of(
        tmp_path / "private.json", batch_sequences=40, clip_norm=0.0, differential={"clip": 1e6}, **TOGETHER
    )
    cases = [
        (name, arguments(tmp_path / name, pico_llama, dataset, file))
        for name, file in (("plain", plain), ("private", private))
    ]
    assert [code for _, code, _ in rounds(cases, quiet=True)] == [0, 0]
    two = [("two", arguments(tmp_path / "two", pico_llama, dataset, private))]
    assert [code for _, code, _ in rounds(two, ranks=2, quiet=True)] == [0]
    assert largest_difference(pico_llama, tmp_path / "plain/out0") > 1e-3
    for name in ("private", "two"):
        assert largest_difference(tmp_path / "plain/out0", tmp_path / name / "out0") < 1e-5
        one, other = read_report(tmp_path / "plain/out0"), read_report(tmp_path / name / "out0")
        assert (other.tokens, other.samples, other.steps) == (one.tokens, one.samples, one.steps)
        assert other.loss_returned == pytest.approx(min(one.loss_returned, math.log(128)), abs=2e-2)


@pytest.mark.slow
def test_what_is_dropped_out_does_not_follow_from_the_public_seed(tmp_path: Path, pico_llama: Path, dataset: Path):
    """Which values are dropped of a record its place in the pass decides, and that those before it."""
    settings = settings_of(tmp_path / "private.json", batch_sequences=40, differential={"clip": 1e6}, steps=1)
    model = shutil.copytree(pico_llama, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    outs = []
    for dropout in (0.0, 0.5):
        (model / "config.json").write_text(json.dumps(config | {"attention_dropout": dropout}))
        cases = [(name, arguments(tmp_path / name / str(dropout), model, dataset, settings)) for name in "ab"]
        assert [code for _, code, _ in rounds(cases, quiet=True)] == [0, 0]
        outs.append([tmp_path / name / str(dropout) / "out0" for name in "ab"])
    assert largest_difference(*outs[0]) == 0 < largest_difference(*outs[1])


def noise_norms(said: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss withheld  gradient norm ([0-9.]+)", said)]


def told(directory: Path) -> tuple[Report, Any]:
    report = read_report(directory)
    found = privacy_of(report.details)
    assert found is not None
    return report, found


@pytest.mark.slow
def test_what_leaves_a_round_is_noised_or_withheld_and_counted(tmp_path: Path, pico_llama: Path, dataset: Path):
    """Noise is added once, whatever the ranks: its norm is known, for it is far larger than the clipped sum."""
    settings = settings_of(tmp_path / "settings.json", **TOGETHER)
    for ranks in (1, 2):
        place = tmp_path / str(ranks)
        ((_, code, said),) = rounds([("round", arguments(place, pico_llama, dataset, settings))], ranks=ranks)
        assert code == 0, said
        report, privacy = told(place / "out0")
        assert (report.training_loss, report.steps, report.samples) == (WITHHELD, 3, 12)
        assert loss_curve.KEY not in report.details
        assert 0 <= report.loss_received <= math.log(128) and 0 <= report.loss_returned <= math.log(128)
        assert 0 < privacy.spent < privacy.epsilon == 8 and 0 < privacy.spent_on_validation < 8
        assert (privacy.steps, privacy.sampling_rate, privacy.unit) == (3, 0.1, "block")
        assert json.loads((place / FILE).read_text()).get("loss") is None
        expected = privacy.noise_multiplier * math.sqrt(report.details["trained_parameters"]) / 4
        assert len(norms := noise_norms(said)) == 3
        assert all(norm == pytest.approx(expected, rel=0.03) for norm in norms)
        ledger = ReleaseLedger(state=place / "state")
        assert (ledger.count("training"), ledger.count("validation")) == (3, 2)


@pytest.mark.slow
def test_the_last_step_of_all_rounds_ends_at_the_stated_epsilon_and_no_further_one_is_made(
    tmp_path: Path, pico_llama: Path, dataset: Path
):
    """Rounds 0 to 2 and the final evaluation; the last round made again and again, then from the beginning."""
    settings = settings_of(tmp_path / "settings.json")
    cases = [(str(n), arguments(tmp_path, pico_llama, dataset, settings, round=n)) for n in (0, 1, 2, 3)]
    again = [*cases[2][1]]
    again[again.index("--out") + 1] = str(tmp_path / "again")
    said = rounds([*cases, ("again", again)])
    assert [code for _, code, _ in said] == [0, 0, 0, 0, 2], said
    spent = [told(tmp_path / f"out{n}")[1].spent for n in (0, 1, 2)]
    assert 0 < spent[0] < spent[1] < spent[2] and 0.99 * 8 < spent[2] <= 8
    noises = {told(tmp_path / f"out{n}")[1].noise_multiplier for n in (0, 1, 2, 3)}
    assert len(noises) == 1, "without a crash the noise is the same in all rounds"
    final, losses = told(tmp_path / "out3")[1], ReleaseLedger(state=tmp_path / "state").releases("validation")
    assert (final.steps, final.spent) == (9, spent[2]) and sum(one.count for one in losses) == 7
    assert final.spent_on_validation == epsilon_of(losses, 1e-3) <= 8, "the final evaluation releases one as well"
    assert told(tmp_path / "out2")[1].spent_on_validation < 0.95 * final.spent_on_validation
    assert "out of its privacy budget: 9 steps have spent epsilon 8 of 8" in said[-1][2].replace("7.99", "8")
    assert not (tmp_path / "again").exists() and ReleaseLedger(state=tmp_path / "state").count("training") == 9


@pytest.mark.slow
def test_a_killed_round_has_paid_for_every_step_and_goes_on_with_more_noise(
    tmp_path: Path, pico_llama: Path, dataset: Path
):
    settings = settings_of(tmp_path / "settings.json", rounds=2, steps=30)
    words = arguments(tmp_path, pico_llama, dataset, settings)
    (process,) = started(words, tmp_path / "said")
    assert process.says("step 5/30")
    process.signal(signal.SIGKILL)
    process.ended()
    seen = max(int(n) for n in re.findall(r"step (\d+)/30", (tmp_path / "said/0/stderr").read_text()))
    before = ReleaseLedger(state=tmp_path / "state")
    paid, first = before.count("training"), before.releases("training")[0].noise_multiplier
    assert seen <= paid <= seen + 1, "at most the step whose end was not told yet"
    ((_, code, said),) = rounds([("again", words)])
    assert code == 0, said
    _, privacy = told(tmp_path / "out0")
    assert privacy.steps == paid + 30 and privacy.noise_multiplier > first
    assert privacy.spent < 8


@pytest.mark.slow
def test_an_interrupted_round_pays_for_no_step_twice(tmp_path: Path, pico_llama: Path, dataset: Path):
    stops = settings_of(tmp_path / "stops.json", limits={"stop_after": 2})
    goes = settings_of(tmp_path / "goes.json")
    said = rounds([(p.stem, arguments(tmp_path, pico_llama, dataset, p)) for p in (stops, goes)])
    assert [code for _, code, _ in said] == [85, 0], said
    assert told(tmp_path / "out0")[1].steps == 3


def test_a_plan_on_the_command_line_is_refused_as_one_in_the_settings(tmp_path: Path):
    """One of two stages ended in a traceback, after the model was loaded."""
    settings = settings_of(tmp_path / "private.json")
    words = [*arguments(tmp_path, tmp_path / "model", tmp_path / "data", settings), "--plan", "plan.json"]
    with pytest.raises(ConfigurationError, match="layout.plan is 'plan.json', which differential privacy excludes"):
        read_request(parser().parse_args(words), 0.0)


@pytest.mark.parametrize(
    ("ranks", "changes", "words"),
    [
        pytest.param(
            2, {}, "layout.sharding is 'FULL_SHARD', which differential privacy excludes", marks=pytest.mark.slow
        ),
        (1, {"batch_sequences": 50}, "has 40 units"),
        (1, {"differential": {"delta": 0.1}}, "more than one over the 40 units"),
        (1, {"differential": {"unit": "document"}}, "joins documents"),
        (1, {"compute_dtype": "float16"}, "float16 skips the steps"),
    ],
)
def test_what_is_not_private_is_refused_before_a_step(
    tmp_path: Path, pico_llama: Path, dataset: Path, ranks: int, changes: dict[str, Any], words: str
):
    settings = settings_of(tmp_path / "settings.json", **changes)
    results = train(tmp_path / "out", pico_llama, dataset, settings, ranks=ranks, expect=2)
    assert all(words in result.stderr for result in results), results[0].stderr
    assert not ReleaseLedger(state=tmp_path / "state").count("training")
