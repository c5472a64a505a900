"""Attacks on secure aggregation: by the coordinator, by a facility, and what the coordinator can know at all."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from coordinator.masking import rosters
from coordinator.masking.rosters import make_roster
from facility.exchange.checkpoints.second_moments import Factors
from facility.exchange.errors import ConfigurationError, InputError, ManifestError
from facility.exchange.masking import roster as roster_file
from facility.exchange.masking.fixed_point import fixed_point
from facility.exchange.masking.moments import Units, seed_of
from facility.exchange.masking.roster import (
    Keys,
    Roster,
    read_agreement,
    read_keys,
    read_roster,
    write_keys,
    write_roster,
)
from facility.exchange.masking.streams import MaskBuffer
from facility.exchange.masking.unmasking import read_answer, read_request, shares_path, write_answer, write_request
from facility.exchange.masking.walks import check_walks, walk_of
from facility.exchange.messages.manifest import read_manifest, with_extra
from facility.exchange.messages.masking import MaskedMoments
from facility.exchange.messages.settings import FacilitySettings, TrainingSettings
from facility.exchange.messages.steps import KEY as STEPS
from facility.masking import answering, mask_moments
from facility.masking import mask_update as mask_update_module
from facility.masking.ledger import AnswerLedger, Entry
from facility.masking.mask_update import mask_update
from facility.masking.masked_piece import Masker, Stored
from facility.masking.private_keys import PrivateKeys
from facility.masking.site_rules import SiteRules, site_rules
from facility.rounds.masked import Masked, read_masking
from tests.aggregation import make
from tests.cases import slow_but
from tests.masking.conftest import signers  # noqa: F401 (a fixture)
from tests.masking.federation import Masking, error, mean_of, moved, steps


@pytest.fixture
def federation(tmp_path: Path, signers: Path) -> Masking:  # noqa: F811
    return Masking(root=tmp_path, signers=signers, bits=32)


@pytest.fixture
def begun(federation: Masking) -> tuple[Masking, Path, dict[str, Path], dict[str, make.Tensors]]:
    """(federation, roster, masked updates, steps) of round 0."""
    told = steps(federation.names)
    roster = federation.roster([federation.keys(name) for name in federation.names])
    received = {name: federation.masked(name, roster, federation.plain(name, told[name])) for name in federation.names}
    return federation, roster, received, told


def asked(federation: Masking, request: Path, survivors: list[str]) -> Path:
    """A forged request: the same roster and shares, other survivors."""
    other = federation.place("forged")
    shutil.copytree(request, other)
    found = read_request(request)
    write_request(other, dataclasses.replace(found, survivors=survivors))
    return other


def test_both_kinds_of_share_of_one_facility_are_never_given(begun):
    """Gamma's update came; then it is said to be absent, so that the seeds it has in common would come as well."""
    federation, roster, received, _ = begun
    request = federation.settle(roster, received)
    federation.answer("alpha", request)
    for survivors in (["alpha", "beta"], ["beta", "gamma"]):
        with pytest.raises(InputError, match="would give away the difference|under the same keys"):
            federation.answer("alpha", asked(federation, request, survivors))
    again = federation.answer("alpha", request)  # the same once more is no harm
    assert json.loads((again / "answer.json").read_text())["pairs"]["gamma"] == {}


def test_new_keys_do_not_open_the_same_round_a_second_time(begun):
    """The coordinator says that the round failed, and asks for the sum of the same steps without gamma."""
    federation, roster, received, told = begun
    federation.answer("alpha", federation.settle(roster, received))
    shutil.rmtree(federation.archive.path / "unmasking")
    second = federation.roster([federation.keys(name) for name in federation.names])
    memory = AnswerLedger(state=federation.state("alpha"))
    memory.check(federation.read(second), federation.masking)  # the same sum may come of it
    without = federation.roster([federation.keys(name) for name in ("alpha", "beta")])
    with pytest.raises(InputError, match="would give away the difference; expected the same.* nothing is trained"):
        memory.check(federation.read(without), federation.masking)
    second = federation.roster([federation.keys(name) for name in federation.names])
    two = {name: federation.masked(name, second, federation.plain(name, told[name])) for name in ("alpha", "beta")}
    request = federation.settle(second, two)
    with pytest.raises(InputError, match="would give away the difference"):
        federation.answer("alpha", request)


@pytest.mark.parametrize(
    "what",
    slow_but(["weights", "clips", "told"], ["weights", "claims", "steps", "clip_norm", "clips", "moments", "told"]),
)
def test_a_second_sum_of_the_same_updates_under_other_weights_is_refused(begun, what: str):
    """Three sums over the same three facilities, weighed in three ways, are three equations for their three updates."""
    federation, roster, received, told = begun
    federation.answer("alpha", federation.settle(roster, received))
    shutil.rmtree(federation.archive.path / "unmasking")
    if what == "weights":
        federation.tokens["gamma"] = 150
    elif what == "claims":
        federation.tokens |= dict.fromkeys(federation.names, 90)
    elif what == "steps":
        federation.training_steps |= dict.fromkeys(federation.names, 9)
    elif what == "clip_norm":
        federation.privacy["clip_norm"] = 1e-3
    elif what == "moments":
        federation.moments = MaskedMoments(range=1.0)
    elif what == "told":  # gamma's update would be another one, and the difference of the sums that of both
        federation.told_else["gamma"] = "1" * 64
    else:
        federation.largest_step /= 2
    second = federation.roster([federation.keys(name) for name in federation.names])
    for name in ("alpha", "beta"):
        with nullcontext() if name == "beta" else pytest.raises(InputError, match="needs another `name`.* is trained"):
            AnswerLedger(state=federation.state(name)).check(federation.read(second), federation.masking)
    sent = {name: federation.masked(name, second, federation.plain(name, told[name])) for name in federation.names}
    request = federation.settle(second, sent)
    assert read_request(request).survivors == list(federation.names)
    with pytest.raises(InputError, match="another weighted sum over alpha, beta, gamma"):
        federation.answer("alpha", request)
    federation.answer("beta", request)  # it answered for no sum yet


@pytest.mark.parametrize("bits", slow_but([32], [16, 32]))
@pytest.mark.parametrize("named", [True, False])
def test_clips_that_leave_of_values_their_signs_alone_mask_nothing(
    tmp_path: Path,
    signers: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    bits: int,
    named: bool,
):
    """Weights 100, 120 and 150: the sum of such values says of each which facilities' are positive."""
    tokens = {"alpha": 100, "beta": 120, "gamma": 150}
    federation, told = Masking(root=tmp_path, signers=signers, bits=bits, tokens=tokens), steps(tokens)
    if named:
        monkeypatch.setattr(rosters, "_clips", lambda archive, number: {"b.weight": 1e-5})
    else:
        federation.largest_step = 1e-5
    roster = federation.roster([federation.keys(name) for name in tokens])
    for name in tokens:
        with pytest.raises(InputError, match="9[0-9]% of this step's values are beyond the clips of round 0"):
            federation.masked(name, roster, federation.plain(name, told[name]))

    monkeypatch.setattr(mask_update_module, "MOST_BEYOND", 1.0)
    federation.round(told)
    sums = {
        signs: sum(sign * count for sign, count in zip(signs, tokens.values(), strict=True)) / 370 * 1e-5
        for signs in itertools.product((-1, 1), repeat=3)
    }
    found = moved(federation, 0)["b.weight"].flatten()
    nearest = np.abs(np.subtract.outer(found.numpy(), list(sums.values()))).argmin(1)
    read_off = np.array(list(sums))[nearest]
    truly = np.stack([np.sign(told[name]["b.weight"].flatten().numpy()) for name in tokens], 1)
    assert (read_off == truly).mean() > 0.99, "what the check is for"


def test_the_same_round_is_answered_again_under_new_keys_where_nothing_else_changed(begun):
    federation, roster, received, told = begun
    federation.answer("alpha", federation.settle(roster, received))
    shutil.rmtree(federation.archive.path / "unmasking")
    second = federation.roster([federation.keys(name) for name in federation.names])
    sent = {name: federation.masked(name, second, federation.plain(name, told[name])) for name in federation.names}
    answers = [federation.answer(name, request := federation.settle(second, sent)) for name in federation.names]
    assert federation.close(request, sent, answers)[2]


def test_a_state_directory_that_was_restored_answers_for_no_round_that_it_may_have_forgotten(begun):
    """Saved before the answer, put back after it: nothing in it says that there was one."""
    federation, roster, received, _ = begun
    request = federation.settle(roster, received)
    state, saved = federation.state("alpha"), federation.root / "saved"
    subprocess.run(["cp", "-a", state, saved], check=True)
    federation.answer("alpha", request)
    answered = AnswerLedger(state=state).entries()
    time.sleep(1.1)
    shutil.rmtree(state)
    subprocess.run(["cp", "-a", saved, state], check=True)
    assert answered and not AnswerLedger(state=state).entries()
    with pytest.raises(InputError, match="was restored or copied after 'alpha' drew its keys of round 0"):
        federation.answer("alpha", request)
    keys = PrivateKeys(state=state)
    generation, _ = keys.draw(1)
    assert json.loads((keys.directory / f"{generation}.json").read_text())["since"] == keys.since(), "of use again"


def test_what_is_answered_is_on_disk_before_the_answer_exists(begun, monkeypatch: pytest.MonkeyPatch):
    federation, roster, received, _ = begun
    request = federation.settle(roster, received)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("facility.masking.answering.open_share", killed)
    with pytest.raises(KeyboardInterrupt):
        federation.answer("alpha", request)
    assert [entry.survivors for entry in AnswerLedger(state=federation.state("alpha")).entries()] == [
        ["alpha", "beta", "gamma"]
    ]


ODD_SHARES = {
    "nested": b"[" * 30_000,
    "numbers": json.dumps({"": 5, "alpha": 5, "beta": 5}).encode(),
    "no text": b"\xff\xfe",
    "not hexadecimal": json.dumps(dict.fromkeys(["", "alpha", "beta"], "x" * 64)).encode(),
    "a list": b"[1]",
}


@pytest.mark.parametrize("content", ODD_SHARES)
def test_odd_content_that_one_facility_sealed_keeps_nobody_from_answering_for_the_others(
    begun, content: str, caplog: pytest.LogCaptureFixture
):
    """Seal and size are right; what is inside only its receiver sees."""
    federation, roster, received, _ = begun
    request = federation.settle(roster, received)
    liar = PrivateKeys(state=federation.state("gamma")).of(federation.read(roster), "gamma")
    path = shares_path(request, "gamma")
    shares = json.loads(path.read_text())
    shares["sealed"]["alpha"] = liar.seal(ODD_SHARES[content], "alpha").hex()
    path.unlink()
    path.write_text(json.dumps(shares))
    answer = json.loads((federation.answer("alpha", request) / "answer.json").read_text())
    assert set(answer["own"]) == set(answer["pairs"]) == {"alpha", "beta"}
    assert "the shares of 'gamma'" in caplog.text


def test_a_damaged_ledger_means_no_answer(begun):
    federation, roster, received, _ = begun
    request = federation.settle(roster, received)
    federation.answer("alpha", request)
    with open(AnswerLedger(state=federation.state("alpha")).path, "a") as file:
        file.write('{"run": \n')
    with pytest.raises(InputError, match="is damaged"):
        federation.answer("alpha", request)


def test_one_entry_forbids_another_set_for_the_round_and_for_the_model(tmp_path: Path):
    ledger = AnswerLedger(state=tmp_path)
    entry = Entry(run="r", round=3, base_sha256="m", generation="g", request="q", survivors=["a", "b"])
    ledger.record(entry)
    for change in ({"run": "other", "round": 9}, {"base_sha256": "other"}):
        with pytest.raises(InputError, match="difference"):
            ledger.record(dataclasses.replace(entry, generation="h", survivors=["a", "c"], **change))
    ledger.record(dataclasses.replace(entry, run="x", round=4, base_sha256="n", generation="h", survivors=["a", "c"]))
    with pytest.raises(InputError, match="another weighted sum"):  # a line of before weights were noted
        ledger.record(dataclasses.replace(entry, generation="i", request="other", weighing="w"))


def test_a_sum_over_fewer_than_the_threshold_is_refused(begun):
    federation, roster, received, _ = begun
    request = federation.settle(roster, received)
    with pytest.raises(InputError, match="threshold 2"):
        federation.answer("alpha", asked(federation, request, ["gamma"]))


@pytest.mark.parametrize(
    ("privacy", "rules"), [({"minimum_sum": "auto"}, SiteRules()), ({}, SiteRules(minimum_sum=3))], ids=["auto", "site"]
)
def test_no_facility_helps_to_open_a_sum_of_two(
    tmp_path: Path,
    signers: Path,  # noqa: F811
    privacy: dict[str, object],
    rules: SiteRules,
):
    """By default, and by the site's own rule where the coordinator's settings would allow it."""
    federation = Masking(root=tmp_path, signers=signers, bits=32, privacy=privacy, rules=rules)
    told = steps(federation.names)
    roster = federation.roster([federation.keys(name) for name in federation.names])
    received = {name: federation.masked(name, roster, federation.plain(name, told[name])) for name in federation.names}
    request = federation.settle(roster, received)
    with pytest.raises(InputError, match="a sum over 2 facilities, expected 3 or more"):
        federation.answer("alpha", asked(federation, request, ["alpha", "beta"]))
    assert federation.close(request, received, [federation.answer(name, request) for name in federation.names])[2]


def test_by_default_a_round_of_three_that_loses_one_stops_before_anything_is_asked(
    tmp_path: Path,
    signers: Path,  # noqa: F811
):
    federation = Masking(root=tmp_path, signers=signers, privacy={"minimum_sum": "auto"})
    assert federation.round(steps(federation.names), lost={"gamma": "train"})[1:] == (0, False)
    reason = federation.archive.read_note("stopped")["reason"]
    assert "got 2 sound updates, secure aggregation needs 3" in reason and "gamma" in reason
    assert not (federation.archive.path / "unmasking").exists()


def test_a_site_checks_peers_keys_against_its_own_file_alone(tmp_path: Path, federation: Masking):
    """The settings, which are the coordinator's, name a file that the coordinator could have written."""
    roster = federation.roster([federation.keys(name) for name in federation.names])
    told = steps(federation.names)
    received = {name: federation.masked(name, roster, federation.plain(name, told[name])) for name in federation.names}
    request = federation.settle(roster, received)
    federation.rules = SiteRules(peer_signers=tmp_path / "peers")
    with pytest.raises(InputError, match="put its own keys in between"):
        federation.answer("alpha", request)
    (tmp_path / "peers").symlink_to(federation.signers)
    federation.answer("alpha", request)


def test_what_is_answered_is_what_was_checked_though_the_request_changes_meanwhile(begun, monkeypatch):
    """The coordinator can write where the request lies: shares that come while it is answered are not opened."""
    federation, roster, received, told = begun
    request = federation.settle(roster, received)
    first = read_answer(federation.answer("beta", request), federation.signers)
    real = answering.read_roster

    def exchanged(*arguments: object) -> Roster:
        (request / "shares" / "gamma.json").write_text("{}")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(answering, "read_roster", exchanged)
    answer = read_answer(federation.answer("alpha", request), federation.signers)
    assert answer.request == first.request and set(answer.own) == set(federation.names)


@pytest.mark.parametrize("name", ["request.json", "shares/alpha.json", "roster/agreement.json"])
def test_a_request_of_links_or_of_boundless_files_is_no_request(begun, name: str):
    federation, roster, received, _ = begun
    request = federation.settle(roster, received)
    (request / name).unlink()
    (request / name).symlink_to("/dev/zero")
    with pytest.raises(InputError, match="can be read"):
        federation.answer("alpha", request)
    (request / name).unlink()
    with open(request / name, "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(InputError, match="larger than"):
        federation.answer("alpha", request)


@pytest.mark.parametrize(
    ("environment", "words"),
    [({"CROSSFED_MINIMUM_SUM": "three"}, "'three', expected"), ({}, "")],
    ids=["wrong", "none"],
)
def test_a_sites_rules_are_its_environments(environment: dict[str, str], words: str):
    if words:
        with pytest.raises(ConfigurationError, match=words):
            site_rules(environment)
    else:
        assert site_rules(environment) == SiteRules()
        assert site_rules({"CROSSFED_MINIMUM_SUM": "4"}).minimum_sum == 4


def test_swapped_keys_are_refused(federation: Masking):
    """The coordinator puts a key of its own in gamma's place; it can sign as nobody but itself."""
    keys = {name: federation.keys(name) for name in federation.names}
    forged = json.loads((keys["gamma"] / "keys.json").read_text())
    forged["public_key"] = X25519PrivateKey.generate().public_key().public_bytes_raw().hex()
    good = federation.roster(list(keys.values()))
    bad = federation.place("roster")
    shutil.copytree(good, bad)
    (bad / "keys" / "gamma" / "keys.json").write_text(json.dumps(forged))
    with pytest.raises(InputError, match="gamma"):
        federation.read(bad)
    signed = federation.keys("gamma", signer="outsider")  # right in all but the signature
    shutil.rmtree(bad / "keys" / "gamma")
    shutil.copytree(signed, bad / "keys" / "gamma")
    with pytest.raises(InputError, match="is not signed by 'gamma'"):
        federation.read(bad)


def test_keys_of_an_earlier_round_are_refused(federation: Masking):
    old = [federation.keys(name) for name in federation.names]
    federation.round(steps(federation.names))
    roster = federation.roster([federation.keys("alpha", 1), federation.keys("beta", 1)], 1)
    shutil.copytree(old[2], roster / "keys" / "gamma")
    with pytest.raises(InputError, match="used before"):
        federation.read(roster)
    assert federation.roster_of(federation.roster([*old[:2], federation.keys("gamma", 1)], 1)).members == ["gamma"]


def test_an_earlier_pair_of_keys_of_this_round_is_refused_by_its_owner(federation: Masking):
    old = federation.keys("alpha")
    shutil.rmtree(federation.state("alpha"))
    roster = federation.roster([old, federation.keys("beta"), federation.keys("gamma")])
    with pytest.raises(InputError, match="not in .*used before"):
        federation.masked("alpha", roster, federation.plain("alpha", steps(federation.names)["alpha"]))


def test_shares_of_another_roster_are_that_facilitys_absence(begun):
    """Replayed shares: gamma's of an earlier attempt, in the update of this one."""
    federation, roster, received, told = begun
    second = federation.roster([federation.keys(name) for name in federation.names])
    now = {name: federation.masked(name, second, federation.plain(name, told[name])) for name in federation.names}
    shutil.copyfile(received["gamma"] / "shares.json", now["gamma"] / "shares.json")
    request = federation.settle(second, now)
    assert read_request(request).survivors == ["alpha", "beta"]
    answers = [federation.answer(name, request) for name in ("alpha", "beta")]
    federation.close(request, now, answers)
    assert error(moved(federation, 0), mean_of(told, {"alpha": 1.0, "beta": 1.0})) < 1e-5
    rows = {row.facility: row.reason for row in federation.archive.read_round(0).facilities}
    assert "used before" in rows["gamma"]


TOLD = [
    {"clip_norm": 1e-12},
    {"maximum_share": 1.0},
    {"weights": "equal"},
    {"minimum_sum": 3},
    {"moments": MaskedMoments(range=1e-12)},
]


@pytest.mark.parametrize("told", TOLD, ids=str)
def test_facilities_that_were_told_to_weigh_or_clip_in_another_way_are_not_unmasked_together(
    federation: Masking, told: dict[str, object]
):
    """All but alpha clip their steps to nothing, or weigh nothing: the sum of all would be alpha's update."""
    roster = federation.roster([federation.keys(name) for name in federation.names])
    moves, sent = steps(federation.names), {}
    for name in federation.names:
        settings = federation.masking if name == "alpha" else dataclasses.replace(federation.masking, **told)
        sent[name] = federation.place("update")
        read = read_roster(roster, settings, federation.signers)
        mask_update(
            federation.plain(name, moves[name]),
            received=federation.model(0),
            out=sent[name],
            residual_out=sent[name].with_name("residual"),
            member=PrivateKeys(state=federation.state(name)).of(read, name),
            settings=settings,
        )
    request = federation.settle(roster, {name: federation.receive(name, sent[name]) for name in sent})
    assert len(read_request(request).survivors) < 3, "an honest coordinator asks for no such sum"
    for survivors in (["alpha", "beta", "gamma"], ["alpha", "beta"], ["beta", "gamma"]):
        forged = asked(federation, request, survivors)
        for name in survivors:
            shares_path(forged, name).parent.mkdir(exist_ok=True)
            shutil.copy(sent[name] / "shares.json", shares_path(forged, name))
        with pytest.raises(InputError, match="or of another roster: they were used before"):
            federation.answer("alpha", forged)


def forged_roster(federation: Masking, keys: dict[str, Path]) -> Path:
    """A coordinator's own, from keys that an honest one would not put together."""
    roster = federation.roster(list(keys.values()))
    for name, path in keys.items():
        if not (roster / "keys" / name).exists():
            shutil.copytree(path, roster / "keys" / name)
    return roster


@pytest.mark.parametrize(
    ("claimed", "taken", "told", "words"),
    [
        (100, 10, "a", "was sent other training settings than"),
        (1700, 10, "0", "trains on (100|1700) sequences in round 0 and .* expected at most 16 times as many"),
        (100, 41, "0", "takes (10|41) steps in round 0 and .* (10|41), expected at most 4 times as many"),
    ],
)
def test_nobody_answers_for_facilities_that_were_told_to_train_otherwise(
    federation: Masking, claimed: int, taken: int, told: str, words: str
):
    """All but alpha train with a learning rate of nearly nothing, or hardly at all: the sum would be alpha's update."""
    federation.tokens |= {"alpha": claimed}
    federation.training_steps |= {"alpha": taken}
    keys = {n: federation.keys(n, walk=(told if n == "alpha" else "0") * 64) for n in federation.names}
    roster, moves = forged_roster(federation, keys), steps(federation.names)
    sent = {name: federation.masked(name, roster, federation.plain(name, moves[name])) for name in federation.names}
    request = federation.settle(roster, {name: federation.receive(name, sent[name]) for name in sent})
    for name in federation.names:
        with pytest.raises(InputError, match=words):
            federation.answer(name, request)


def test_what_else_a_facility_was_told_is_signed_where_earlier_versions_do_not_look(federation: Masking):
    plain = federation.keys("alpha")
    federation.told_else["alpha"] = "5" * 64
    path = federation.keys("alpha")
    assert json.loads((path / "keys.json").read_text()).keys() == json.loads((plain / "keys.json").read_text()).keys()
    assert (read_keys(plain, federation.signers)[0].told, read_keys(path, federation.signers)[0].told) == ("", "5" * 64)
    with_extra(path, "told", "6" * 64)
    with pytest.raises(InputError, match="signature|signed"):
        read_keys(path, federation.signers)


@pytest.mark.parametrize("key", ["step_norms", "training.drift_correction"])
def test_settings_that_tell_figures_of_a_single_update_are_refused_beside_masks(federation: Masking, key: str):
    """step_norms.json would lie beside the masked tensors, and the length of a walk stand in the report."""
    common = {"federation": "test", "facility": "alpha", "rounds": 9, "seed": 0}
    asked = {"step_norms": True} if key == "step_norms" else {"training": TrainingSettings(drift_correction=True)}
    assert FacilitySettings(**common | asked).masking is None
    with pytest.raises(ConfigurationError, match=f"{key} is true beside masking, expected false"):
        FacilitySettings(**common | asked, masking=federation.masking)


@pytest.mark.parametrize(("asked", "batch"), [(10, 10), (40, 10), (3, 10), (11, 10), (10, 11), (10, 1)])
def test_a_facility_masks_nothing_where_it_is_asked_for_other_steps_than_it_signed(
    federation: Masking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int, batch: int
):
    """By its model, which may ask for steps where settings allow it, or by settings that came after its keys.

    The steps were told to the others by its keys: until now up to 16 times more or fewer were taken all the same.
    """
    training = TrainingSettings(steps=10, batch_sequences=10)
    told = FacilitySettings(
        federation="test",
        facility="alpha",
        rounds=9,
        seed=0,
        training=dataclasses.replace(training, batch_sequences=batch),
        masking=federation.masking,
        most_steps=1000,
    )
    walk = walk_of(told)
    roster = federation.roster([federation.keys(name, walk=walk) for name in federation.names])
    shutil.copytree(federation.model(0), model := tmp_path / "model")
    if asked != 10:
        with_extra(model, STEPS, {"alpha": asked})
    if (asked, batch) == (10, 10):
        assert read_masking(told, federation.state("alpha"), roster, model, 0, dataset=tmp_path) is not None
        return
    with pytest.raises(InputError, match=f"asks 'alpha' for {asked} steps and .* its signed keys say 10 and 100"):
        read_masking(told, federation.state("alpha"), roster, model, 0, dataset=tmp_path)


@pytest.mark.parametrize(("skipped", "refused"), [(None, False), (1, False), (2, True), (16, True)])
def test_a_facility_whose_steps_moved_next_to_nothing_masks_nothing(
    federation: Masking, tmp_path: Path, skipped: int | None, refused: bool
):
    """Told to compute in float16, with a model whose gradients overflow there, while one facility is told otherwise."""
    roster = federation.roster([federation.keys(name) for name in federation.names])
    plain = federation.plain("alpha", steps(federation.names)["alpha"])
    report = json.loads((plain / "report.json").read_text())
    details = {} if skipped is None else {"steps_skipped": skipped}
    (plain / "report.json").unlink()
    (plain / "report.json").write_text(json.dumps(report | {"steps": 16, "details": details}))
    training = TrainingSettings(signing_key=str(federation.signers.parent / "alpha"))
    settings = FacilitySettings(
        federation="test", facility="alpha", rounds=9, seed=0, training=training, masking=federation.masking
    )
    state, out = federation.state("alpha"), tmp_path / "update"
    masks = Masked(settings=settings, state=state, member=PrivateKeys(state=state).of(federation.read(roster), "alpha"))
    if not refused:
        masks.make(plain, received=federation.model(0), key="k", out=out)
        assert (out / "shares.json").exists()
        return
    with pytest.raises(InputError, match=f"{skipped} of the 16 steps were skipped"):
        masks.make(plain, received=federation.model(0), key="k", out=out)
    assert not out.exists()


def test_keys_that_are_exchanged_once_their_signature_is_verified_mask_nothing(
    federation: Masking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The roster lies where the coordinator can write, and would mask for a key of the coordinator's own."""
    told = FacilitySettings(
        federation="test",
        facility="alpha",
        rounds=9,
        seed=0,
        training=TrainingSettings(steps=10, batch_sequences=10),
        masking=federation.masking,
    )
    roster = federation.roster([federation.keys(name, walk=walk_of(told)) for name in federation.names])
    honest, real = federation.read(roster), roster_file.verify_signature
    own = X25519PrivateKey.generate().public_key().public_bytes_raw().hex()

    def exchange(directory: Path, signer: str, allowed: Path) -> str:
        found, keys = real(directory, signer, allowed), roster / "keys" / "beta" / "keys.json"
        if signer == "beta":
            keys.write_text(json.dumps(json.loads(keys.read_text()) | {"public_key": own}))
        return found

    monkeypatch.setattr(roster_file, "verify_signature", exchange)
    found = read_masking(told, federation.state("alpha"), roster, federation.model(0), 0, dataset=tmp_path)
    assert found is not None and found.member.roster.keys == honest.keys


def test_a_facility_that_signs_other_settings_is_left_out_of_the_roster_and_the_round_goes_on(federation: Masking):
    """Its lie is its own absence: the others mask among themselves."""
    names = (*federation.names, "delta")
    four = Masking(root=federation.root / "four", signers=federation.signers, names=names)
    keys = [four.keys(name, walk=("d" if name == "delta" else "0") * 64) for name in names]
    out = four.place("roster")
    out.mkdir()
    refused = make_roster(out, archive=four.archive, settings=four.settings, model=four.model(), keys=keys)
    assert list(refused.values()) == ["'delta' signed other settings of training than most facilities"]
    roster = four.read(out)
    assert roster.members == list(federation.names)
    check_walks(roster, "alpha")


@pytest.mark.parametrize("point", ["00" * 32, "01" + "00" * 31, "ec" + "ff" * 30 + "7f"])
def test_a_public_key_that_makes_all_secrets_alike_is_its_own_facilitys_absence(federation: Masking, point: str):
    """The others' jobs would train, and fail as they mask with it."""
    names = (*federation.names, "delta")
    four = Masking(root=federation.root / "four", signers=federation.signers, names=names)
    keys = [four.keys(name) for name in names]
    told = json.loads((keys[-1] / roster_file.KEYS).read_text()) | {"public_key": point, "told": "0" * 64}
    lie = four.place("keys")
    lie.mkdir()
    write_keys(lie, Keys(**told), federation.signers.parent / "delta")
    out = four.place("roster")
    out.mkdir()
    refused = make_roster(out, archive=four.archive, settings=four.settings, model=four.model(), keys=[*keys[:3], lie])
    assert list(refused.values()) == ["the public key of 'delta' is none: all keys give the same secret"]
    assert four.read(out).members == list(federation.names)


def test_one_signing_key_is_one_facility(federation: Masking):
    """Its holder would know two of three updates, and the sum gives it the third."""
    text = federation.signers.read_text()
    gammas = next(line for line in text.splitlines() if line.startswith("gamma"))
    federation.signers.write_text(f"{text}{gammas.replace('gamma', 'beta', 1)}\n")
    keys = [federation.keys(name, signer="gamma" if name == "beta" else None) for name in federation.names]
    out, by_hand = federation.place("roster"), federation.place("roster")
    out.mkdir()
    by_hand.mkdir()
    make_roster(out, archive=federation.archive, settings=federation.settings, model=federation.model(), keys=keys[:1])
    write_roster(by_hand, read_agreement(out), dict(zip(federation.names, keys, strict=True)))
    shutil.rmtree(out)
    out.mkdir()
    with pytest.raises(ManifestError, match="'beta' and 'gamma' sign with one key .SHA256:.*a key of its own"):
        federation.read(by_hand)
    refused = make_roster(
        out, archive=federation.archive, settings=federation.settings, model=federation.model(), keys=keys
    )
    assert [reason[:38] for reason in refused.values()] == ["'beta' and 'gamma' sign with one key ("]


def test_an_answer_to_another_request_does_not_count(begun):
    federation, roster, received, _ = begun
    request = federation.settle(roster, received)
    answers = [federation.answer(name, request) for name in federation.names]
    told = read_answer(answers[0], federation.signers)
    replayed = federation.place("answer")
    replayed.mkdir()
    write_answer(replayed, dataclasses.replace(told, request="0" * 64), federation.signers.parent / "alpha")
    assert federation.close(request, received, [replayed, answers[1]])[1:] == (0, False)
    assert "answers the request 000000000000, expected " in federation.archive.read_note("stopped")["reason"]


def test_a_facility_that_lies_about_shares_is_found_and_named(begun):
    """Three answers, threshold two: the wrong one is told from the others, and the sum is right."""
    federation, roster, received, told = begun
    del received["gamma"]
    request = federation.settle(roster, received)
    answers = {name: federation.answer(name, request) for name in federation.names}
    honest = read_answer(answers["beta"], federation.signers)
    lie = federation.place("answer")
    lie.mkdir()
    wrong = {name: bytes(byte ^ 1 for byte in bytes.fromhex(share)).hex() for name, share in honest.own.items()}
    write_answer(lie, dataclasses.replace(honest, own=wrong), federation.signers.parent / "beta")
    assert federation.close(request, received, [answers["alpha"], lie, answers["gamma"]])[1:] == (1, True)
    assert error(moved(federation, 0), mean_of(told, {"alpha": 1.0, "beta": 1.0})) < 1e-5
    masking = json.loads((federation.archive.round_directory(0) / "round.json").read_text())["aggregation"]["details"]
    assert list(masking["masking"]["wrong_answers"]) == ["beta"]


def test_a_wrong_share_that_a_liar_sealed_for_another_does_not_silence_that_one(begun):
    """What was sealed for beta is wrong, and so is the liar's answer on beta's seed: without beta's other shares the
    mask of beta did not come off, and the round stopped with beta's name."""
    federation, roster, received, told = begun
    alpha, beta = (
        PrivateKeys(state=federation.state(name)).of(federation.read(roster), name) for name in ("alpha", "beta")
    )
    shares = json.loads((received["alpha"] / "shares.json").read_text())
    content = json.loads(beta.open(bytes.fromhex(shares["sealed"]["beta"]), "alpha"))
    content[""] = flipped(content[""])
    shares["sealed"]["beta"] = alpha.seal(json.dumps(content).encode(), "beta").hex()
    (received["alpha"] / "shares.json").write_text(json.dumps(shares))
    request = federation.settle(roster, received)
    answers = {name: federation.answer(name, request) for name in federation.names}
    first, lie = read_answer(answers["alpha"], federation.signers), federation.place("answer")
    lie.mkdir()
    own = first.own | {"beta": flipped(first.own["beta"])}
    write_answer(lie, dataclasses.replace(first, own=own), federation.signers.parent / "alpha")
    assert federation.close(request, received, [lie, answers["beta"], answers["gamma"]])[1:] == (1, True)
    assert error(moved(federation, 0), mean_of(told, dict.fromkeys(federation.names, 1.0))) < 1e-5
    masking = json.loads((federation.archive.round_directory(0) / "round.json").read_text())["aggregation"]["details"]
    assert masking["masking"]["wrong_answers"] == {
        "alpha": "its share of a seed of 'beta' is wrong: it lies, or 'beta' sealed a wrong one for it",
        "beta": "its share of a seed of 'alpha' is wrong: it lies, or 'alpha' sealed a wrong one for it",
    }


def flipped(share: str) -> str:
    """Another share of as many bytes."""
    return bytes(byte ^ 1 for byte in bytes.fromhex(share)).hex()


def test_a_facility_whose_own_shares_are_wrong_is_named(begun):
    federation, roster, received, _ = begun
    shares = json.loads((received["beta"] / "shares.json").read_text())
    shares["commitments"][""] = "0" * 64
    (received["beta"] / "shares.json").write_text(json.dumps(shares))
    request = federation.settle(roster, received)
    answers = [federation.answer(name, request) for name in federation.names]
    assert federation.close(request, received, answers)[1:] == (0, False)
    assert "a seed of 'beta'" in federation.archive.read_note("stopped")["reason"]


def test_a_facility_that_signs_as_another_has_no_keys(federation: Masking):
    roster = federation.roster(
        [federation.keys("gamma", signer="beta"), federation.keys("alpha"), federation.keys("beta")]
    )
    assert federation.roster_of(roster).members == ["alpha", "beta"]


def test_a_plain_update_is_refused_where_masked_ones_are_agreed(federation: Masking):
    plain = federation.plain("alpha", steps(federation.names)["alpha"])
    failure = json.loads((federation.receive("alpha", plain) / "failure.json").read_text())
    assert failure["kind"] == "refused" and "expected masked" in failure["reason"]
    assert read_manifest(plain).encoding == "full"


@pytest.mark.parametrize("lost", [(), ("c",)])
def test_given_the_sum_the_transcript_says_nothing_of_single_updates(lost: tuple[str, ...]):
    """Two sets of updates with one sum, over all seeds: what the coordinator sees has the same distribution.

    Exhaustive in a small world: numbers modulo 4, every value of every stream. The coordinator sees each masked
    number, and the streams that are given away.
    """
    names, survivors = ["a", "b", "c"], [name for name in ["a", "b", "c"] if name not in lost]

    def transcripts(values: dict[str, int]) -> dict[tuple[int, ...], int]:
        counts: dict[tuple[int, ...], int] = {}
        for drawn in np.ndindex(*(4,) * 6):
            own = dict(zip(names, drawn[:3], strict=True))
            pair = dict(zip(["ab", "ac", "bc"], drawn[3:], strict=True))

            def common(one: str, other: str, pair: dict[str, int] = pair) -> int:
                return pair["".join(sorted((one, other)))] * (1 if one < other else -1)

            sent = {
                one: (values[one] + own[one] + sum(common(one, other) for other in names if other != one)) % 4
                for one in survivors
            }
            given = [own[one] for one in survivors] + [common(one, two) % 4 for one in survivors for two in lost]
            seen = (*sent.values(), *given)
            counts[seen] = counts.get(seen, 0) + 1
        return counts

    one = transcripts({"a": 0, "b": 1, "c": 3})
    assert one == transcripts({"a": 2, "b": 3, "c": 3})  # the same sum, modulo 4, with c and without
    assert one != transcripts({"a": 1, "b": 1, "c": 3})  # another sum is seen to be another


def test_the_masking_of_the_product_maps_seeds_of_one_set_to_seeds_of_the_other():
    """The same with the product's own arithmetic: for another set with the same sum there are streams that give the
    same masked numbers and the same streams given away, so each transcript is as likely under either.

    Alpha's step grows by d and beta's shrinks by it, in units; then the stream that the two have in common, which
    nobody gives away, is smaller by d.
    """
    rng = np.random.default_rng(5)
    weights = {"alpha": 1.0, "beta": 1.0, "gamma": 1.0}
    point = fixed_point(16, 0.01, weights)
    one = {name: rng.normal(0, 1e-3, 64).astype(np.float32) for name in weights}
    difference = (rng.integers(-200, 200, 64) * point.scale).astype(np.float32)
    two = {"alpha": one["alpha"] + difference, "beta": one["beta"] - difference, "gamma": one["gamma"]}
    rest = np.empty(64, np.float32)
    units = [{name: point.encode(step, 1.0, rest).copy() for name, step in steps.items()} for steps in (one, two)]
    assert not np.array_equal(units[0]["alpha"], units[1]["alpha"])
    moved_by = units[1]["alpha"] - units[0]["alpha"]
    assert np.array_equal(units[0]["beta"] - units[1]["beta"], moved_by)  # so the sums are equal
    buffer = MaskBuffer(64, 16)
    seeds = {pair: bytes([number] * 32) for number, pair in enumerate(["alpha", "beta", "ab", "ag", "bg"])}

    def sent(step: np.ndarray, *masks: tuple[int, str]) -> np.ndarray:
        named = [(sign, seeds[name]) for sign, name in masks]
        masker = Masker(named, piece=64, bits=16, weight=1.0, factor=1.0)
        return masker.mask(Stored(values=step, dtype="F32"), None, point, 0)[0]

    first = {
        "alpha": sent(one["alpha"], (1, "alpha"), (1, "ab"), (1, "ag")),
        "beta": sent(one["beta"], (1, "beta"), (-1, "ab"), (1, "bg")),
    }
    swapped = buffer.read(seeds["ab"], 0, 64) - moved_by  # uniform if the stream is
    second = {
        "alpha": sent(two["alpha"], (1, "alpha"), (1, "ag")),
        "beta": sent(two["beta"], (1, "beta"), (1, "bg")),
    }
    assert np.array_equal(first["alpha"], second["alpha"] + swapped)
    assert np.array_equal(first["beta"], second["beta"] - swapped)


def test_so_it_is_with_second_moments(tmp_path: Path, signers: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    """Alpha's second moments are larger by d in each number, and beta's smaller: with other values of the stream that
    the two have in common, the files that they send are the same bytes; so the coordinator cannot tell one from the
    other. All else that it sees of second moments, the file's header, is the same, too."""
    federation = Masking(root=tmp_path, signers=signers, moments=MaskedMoments(range=1.0))
    units = Units(largest=1.0, weights=dict.fromkeys(federation.names, 1.0))
    rng = np.random.default_rng(8)
    one = {name: units.encode(rng.uniform(0.2, 0.8, 1000) * 1e-6, 1.0) for name in federation.names}
    moved_by = rng.integers(-(2**20), 2**20, 1000).astype(np.int64).view(np.uint64)
    two = {"alpha": one["alpha"] + moved_by, "beta": one["beta"] - moved_by, "gamma": one["gamma"]}
    place = {"v": Factors(np.zeros(999, np.float32))}
    values = dict[str, np.ndarray]()
    monkeypatch.setattr(Units, "encode", lambda self, content, weight: values["now"].copy())
    monkeypatch.setattr(mask_moments, "has_factors", lambda directory: False)
    swapped = {seed_of(bytes([9] * 32)): moved_by}

    class Other(MaskBuffer):
        def read(self, seed: bytes, start: int, count: int) -> np.ndarray:
            stream = super().read(seed, start, count)
            return stream - swapped[seed][start : start + count] if seed in swapped else stream

    def sent(numbers: np.ndarray, out: str, masks: list[tuple[int, int]], buffer: type[MaskBuffer]) -> bytes:
        values["now"] = numbers
        monkeypatch.setattr(mask_moments, "MaskBuffer", buffer)
        (tmp_path / out).mkdir()
        mask_moments.mask_moments(
            tmp_path,
            tmp_path / out,
            tmp_path,
            {"v": place["v"].rows.shape},
            facility="alpha",
            masks=[(sign, bytes([number] * 32)) for sign, number in masks],
            weights={"alpha": 1.0},
            sent=MaskedMoments(range=1.0),
        )
        (path,) = (tmp_path / out / "second_moments").glob("*.safetensors")
        return path.read_bytes()

    for name, masks in {"alpha": [(1, 1), (1, 9), (1, 4)], "beta": [(1, 2), (-1, 9), (1, 5)]}.items():
        first = sent(one[name], f"{name}-1", masks, MaskBuffer)
        assert first == sent(two[name], f"{name}-2", masks, Other)
        assert first != sent(two[name], f"{name}-3", masks, MaskBuffer)


def test_streams_of_second_moments_are_others_than_those_of_the_update():
    """A number modulo 2^64 under a stream that also masks weights would give these away."""
    seed = bytes(range(32))
    assert seed_of(seed) != seed and len(seed_of(seed)) == 32
    update = MaskBuffer(4096, 16).read(seed, 0, 4096).copy().view(np.uint64)
    moments = MaskBuffer(1024, 64).read(seed_of(seed), 0, 1024)
    assert not set(update.tolist()) & set(moments.tolist())


def uniform(path: Path, size: int) -> bool:
    """Whether the last bytes of a file are spread as evenly as random ones."""
    raw = np.frombuffer(path.read_bytes()[-size:], np.uint8)
    expected = len(raw) / 256
    counts = np.bincount(raw, minlength=256)
    return float(((counts - expected) ** 2 / expected).sum()) < 400  # chi-squared, 255 degrees of freedom


def test_masked_second_moments_look_like_noise(federation: Masking):
    """Also where a facility has none."""
    federation.moments = MaskedMoments(range=1.0)
    roster = federation.roster([federation.keys(name) for name in federation.names])
    update = federation.masked("alpha", roster, federation.plain("alpha", steps(federation.names)["alpha"]))
    (path,) = (update / "second_moments").glob("*.safetensors")
    assert uniform(path, 6400)


def test_a_masked_update_looks_like_noise(begun):
    """The bytes that are sent are uniform, though all steps are small."""
    _, _, received, _ = begun
    assert uniform(received["alpha"] / "model.safetensors", 400_000)
