"""Laws of a masked round: the plain mean comes out, whoever is lost, up to what fixed point takes."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.aggregation.server_optimizers.registry import SERVER_OPTIMIZERS
from coordinator.events.event import VARIABLE
from coordinator.events.follow import EventFile
from coordinator.masking.pending import Pending
from coordinator.steps import roster as roster_step
from coordinator.steps.start import start
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.errors import InputError
from facility.exchange.files.checksum import checksum_of
from facility.exchange.files.durable import new_directory
from facility.exchange.messages import report
from facility.exchange.messages.manifest import read_manifest
from facility.exchange.messages.masking import MaskedMoments
from facility.exchange.messages.settings import FacilitySettings, TrainingSettings
from facility.masking.private_keys import PrivateKeys
from facility.rounds import sealed
from facility.rounds.masked import Masked
from facility.rounds.sealed import UNCHANGED, check_kept, find_flaw
from facility.rounds.smaller import residual_to_resume
from tests.aggregation import make
from tests.engine.harms import flipped
from tests.masking.federation import Masking, error, mean_of, moved, steps
from tests.masking.test_masked_moments import RANGE, all_of, close, plainly, shared

NAMES = ("alpha", "beta", "gamma", "delta")


@pytest.mark.parametrize(("bits", "largest"), [(16, 0.0025), (32, 1e-6)])
def test_the_sum_is_the_plain_mean_and_no_larger_than_bfloat16(
    tmp_path: Path, signers: Path, bits: int, largest: float
):
    federation = Masking(root=tmp_path, signers=signers, names=NAMES, bits=bits, largest_step=0.064)
    told = steps(NAMES)  # root mean square 1e-3: the clip is 64 of them
    assert federation.round(told)[1:] == (1, True)
    assert error(moved(federation, 0), mean_of(told, dict.fromkeys(NAMES, 1.0)), told["alpha"]) < largest
    tensors = open_checkpoint(federation.root / "work" / "11" / "update")
    assert tensors.bytes == tensors.parameters * bits // 8


@pytest.mark.parametrize(
    "rule",
    [
        "mean",
        *(
            pytest.param(name, marks=() if name == "nesterov" else pytest.mark.slow)
            for name in SERVER_OPTIMIZERS.names()
            if name != "plain"
        ),
    ],
)
def test_every_server_optimizer_moves_as_with_the_plain_mean(tmp_path: Path, signers: Path, rule: str):
    """Rounds of masked updates against the same rounds of plain ones, from the same steps."""
    from coordinator.aggregation.settings import AggregationSettings
    from tests.aggregation.make import aggregate

    federation = Masking(root=tmp_path, signers=signers, rule=rule, bits=32)
    told = [steps(federation.names, seed) for seed in range(2)]
    base, state = federation.model(0), None
    for number in range(2):
        federation.round(told[number], number)
        updates = {
            name: make.update(
                tmp_path / "plain" / f"{number}-{name}",
                {k: v.float() + told[number][name][k] for k, v in make.read_all(base).items()},
                base=base,
                facility=name,
            )
            for name in federation.names
        }
        out = tmp_path / "plain" / f"model-{number}"
        told_settings = AggregationSettings(rule=rule, **make.UNBOUNDED, screen={"action": "off"})  # type: ignore[arg-type]
        aggregate(
            base=base,
            updates=updates,
            out=out,
            settings=told_settings,
            state_in=state,
            state_out=tmp_path / f"s{number}",
        )
        base, state = out, tmp_path / f"s{number}"
    start, plain = make.read_all(federation.model(0)), make.read_all(base)
    masked = make.read_all(federation.model(2))
    way = {key: plain[key].double() - start[key].double() for key in plain}
    found = {key: masked[key].double() - start[key].double() for key in plain}
    assert error(found, way) < 1e-4


def test_why_a_facility_left_no_keys_is_told_to_whoever_watches(
    tmp_path: Path, signers: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its job can only say that the roster lacks them; the cause stood in StreamFlow's log alone."""
    federation = Masking(root=tmp_path, signers=signers, bits=32)
    failed = federation.place("keys")
    with new_directory(failed) as out:
        report.write(out, report.Failure(facility="alpha", round=0, reason="train.npy is missing"))
    events = EventFile(tmp_path / "events.jsonl")
    monkeypatch.setenv(VARIABLE, str(events.path))
    monkeypatch.setattr(roster_step, "read_coordinator_settings", lambda _: federation.settings)
    words = ["--federation", "f", "--archive", federation.archive.path, "--round", 0, "--keys", failed]
    words += ["--model", federation.model(), "--out", tmp_path / "roster"]
    monkeypatch.setattr(sys, "argv", ["roster", *map(str, words)])
    assert roster_step.main() == 0
    assert [event["text"] for event in events.new()] == ["round 0: no keys: alpha: train.npy is missing"]


def test_weights_are_the_claims_of_the_signed_keys_capped(tmp_path: Path, signers: Path):
    tokens = {"alpha": 100, "beta": 300, "gamma": 1600}
    federation = Masking(root=tmp_path, signers=signers, bits=32, tokens=tokens)
    told = steps(federation.names)
    federation.round(told)
    wanted = mean_of(told, {"alpha": 0.125, "beta": 0.375, "gamma": 0.5})  # none outweighs all others together
    assert error(moved(federation, 0), wanted) < 1e-5
    rows = {row.facility: row.weight for row in federation.archive.read_round(0).facilities}
    assert rows == pytest.approx({"alpha": 0.125, "beta": 0.375, "gamma": 0.5})


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    lost=st.lists(st.sampled_from((*NAMES, "epsilon")), max_size=2, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: st.sampled_from(["keys", "train", "unmask"]) for name in names})
    )
)
def test_whoever_is_lost_in_whichever_phase_the_sum_is_of_those_whose_updates_came(
    tmp_path_factory: pytest.TempPathFactory, signers: Path, lost: dict[str, str]
):
    """Five facilities, threshold three: any two may be lost anywhere. Second moments are shared, too."""
    names, root = (*NAMES, "epsilon"), tmp_path_factory.mktemp("lost")
    federation = Masking(root=root, signers=signers, names=names, bits=32, moments=MaskedMoments(range=RANGE))
    told = steps(names)
    summed = [name for name in names if lost.get(name) not in ("keys", "train")]
    second = all_of(names)
    plain = plainly(federation, {name: second[name] for name in summed}, 0, root / "plain")
    assert federation.round(told, lost=lost, second=second)[1:] == (1, True)
    close(shared(federation), plain, len(names))
    assert error(moved(federation, 0), mean_of(told, dict.fromkeys(summed, 1.0))) < 1e-5
    rows = {row.facility: row.status for row in federation.archive.read_round(0).facilities}
    assert {name for name, status in rows.items() if status == "ok"} == set(summed)


@pytest.mark.parametrize(
    ("phase", "words"),
    [("keys", "got 0 sound updates"), ("train", "secure aggregation needs 2"), ("unmask", "cannot be unmasked")],
)
def test_below_the_threshold_the_round_stops_with_the_reason_and_no_model(
    tmp_path: Path, signers: Path, phase: str, words: str
):
    federation = Masking(root=tmp_path, signers=signers)
    told = steps(federation.names)
    if phase == "keys":
        roster = federation.roster([federation.keys("alpha")])
        closed = federation.close(federation.settle(roster, {}), {}, [])
    else:
        closed = federation.round(told, lost={"alpha": phase, "beta": phase})
    assert closed[1:] == (0, False)
    assert words in federation.archive.read_note("stopped")["reason"]
    assert federation.archive.rounds() == []


def test_the_same_request_is_asked_again_and_answered_again_after_too_few_answers(tmp_path: Path, signers: Path):
    """What a coordinator that was killed while it waited does: nothing is trained or summed anew."""
    federation = Masking(root=tmp_path, signers=signers, bits=32)
    told = steps(federation.names)
    roster = federation.roster([federation.keys(name) for name in federation.names])
    received = {name: federation.masked(name, roster, federation.plain(name, told[name])) for name in federation.names}
    request = federation.settle(roster, received)
    first = federation.answer("alpha", request)
    assert federation.close(request, received, [first])[1:] == (0, False)
    again = federation.settle(roster, {})  # nothing has come this time
    assert [p.read_bytes() for p in sorted(again.rglob("*.json"))] == [
        p.read_bytes() for p in sorted(request.rglob("*.json"))
    ]
    answers = [federation.answer(name, again) for name in ("alpha", "gamma")]
    assert (answers[0] / "answer.json").read_bytes() == (first / "answer.json").read_bytes()
    assert federation.close(again, {}, answers)[1:] == (1, True)
    assert error(moved(federation, 0), mean_of(told, dict.fromkeys(federation.names, 1.0))) < 1e-5
    assert not (federation.archive.path / "unmasking").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"bits": 32}, marks=pytest.mark.slow),
        pytest.param({"privacy": {"minimum_sum": 3}}, marks=pytest.mark.slow),
        pytest.param({"privacy": {"threshold": 3}}, marks=pytest.mark.slow),
        {"privacy": {"clip_norm": 1.0}},
        pytest.param({"names": ("alpha", "beta", "delta")}, marks=pytest.mark.slow),
        {"names": NAMES},
    ],
    ids=["nothing", "bits", "minimum_sum", "threshold", "clip_norm", "one for another", "one more"],
)
@pytest.mark.parametrize("answered", [False, True])
def test_settings_changed_while_a_sum_is_asked_for_hold_for_a_new_one_unless_it_was_answered(
    tmp_path: Path, signers: Path, changes: dict[str, object], answered: bool
):
    """The old one was asked for again at every start, and nobody could answer it: no command led out of that."""
    federation = Masking(root=tmp_path, signers=signers)
    told = steps(NAMES)

    def asked_of_all() -> tuple[Path, dict[str, Path]]:
        roster = federation.roster([federation.keys(name) for name in federation.names])
        updates = {
            name: federation.masked(name, roster, federation.plain(name, told[name])) for name in federation.names
        }
        received = {name: federation.receive(name, update) for name, update in updates.items()}
        return federation.settle(roster, received), received

    request, _ = asked_of_all()  # and the coordinator is killed
    if answered:
        federation.answer("alpha", request)
    for name, value in changes.items():
        setattr(federation, name, value)
    request, received = asked_of_all()
    if answered and changes.keys() - {"privacy"} or "clip_norm" in str(changes) and answered:
        with pytest.raises(InputError, match="expected the same facilities, settings, data and amounts as then"):
            federation.answer("alpha", request)
        return
    answers = [federation.answer(name, request) for name in federation.names]
    assert federation.close(request, received, answers)[1:] == (1, True)
    assert {row.facility: row.status for row in federation.archive.read_round(0).facilities} == dict.fromkeys(
        federation.names, "ok"
    )


def test_a_coordinator_killed_between_the_round_and_its_request_forgets_the_request_at_its_next_start(
    tmp_path: Path, signers: Path, monkeypatch: pytest.MonkeyPatch
):
    """After the last round nothing else would: a masked update of every facility stayed in the archive."""
    federation = Masking(root=tmp_path, signers=signers, changes={"rounds": 1, "final_evaluation": False})
    with monkeypatch.context() as patch:
        patch.setattr(Pending, "drop", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            federation.round(steps(federation.names))
    pending = federation.archive.path / "unmasking"
    assert federation.archive.rounds() == [0] and (pending / "round-0000" / "updates" / "alpha").is_dir()
    asked = pending / "round-0001"  # of the round under way, were there one more: it stays
    shutil.copytree(pending / "round-0000", asked)
    assert not start(federation.archive, tmp_path / "initial", federation.settings).proceed
    assert [path.name for path in pending.iterdir()] == ["round-0001"]
    start(federation.archive, tmp_path / "initial", dataclasses.replace(federation.settings, privacy=None))
    assert not pending.exists(), "nobody asks for it without masks"


def test_the_residual_beside_a_masked_update_is_sealed_and_an_altered_one_is_told_and_not_used(
    tmp_path: Path, signers: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its digest is made of what is written: no weights are read for it once more."""
    again: list[str] = []
    monkeypatch.setattr(sealed, "checksum_of", lambda path: again.append(path.name) or checksum_of(path))
    federation = Masking(root=tmp_path, signers=signers)
    roster = federation.roster([federation.keys(name) for name in federation.names])
    state, plain = federation.state("alpha"), federation.plain("alpha", steps(federation.names)["alpha"])
    training = TrainingSettings(signing_key=str(signers.parent / "alpha"))
    settings = FacilitySettings(
        federation="test", facility="alpha", rounds=9, seed=0, training=training, masking=federation.masking
    )
    member = PrivateKeys(state=state).of(federation.read(roster), "alpha")
    Masked(settings=settings, state=state, member=member).make(
        plain, received=federation.model(), key="k", out=tmp_path / "update"
    )
    assert not [name for name in again if name.endswith(".safetensors")]
    residual = residual_to_resume(state, 1, training, masked=True)
    assert residual is not None and find_flaw(residual) == "" and check_kept(state, 1) == []
    (residual / UNCHANGED).unlink()
    assert find_flaw(residual) == "", "read again, and as it was"
    (weights,) = residual.glob("*.safetensors")
    weights.write_bytes(flipped(weights.read_bytes()))
    for _ in range(2):
        with pytest.raises(InputError, match=f"{weights.name} was altered, which round 1 goes on from"):
            check_kept(state, 1)


def test_what_fixed_point_takes_is_the_residual(tmp_path: Path, signers: Path):
    """Sent plus residual is the step, value by value, also where the clip cut it off."""
    federation = Masking(root=tmp_path, signers=signers, largest_step=1e-3)
    told = {name: {k: v.clone() for k, v in one.items()} for name, one in steps(federation.names, scale=2e-4).items()}
    told["alpha"]["b.weight"][7, 11] = 0.05
    plain = {name: federation.plain(name, told[name]) for name in federation.names}
    roster = federation.roster([federation.keys(name) for name in federation.names])
    received = {name: federation.masked(name, roster, plain[name]) for name in federation.names}
    rest = {
        name: {key: value.float() for key, value in make.read_all(path.with_name("residual")).items()}
        for name, path in received.items()
    }
    request = federation.settle(roster, received)
    federation.close(request, received, [federation.answer(name, request) for name in federation.names])
    assert rest["alpha"]["b.weight"][7, 11] == pytest.approx(0.049, rel=2**-8)  # in bfloat16
    mean = mean_of(told, dict.fromkeys(federation.names, 1.0))
    left = mean_of(rest, dict.fromkeys(federation.names, 1.0))
    size = mean_of(
        {name: {key: value.abs() for key, value in one.items()} for name, one in rest.items()},
        dict.fromkeys(federation.names, 1.0),
    )
    sent = moved(federation, 0)
    for key in mean:
        rounding = size[key] * 2**-8
        assert ((sent[key] + left[key] - mean[key]).abs() <= 3e-8 + rounding).all()


def test_facilities_clip_to_the_agreed_norm_and_say_so(tmp_path: Path, signers: Path):
    federation = Masking(root=tmp_path, signers=signers, bits=32, privacy={"clip_norm": 0.1})
    told = steps(federation.names, scale=1e-3)  # norm 0.39
    told["beta"] = {key: value * 0.1 for key, value in told["beta"].items()}  # within the limit
    federation.round(told)
    clipped = {
        name: {
            key: value * min(1.0, 0.1 / sum(float((v**2).sum()) for v in step.values()) ** 0.5)
            for key, value in step.items()
        }
        for name, step in told.items()
    }
    assert error(moved(federation, 0), mean_of(clipped, dict.fromkeys(federation.names, 1.0))) < 1e-5
    roster = federation.roster([federation.keys(name, 1) for name in federation.names], 1)
    update = federation.masked("alpha", roster, federation.plain("alpha", told["alpha"], 1), 1)
    assert read_manifest(update).extra["masking"]["clip_norm"] == 0.1


def test_scales_follow_the_steps_of_the_round_before(tmp_path: Path, signers: Path):
    """The first clip is what a round can move at most; the next is 64 of the mean's root mean squares."""
    federation = Masking(root=tmp_path, signers=signers, largest_step=1.0)
    errors = []
    for number in range(2):
        told = steps(federation.names, number)
        federation.round(told, number)
        errors.append(error(moved(federation, number), mean_of(told, dict.fromkeys(federation.names, 1.0))))
    assert errors[0] > 0.01 and errors[1] < 0.0025
