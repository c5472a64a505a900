"""Laws of updates that are averaged in a later round than they were made for, under every rule of aggregation."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.aggregation.settings import AggregationSettings, ScreenSettings
from coordinator.archive.rounds import BUSY, UNREACHED, Archive
from coordinator.archive.summary import summary
from coordinator.archive.table import table
from coordinator.config.closing import ClosingSettings, LimitSettings
from coordinator.config.evaluation import ComparisonSettings
from coordinator.config.settings import CoordinatorSettings, StopSettings
from coordinator.report.data import gather
from coordinator.report.markdown import markdown
from coordinator.report.page import page
from coordinator.rounds.late import discounted
from coordinator.rounds.participation import delivered, participation
from coordinator.steps import commit
from facility.exchange.checkpoints.adapters import A, B, is_factor
from facility.exchange.checkpoints.begun_adapters import begun_factor
from facility.exchange.checkpoints.checkpoint import open_checkpoint, save_tensors
from facility.exchange.errors import InputError
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.manifest import Manifest, read_manifest, run_of, with_run, write_manifest
from facility.exchange.seeds import derive_seed
from tests.aggregation.updates import write_update
from tests.pico import save_pico
from tests.rounds.carried import Carried

MOST_LATE = 5


def settings_of(names: str = "abc", *, rounds: int = 9, closing: dict[str, Any] | None = None, **changes: Any):
    aggregation = {"rule": "mean", "clip_ratio": 0.0, "maximum_share": 1.0, "guard": False}
    aggregation |= {"screen": {"action": "off"}, "maximum_staleness": MOST_LATE} | changes.pop("aggregation", {})
    screen = aggregation.pop("screen")
    return CoordinatorSettings(
        federation="f",
        rounds=rounds,
        facilities=list(names),
        keep_rounds=0,
        closing=ClosingSettings(quorum=1, grace=0.0, late="carry", **(closing or {})),
        aggregation=AggregationSettings(screen=ScreenSettings(**screen), **aggregation),
        **changes,
    )


def begun(root: Path, **changes: Any) -> Carried:
    root.mkdir(parents=True, exist_ok=True)
    model = save_pico(root / "model", dtype="bfloat16", hidden_size=8, intermediate_size=16)
    return Carried(root, settings_of(**changes)).begin(model)


def values(model: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(model)
    return {name: checkpoint.read(name).float() for name in checkpoint.tensors}


@settings(max_examples=3, deadline=None)
@given(
    durations=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=5, max_size=5),
    weigh=st.sampled_from(["staleness", "participation"]),
)
def test_every_update_is_used_once_in_the_round_in_which_it_arrives(durations: list[list[int]], weigh: str):
    """Whatever the order of arrivals: none lost, none twice, weights as said, the archive whole after every round."""
    with tempfile.TemporaryDirectory() as folder:
        federation = begun(Path(folder), closing={"late_weight": weigh})
        left: dict[str, int] = {}
        arrived: dict[str, list[int]] = {name: [] for name in "abc"}
        counts: dict[str, int] = {}
        for turn in durations:
            federation.open()
            for place, name in enumerate("abc"):
                left.setdefault(name, turn[place])
            soonest = min(left.values())
            now = [name for name in "abc" if left[name] == soonest]
            starts = {name: federation.at_work[name] for name in now}
            number = federation.number
            tokens = {name: {"tokens": 100 * (place + 1)} for place, name in enumerate("abc")}
            federation.close(now, tokens)
            left = {name: rest - soonest for name, rest in left.items() if name not in now}
            for name in now:
                arrived[name].append(starts[name])
                counts[name] = counts.get(name, 0) + 1
            entry = Archive(federation.archive.path).read_round(number)
            rows = {row.facility: row for row in entry.facilities}
            assert {name for name, row in rows.items() if row.status == "late"} == set("abc") - set(now)
            own = {name: tokens[name]["tokens"] * _factor(weigh, number - starts[name], counts, name) for name in now}
            for name in now:
                assert rows[name].staleness == number - starts[name]
                assert math.isclose(rows[name].weight, own[name] / sum(own.values()), rel_tol=1e-9)
        assert {name: federation.used(name) for name in "abc"} == arrived


def test_a_facility_that_joins_later_weighs_like_one_that_was_always_there(tmp_path: Path):
    """Its share of the rounds that named it is whole; a slow facility's is not, and an update of it counts for more."""
    federation = begun(tmp_path, names="abc", closing={"late_weight": "participation"})
    for now in ("ab", "ab", "abc"):
        federation.close(now)
    history = federation.archive.history()
    joined = [dataclasses.replace(one, facilities=[r for r in one.facilities if r.facility != "b"]) for one in history]
    shares = delivered(joined, "abc")
    assert shares == {"a": 1.0, "b": 1.0, "c": 0.5}
    assert participation(shares, "abc") == pytest.approx({"a": 5 / 6, "b": 5 / 6, "c": 5 / 3})


def _factor(weigh: str, late: int, counts: dict[str, int], name: str) -> float:
    if weigh == "staleness":
        return (1 + late) ** -0.5
    return min(4.0, max(0.25, sum(counts.values()) / len(counts) / counts[name]))


@pytest.mark.parametrize("late_weight", ["staleness", "participation"])
def test_with_nobody_late_the_weights_are_those_of_rounds_that_wait(tmp_path: Path, late_weight: str):
    """Bit for bit; with participation too, since all have delivered as often."""
    digests = []
    for closing in (None, ClosingSettings(quorum=2, late_weight=late_weight)):  # type: ignore[arg-type]
        root = tmp_path / str(closing is None)
        federation = begun(root, aggregation={"rule": "nesterov"})
        settings = dataclasses.replace(federation.settings, closing=closing)
        if closing is None:
            aggregation = dataclasses.replace(settings.aggregation, maximum_staleness=0)
            settings = dataclasses.replace(settings, aggregation=aggregation)
        federation.settings = settings
        for _ in range(3):
            federation.close("abc", {"a": {"move": 0.1, "tokens": 300}, "c": {"move": -0.05}})
        digests.append(values(federation.model))
    waiting, closing_early = digests
    assert all(torch.equal(waiting[name], closing_early[name]) for name in waiting)


def test_an_update_that_comes_a_second_time_is_refused_and_the_round_goes_on(tmp_path: Path):
    federation = begun(tmp_path)
    federation.close("ab")
    federation.close("c")
    federation.at_work |= {"c": 0, "a": 1}
    federation.close("ac")
    last = {row.facility: row for row in federation.archive.read_round(2).facilities}
    assert last["c"].status == "refused" and "was averaged already" in last["c"].reason
    assert (last["a"].status, last["a"].weight) == ("ok", 1.0)


RULES = (
    "mean",
    "median",
    "trimmed_mean",
    "krum",
    "geometric_median",
    "nesterov",
    "fedavgm",
    "fedadam",
    "heloco+nesterov",
)


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=() if rule in ("mean", "nesterov") else pytest.mark.slow) for rule in RULES]
)
def test_a_late_update_is_its_own_step_added_to_the_present_model(tmp_path: Path, rule: str, request):
    """The same federation with the late update made in time from the present model gives the same model."""
    if rule == "nesterov":
        request.getfixturevalue("no_hard_links")
    made = []
    for when in ("late", "in time"):
        federation = begun(tmp_path / when, names="abcd", aggregation={"rule": rule, "staleness_exponent": 0.0})
        moves = {"a": {"move": 0.25}, "b": {"move": 0.5}, "d": {"move": 0.375}}  # three, for the rules that need them
        federation.close("abd", moves)
        if when == "in time":
            del federation.at_work["c"]
        federation.close("abcd", moves | {"c": {"move": 0.25}})
        made.append(values(federation.model))
        assert federation.used("c") == [0 if when == "late" else 1]
    late, present = made
    for name in late:  # bfloat16 of the start is subtracted and that of the present added: to its rounding
        assert torch.allclose(late[name], present[name], atol=0.04), (rule, name)
        assert torch.isfinite(late[name]).all()


def test_tensors_that_stay_at_their_facility_stay_in_late_rounds_too(tmp_path: Path):
    federation = begun(tmp_path, aggregation={"exclude": ["lm_head*", "model.embed*"]})
    before = values(federation.model)
    federation.close("a", {"a": {"move": 0.5}})
    federation.close("b", {"b": {"move": 0.5}})
    after = values(federation.model)
    own = [name for name in before if name.startswith(("lm_head", "model.embed"))]
    assert own and all(torch.equal(before[name], after[name]) for name in own)
    moved = [name for name in before if name not in own]
    assert all((after[name] - before[name]).mean() > 0.5 for name in moved)


def write_adapters(directory: Path, model: Path, facility: str, *, round: int = 0, move: float = 0.0, seed: int = 0):
    """An update of adapters, moved by `move` from what the model holds, or from how adapters begin."""
    base, checkpoint = read_manifest(model), open_checkpoint(model)
    layer = "model.layers.0.self_attn.q_proj"
    rows, columns = checkpoint.tensors[f"{layer}.weight"].shape
    shapes = {f"base_model.model.{layer}{A}weight": (2, columns), f"base_model.model.{layer}{B}weight": (rows, 2)}
    held = {name: checkpoint.read(name).float() for name in shapes if name in checkpoint.tensors}
    began = {name: torch.from_numpy(begun_factor(seed, name, shape)) for name, shape in shapes.items()}
    write_update(directory, model, facility, round=round)
    (directory / "model.safetensors").unlink()
    save_tensors(directory, ((name, held.get(name, began[name]) + move) for name in shapes))
    told = Manifest(
        kind="update",
        federation=base.federation,
        round=round,
        facility=facility,
        base_sha256=base.content_sha256,
        encoding="lora",
    )
    (directory / "manifest.json").unlink()
    write_manifest(directory, told)
    with_run(directory, run_of(base))
    return directory


def test_adapters_of_the_first_round_that_come_late_count_from_how_they_began(tmp_path: Path):
    """The first model has none: the coordinator draws them as the facilities did."""
    model = save_pico(tmp_path / "model", dtype="bfloat16", hidden_size=8, intermediate_size=16)
    lora = LoraSettings(rank=2, alpha=2.0, targets=["layers.0.self_attn.q_proj"])
    federation = Carried(tmp_path, settings_of("ab", lora=lora, seed=7), write=write_adapters).begin(model)
    federation.close("a", {"a": {"move": 0.125, "seed": 7}})
    first = {name: value for name, value in values(federation.model).items() if is_factor(name)}
    federation.close("b", {"b": {"move": 0.25, "seed": 7}})
    second = {name: value for name, value in values(federation.model).items() if is_factor(name)}
    assert federation.used("b") == [0] and first and set(first) == set(second)
    for name in first:
        assert torch.allclose(second[name], first[name] + 0.25, atol=1e-2), name


@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (8, 33), (64, 7)])
def test_adapters_begin_with_the_numbers_that_torch_draws_as_every_format_holds_them(shape: tuple[int, int]):
    name = f"base_model.model.layer{A}weight"
    for seed in (0, 3, 2**40):
        generator = torch.Generator().manual_seed(derive_seed(seed, "lora", name))
        drawn = (torch.rand(shape, generator=generator) * 2 - 1) * (1 / math.sqrt(shape[1]))
        begun = torch.from_numpy(begun_factor(seed, name, shape))
        assert torch.equal(begun.bfloat16().float(), begun) and torch.equal(begun.half().float(), begun)
        normal = drawn.abs() >= 2**-14  # as float16 has it with all its bits
        assert torch.equal(begun[normal], drawn.bfloat16().float()[normal])
        assert (begun - drawn)[~normal].abs().sum() < 2**-24
    assert not begun_factor(3, f"base_model.model.layer{B}weight", shape).any()


def test_a_target_is_reached_by_figures_that_come_late_and_one_facility_alone_does_not_end_it(tmp_path: Path):
    """No facility delivers in time: what each received is a figure of the model of an earlier round."""
    stop = StopSettings(target_perplexity=math.exp(1.5), divergence=4.0)
    federation = begun(tmp_path, names="ab", stop=stop)
    federation.close("a", {"a": {"loss": 3.0}})
    federation.close("b", {"b": {"loss": 3.0}})  # of round 0
    federation.close("a", {"a": {"loss": 1.0}})  # of round 1: below, but b does not agree
    assert federation.proceed and not federation.archive.read_round(2).ended
    told = summary(federation.archive)["rounds"]
    assert told[0]["global_perplexity"] == pytest.approx(math.exp(1.0)), "of the model that round 0 made"
    federation.close("b", {"b": {"loss": 1.0}})  # of round 2
    entry = federation.archive.read_round(3)
    assert entry.ended and "reached the target" in entry.decision and not entry.broken


def test_a_late_figure_is_of_an_earlier_model_and_does_not_halve_the_server_rate(tmp_path: Path):
    """Each model is better than the one before; b, alone in round 2, tells what it received in round 1."""
    federation = begun(tmp_path, names="ab", aggregation={"guard": True})
    federation.close("ab", {"a": {"loss": 4.0}, "b": {"loss": 4.0}})
    federation.close("a", {"a": {"loss": 3.0}})
    federation.close("b", {"b": {"loss": 3.5}})
    federation.close("b", {"b": {"loss": 2.5}})
    assert [federation.archive.read_round(number).outer_factor for number in range(4)] == [1.0] * 4


def test_the_best_model_by_late_figures_outlives_a_new_start_where_a_limit_may_end_at_it(tmp_path: Path):
    """The model that round 1 received is the best, which only updates that came late said."""
    limited = {"limits": LimitSettings(node_hours=100.0)}
    federation = begun(tmp_path, names="ab", **limited)
    federation.settings = dataclasses.replace(federation.settings, keep_rounds=2)
    for number, name in enumerate("ababab"):
        federation.close(name, {name: {"loss": 1.0 if federation.at_work.get(name, number) == 1 else 3.0}})
    best = federation.archive.model_for(1)
    assert best.is_dir(), "the last commit kept it"
    federation.begin(tmp_path / "model")
    assert best.is_dir() and not federation.archive.model_for(2).exists()


def test_status_and_report_have_a_column_of_staleness_where_an_update_came_late(tmp_path: Path):
    federation = begun(tmp_path, names="ab")
    federation.close("a")
    assert "staleness" not in {column.header for column in table(summary(federation.archive)).columns}
    federation.close("b")
    shown = table(summary(federation.archive))
    (column,) = [one for one in shown.columns if one.header == "staleness"]
    assert [cell for cell in column.cells if cell] == ["0", "0", "0", "1"], "a and b of two rounds"
    data = gather(federation.archive, federation="f", settings={"rounds": 9})
    assert "| staleness |" in markdown(data) and "<th>staleness</th>" in page(data)


def test_a_model_counts_as_sent_where_a_job_began_from_it(tmp_path: Path):
    """A facility two rounds late was said to have been sent three models: it got one."""
    federation, begun_jobs = begun(tmp_path), {(name, 0) for name in "abc"}
    for now in ("a", "ab", "abc"):
        federation.open()
        begun_jobs |= {(name, started) for name, started in federation.at_work.items()}
        federation.close(now)
    rows = {(row.facility, row.round): row for row in federation.rows()}
    assert begun_jobs == {("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 2), ("c", 0)}
    assert {place for place, row in rows.items() if row.sent} == begun_jobs
    size = rows["a", 1].sent_bytes
    assert size and all(row.sent_bytes == (size if row.sent else 0) for row in rows.values() if row.round)
    came = [row.received_bytes for row in rows.values() if row.status == "ok"]
    assert min(came) > 0.98 * max(came), "a late one is moved in float32, and came in half as many bytes"
    for row in rows.values():
        if row.status == "ok":
            made = tmp_path / "jobs" / f"{row.facility}-{row.round - row.staleness}"
            assert row.update_sha256 == read_manifest(made).content_sha256, "not of the copy that was moved"
    traffic = gather(federation.archive, federation="f", settings={"facilities": list("abc")})["traffic"]
    for name in "abc":
        sent = [rows[place].sent_bytes for place in begun_jobs if place[0] == name]
        assert traffic[name]["to_bytes"] == sum(sent) > 0


def test_a_late_update_is_compared_as_its_facility_made_it(tmp_path: Path):
    """The matrix told of an update that held what others had learned meanwhile, under the name of this facility."""
    federation = begun(tmp_path, names="ab", comparison=ComparisonSettings())
    federation.close("a", {"a": {"move": 0.5}})
    made = federation.update_of("b")
    federation.close("b", {"b": {"move": 0.25}})
    kept = values(federation.archive.compared / "update.b")
    for name, value in values(made).items():
        assert torch.allclose(kept[name], value, atol=1e-6), name
    assert sorted(path.name for path in federation.archive.compared.iterdir()) == ["update.a", "update.b"]
    assert not list(federation.archive.path.glob(".moved-back.*"))


@pytest.mark.parametrize("reason", [BUSY, UNREACHED])
def test_a_facility_that_was_not_reached_or_had_a_job_was_sent_nothing(tmp_path: Path, reason: str):
    federation = begun(tmp_path)
    federation.late = reason
    federation.close("ab")
    (row,) = [row for row in federation.rows() if row.facility == "c"]
    assert (row.status, row.sent, row.sent_bytes) == ("late", "", 0)


def test_a_quorum_of_refused_updates_waits_for_another_and_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    work = tmp_path / "work" / "coordinator"
    (work / "step").mkdir(parents=True)
    monkeypatch.chdir(work / "step")
    federation = begun(tmp_path)
    federation.close("a", {"a": {"move": float("nan")}})
    assert (federation.number, federation.proceed, federation.archive.rounds()) == (0, True, [])
    assert discounted(work, 0) == {"a"} and discounted(work, 1) == set()
    assert not federation.archive.read_note("stopped")
    federation.at_work["a"] = 0  # its finished work is found again, and refused again
    federation.close("ab")
    rows = {row.facility: row.status for row in federation.archive.read_round(0).facilities}
    assert rows == {"a": "refused", "b": "ok", "c": "late"}


def test_with_nobody_to_wait_for_a_round_of_refused_updates_ends_the_run(tmp_path: Path):
    federation = begun(tmp_path, names="a")
    federation.close("a", {"a": {"move": float("nan")}})
    assert not federation.proceed and "got 0 sound updates" in federation.archive.read_note("stopped")["reason"]


def test_an_update_that_claims_no_tokens_is_its_own_facilitys_absence(tmp_path: Path):
    federation = begun(tmp_path, closing={"late_weight": "participation"})
    federation.close("ab", {"b": {"tokens": 0}})
    rows = {row.facility: row for row in federation.archive.read_round(0).facilities}
    assert (rows["a"].status, rows["a"].weight, rows["b"].status) == ("ok", 1.0, "refused")


def test_an_archive_of_groups_is_refused_with_the_version_that_read_it(tmp_path: Path):
    (tmp_path / "archive" / "groups").mkdir(parents=True)
    with pytest.raises(InputError, match=r"CrossFed 0\.1 was the last version to read"):
        begun(tmp_path)


def test_killed_between_the_model_and_the_rename_the_round_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The step leaves no round; the next one makes it from the same late update, once."""
    federation = begun(tmp_path, names="ab")
    federation.close("a")
    federation.open()
    received = [federation.receive(name, True) for name in "ab"]

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(commit, "describe_round", killed)
        with pytest.raises(KeyboardInterrupt):
            federation.close("ab")
    assert federation.archive.rounds() == [0] and received
    federation.at_work = {"a": 1, "b": 0}
    again = dataclasses.replace(federation)
    again.begin(tmp_path / "model")
    again.at_work = {"a": 1, "b": 0}
    again.close("ab")
    assert (again.used("a"), again.used("b")) == ([0, 1], [0])
