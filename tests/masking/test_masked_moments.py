"""Second moments under masks: the plain weighted mean comes out, whoever is lost; what a liar can do is bounded."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from coordinator.aggregation.masked_moments import within
from coordinator.aggregation.settings import AggregationSettings
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.second_moments import Factors, read_factors
from facility.exchange.errors import InputError, ManifestError
from facility.exchange.masking.moments import MARK, Units, error_of, moment_places
from facility.exchange.messages import report
from facility.exchange.messages.manifest import read_manifest, write_manifest
from facility.exchange.messages.masking import MaskedMoments
from tests.aggregation.make import aggregate
from tests.masking.federation import SHAPES, Masking, Second, error, mean_of, moved, steps

NAMES = ("alpha", "beta", "gamma")
RANGE = 1.0
FLOAT32 = 1.2e-7
"""Relative error of one rounding to float32, twice: of what a facility sends, and of the mean."""


def second_moments(seed: int, size: float = 1e-6) -> dict[str, Factors]:
    """Of every parameter, values over ten orders of magnitude whose mean is `size`."""
    rng, found = np.random.default_rng(seed), {}
    for name, shape in SHAPES.items():
        rows = 10.0 ** rng.uniform(-10, 0, shape[0])
        rows *= size / rows.mean()
        columns = None
        if len(shape) > 1:
            columns = 10.0 ** rng.uniform(-10, 0, shape[1])
            columns = (columns * (size / columns.mean())).astype(np.float32)
        found[name] = Factors(rows.astype(np.float32), columns)
    return found


def all_of(names: tuple[str, ...] = NAMES, seed: int = 0, size: float = 1e-6) -> dict[str, Second]:
    return {name: second_moments(seed + i, size) for i, name in enumerate(names)}


@pytest.fixture
def federation(tmp_path: Path, signers: Path) -> Masking:
    return Masking(root=tmp_path, signers=signers, moments=MaskedMoments(range=RANGE))


def shared(federation: Masking, number: int = 1) -> dict[str, Factors]:
    """Those that go out with a round's model."""
    return read_factors(federation.model(number), SHAPES)[0]


def values(one: Factors) -> np.ndarray:
    return np.concatenate([one.rows, [] if one.columns is None else one.columns]).astype(np.float64)


def close(found: dict[str, Factors], wanted: dict[str, Factors], facilities: int) -> None:
    """Within the stated error, twice where facilities were lost, and the rounding of float32."""
    assert found.keys() == wanted.keys()
    for name, one in found.items():
        mean = values(wanted[name])
        wrong = np.abs(values(one) - mean)
        assert (wrong <= 2 * error_of(RANGE, facilities) + FLOAT32 * mean).all(), (name, (wrong / mean).max())


def plainly(federation: Masking, second: dict[str, Second], number: int, out: Path) -> dict[str, Factors]:
    """What the coordinator makes of the same second moments without masks."""
    moves = steps(federation.names, number)
    updates = {name: federation.plain(name, moves[name], number, second[name]) for name in second}
    settings = AggregationSettings(rule="mean", clip_ratio=0, screen={"action": "off"})  # type: ignore[arg-type]
    aggregate(base=federation.model(number), updates=updates, out=out, settings=settings)
    return read_factors(out, SHAPES)[0]


def test_two_rounds_give_the_means_that_they_give_without_masks(tmp_path: Path, signers: Path):
    """Unlike weights; the second round begins with the first one's mean. The weights are averaged as before."""
    tokens = {"alpha": 100, "beta": 300, "gamma": 1600}
    federation = Masking(root=tmp_path, signers=signers, tokens=tokens, moments=MaskedMoments(range=RANGE))
    for number in range(2):
        second, moves = all_of(seed=10 * number), steps(NAMES, number)
        if number:  # honest: half of what was received is left
            before = shared(federation)
            second = {n: {k: mixed(before[k], v, 0.5) for k, v in one.items()} for n, one in second.items()}
        wanted = plainly(federation, second, number, tmp_path / f"plain-{number}")
        assert federation.round(moves, number, second=second)[1:] == (number + 1, True)
        close(shared(federation, number + 1), wanted, 3)
        assert read_factors(federation.model(number + 1), SHAPES)[1] == 10.0 * (number + 1)
        details = federation.archive.read_round(number).aggregation["details"]
        assert not [key for key in details if key.startswith("second_moments")], "nothing honest is limited"
    weights = {"alpha": 0.125, "beta": 0.375, "gamma": 0.5}
    assert error(moved(federation, 1), mean_of(moves, weights)) < 0.003


def mixed(one: Factors, other: Factors, share: float) -> Factors:
    def both(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (share * a + (1 - share) * b).astype(np.float32)

    columns = None if one.columns is None or other.columns is None else both(one.columns, other.columns)
    return Factors(both(one.rows, other.rows), columns)


def test_who_has_none_of_a_parameter_does_not_dilute_the_others(federation: Masking, tmp_path: Path):
    second = all_of()
    second["beta"] = {name: one for name, one in second["beta"].items() if name != "a"}
    second["gamma"] = {}
    wanted = plainly(federation, {name: second[name] for name in ("alpha", "beta")}, 0, tmp_path / "plain")
    federation.round(steps(NAMES), second={name: second[name] for name in ("alpha", "beta")})
    close(shared(federation), wanted, 3)


def test_a_coordinator_killed_at_any_place_gives_the_same_mean(federation: Masking, tmp_path: Path):
    """Before the request, updates are masked anew under fresh keys; after it the same request is answered again."""
    second, moves = all_of(), steps(NAMES)
    wanted = plainly(federation, second, 0, tmp_path / "plain")
    plain = {name: federation.plain(name, moves[name], 0, second[name]) for name in NAMES}
    sent: list[dict[str, bytes]] = []
    for _ in range(2):
        roster = federation.roster([federation.keys(name) for name in NAMES])
        received = {name: federation.masked(name, roster, plain[name]) for name in NAMES}
        sent.append({name: next((received[name] / "second_moments").iterdir()).read_bytes() for name in NAMES})
    assert all(sent[0][name] != sent[1][name] for name in NAMES)
    request = federation.settle(roster, received)
    first = federation.answer("alpha", request)
    assert federation.close(request, received, [first])[1:] == (0, False)
    again = federation.settle(roster, {})
    answers = [federation.answer(name, again) for name in NAMES]
    assert federation.close(again, {}, answers)[1:] == (1, True)
    close(shared(federation), wanted, 3)


def test_every_so_many_rounds_and_in_no_other(tmp_path: Path, signers: Path):
    federation = Masking(root=tmp_path, signers=signers, moments=MaskedMoments(range=RANGE, every=2))
    for number in range(2):
        federation.round(steps(NAMES, number), number, second=all_of())
    assert not (federation.model(1) / "second_moments").exists()
    assert shared(federation, 2).keys() == SHAPES.keys()


def test_a_facility_limits_itself_and_signs_that_it_did(federation: Masking):
    """One whose moments grew a hundredfold counts with ten times the mean that all began with."""
    federation.kept = 0.0
    federation.round(steps(NAMES), second=all_of())
    before, second = shared(federation), all_of(seed=5)
    second["alpha"] = second_moments(5, size=1e-4)
    roster = federation.roster([federation.keys(name, 1) for name in NAMES], 1)
    moves = steps(NAMES, 1)
    plain = {name: federation.plain(name, moves[name], 1, second[name]) for name in NAMES}
    received = {name: federation.masked(name, roster, plain[name], 1) for name in NAMES}
    stated = read_manifest(received["alpha"]).extra["masking"]["moments"]
    assert stated == {"range": RANGE, "every": 1, "growth": 10.0}
    assert {p.name for p in received["alpha"].iterdir()} >= {"second_moments", "report.json", "shares.json"}
    request = federation.settle(roster, {name: federation.receive(name, received[name], 1) for name in NAMES}, 1)
    federation.close(request, received, [federation.answer(name, request) for name in NAMES], 1)
    for name, one in shared(federation, 2).items():
        wanted = (10 * before[name].mean + second["beta"][name].mean + second["gamma"][name].mean) / 3
        assert one.mean == pytest.approx(wanted, rel=1e-5)


def closed_with(federation: Masking, change, number: int = 0) -> dict[str, object]:  # type: ignore[no-untyped-def]
    """A round in which alpha changes what it masked: `change(name, numbers)`. Returns the round's details."""
    roster, moves, second = (
        federation.roster([federation.keys(n, number) for n in NAMES], number),
        steps(NAMES),
        all_of(),
    )
    received = {}
    for name in NAMES:
        update = federation.masked(name, roster, federation.plain(name, moves[name], number, second[name]), number)
        if name == "alpha":
            rewritten(update, change)
        received[name] = federation.receive(name, update, number)
    request = federation.settle(roster, received, number)
    assert federation.close(request, received, [federation.answer(n, request) for n in NAMES], number)[2]
    return dict(federation.archive.read_round(number).aggregation["details"])


def rewritten(update: Path, change) -> None:  # type: ignore[no-untyped-def]
    """Replace an update's masked second moments, with a manifest that says so."""
    (path,) = (update / "second_moments").glob("*.safetensors")
    metadata = dict(open_checkpoint(path.parent).metadata)
    changed = {name: change(name, value) for name, value in load_file(path).items()}
    save_file({name: value for name, value in changed.items() if value is not None}, path, metadata=metadata)
    write_manifest(update, read_manifest(update))


def add(number: float):  # type: ignore[no-untyped-def]
    """Adds to every number that alpha sends, in units of its fixed point."""
    unit = Units(largest=RANGE, weights=dict.fromkeys(NAMES, 1.0)).unit

    def change(name: str, value):  # type: ignore[no-untyped-def]
        changed = value.copy()
        changed[:-1] += np.uint64(round(number / unit) % 2**64)
        return changed

    return change


def test_a_liar_that_makes_means_negative_or_too_large_has_them_left_out(federation: Masking):
    assert closed_with(federation, add(-0.5))["second_moments_impossible"] == len(SHAPES)
    assert not (federation.model(1) / "second_moments").exists()


def test_a_liar_in_the_first_round_adds_no_more_than_a_whole_gradient(federation: Masking):
    """All second moments of a gradient of norm c sum to c squared at most, so their mean does."""
    assert closed_with(federation, add(0.3))["second_moments_limited"] == len(SHAPES)
    whole = sum(one.mean * np.prod(SHAPES[name]) for name, one in shared(federation).items())
    assert whole == pytest.approx(RANGE, rel=1e-5)


def test_and_in_later_rounds_ten_times_the_last_mean(federation: Masking):
    federation.round(steps(NAMES), second=all_of(size=1e-7))
    before = shared(federation)
    assert closed_with(federation, add(1e-3), 1)["second_moments_limited"] == len(SHAPES)
    for name, one in shared(federation, 2).items():
        assert one.mean == pytest.approx(10 * before[name].mean, rel=1e-5)


def test_means_are_held_between_what_is_left_of_the_received_and_ten_times_it():
    before = {"a": Factors(np.array([1.0, 3.0], np.float32))}
    found, limited = within(
        {"a": Factors(np.array([0.01, 2.0], np.float32))}, received=before, floor=0.125, largest=99.0, sizes={"a": 2}
    )
    assert limited == 1 and found["a"].rows.tolist() == [0.125, 2.0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda name, value: value[:-1], "expected U64"),
        (lambda name, value: value.astype(np.float32), "expected U64"),
        (lambda name, value: None if name == "c" + MARK else value, "names differ"),
    ],
    ids=["length", "dtype", "missing"],
)
def test_a_misfit_is_its_facilitys_absence(federation: Masking, change, words: str):  # type: ignore[no-untyped-def]
    roster = federation.roster([federation.keys(name) for name in NAMES])
    update = federation.masked("alpha", roster, federation.plain("alpha", steps(NAMES)["alpha"], 0, all_of()["alpha"]))
    rewritten(update, change)
    failure = report.read_failure(federation.receive("alpha", update))
    assert failure is not None and words in failure.reason


@pytest.mark.parametrize("folder", ["second_moments", "moments"])
def test_moments_beside_masked_tensors_where_none_are_agreed_are_refused(tmp_path: Path, signers: Path, folder: str):
    """They would be one facility's own, and go out as everybody's."""
    federation = Masking(root=tmp_path, signers=signers)
    roster = federation.roster([federation.keys(name) for name in NAMES])
    plain = federation.plain("alpha", steps(NAMES)["alpha"], 0, all_of()["alpha"])
    update = federation.masked("alpha", roster, plain)
    assert not (update / folder).exists(), "what is not masked stays at the facility"
    shutil.copytree(plain / "second_moments", update / folder)
    write_manifest(update, read_manifest(update))
    failure = report.read_failure(federation.receive("alpha", update))
    assert failure is not None and "moments" in failure.reason


def test_received_moments_that_are_not_those_of_the_roster_are_no_measure(federation: Masking):
    """A facility that limits its own by nothing, while the others have nothing left, would be the sum."""
    federation.round(steps(NAMES), second=all_of())
    roster = federation.roster([federation.keys(name, 1) for name in NAMES], 1)
    plain = federation.plain("alpha", steps(NAMES)["alpha"], 1, all_of()["alpha"])
    file = next((federation.model(1) / "second_moments").glob("*.safetensors"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-4] + b"\0\0\0\1")
    with pytest.raises(ManifestError, match="altered"):
        federation.masked("alpha", roster, plain, 1)
    write_manifest(federation.model(1), read_manifest(federation.model(1)))
    with pytest.raises(InputError, match="the roster is for"):
        federation.masked("alpha", roster, plain, 1)


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.floats(1e-3, 1), min_size=2, max_size=16), largest=st.floats(1e-6, 1e4), data=st.data())
def test_no_sum_wraps_and_every_mean_is_within_the_stated_error(weights: list[float], largest: float, data):  # type: ignore[no-untyped-def]
    units = Units(largest=largest, weights={str(i): weight for i, weight in enumerate(weights)})
    sent = [data.draw(st.lists(st.floats(0, 1), min_size=3, max_size=3)) for _ in weights]
    sent = [np.minimum(np.array([*one, 1.0, 9.0]) * largest, 9 * largest) for one in sent]
    total = np.zeros(5, np.uint64)
    for weight, one in zip(weights, sent, strict=True):
        total += units.encode(one, weight)
    mean = sum(np.minimum(one, largest) * weight for weight, one in zip(weights, sent, strict=True)) / sum(weights)
    found = units.decode(total, sum(weights))
    wrong = np.abs(found - mean)
    assert (wrong <= error_of(largest, len(weights)) + 1e-12 * mean).all()


def test_places_share_no_cipher_block():
    laid = moment_places(SHAPES)
    ends = [one.start + one.values for one in laid.values()]
    starts = [one.start for one in laid.values()]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert [start % 16 for start in starts] == [0, 0, 0]
