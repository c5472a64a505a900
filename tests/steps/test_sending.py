"""Models that travel to facilities as differences: who gets one, who gets the whole model, and why."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from coordinator.aggregation.settings import AggregationSettings
from coordinator.archive.rewind import rewind
from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from coordinator.config.settings import CoordinatorSettings, SendingSettings
from coordinator.engine.render import write_rendered
from coordinator.steps.aggregate import close_round
from coordinator.steps.arrived import CollectedRound, sort_out
from coordinator.steps.incomplete import number_of_attempt
from coordinator.steps.send import outgoing
from coordinator.steps.start import start
from facility.exchange.errors import CheckpointError, InputError
from facility.exchange.messages.manifest import read_manifest, verify_manifest
from facility.exchange.messages.report import Failure
from facility.exchange.messages.report import write as write_report
from facility.rounds.models import Models, digest_of, note_kept_model
from tests.aggregation.make import read_all
from tests.aggregation.updates import write_update
from tests.engine.engines import crossfed
from tests.federations import write_federation
from tests.pico import save_pico

SETTINGS = CoordinatorSettings(
    federation="f", rounds=4, facilities=["a", "b"], retries=1, sending=SendingSettings(encoding="delta-int8")
)

SETTINGS_OF_MANY = dataclasses.replace(SETTINGS, rounds=9)


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    found = Archive(tmp_path / "archive")
    start(found, save_pico(tmp_path / "model", dtype="bfloat16"), SETTINGS)
    return found


def update(archive: Archive, facility: str, number: int, *, keeps: bool = True) -> Path:
    model = archive.model_for(number)
    made = write_update(archive.path.parent / f"{facility}{number}", model, facility, round=number, move=0.01)
    if keeps:
        note_kept_model(made, read_manifest(model).content_sha256)
    return made


def close(archive: Archive, number: int, *updates: Path) -> int:
    arrived = sort_out(updates)
    return close_round(
        CollectedRound(
            archive=archive, settings=SETTINGS, model=archive.model_for(number), number=number, arrived=arrived
        )
    )[1]


def sent(archive: Archive, facility: str, number: int) -> str:
    return str(outgoing(archive, SETTINGS, facility, number))


def test_only_a_facility_that_keeps_the_model_of_the_round_before_gets_the_difference(archive: Archive):
    assert sent(archive, "a", 0) == "full: there is no model of a round before"
    close(archive, 0, update(archive, "a", 0), update(archive, "b", 0, keeps=False))
    assert sent(archive, "a", 1) == "delta-int8"
    assert sent(archive, "b", 1) == "full: it has not reported that it keeps the model of round 0"
    assert sent(archive, "c", 1) == "full: it has not reported that it keeps the model of round 0"  # new
    assert str(outgoing(archive, dataclasses.replace(SETTINGS, sending=SendingSettings()), "a", 1)) == "full"
    failure = archive.path.parent / "failed"
    failure.mkdir()
    write_report(failure, Failure(facility="a", round=1, reason="its disk was lost"))
    assert close(archive, 1, failure, update(archive, "b", 1)) == 1  # asked for again
    assert sent(archive, "a", 1) == "full: it failed at round 1 before"
    close(archive, 1, *sorted(archive.path.parent.glob("b1")))
    row = archive.read_round(1).facilities[0]
    assert (row.facility, row.sent) == ("b", "full: it has not reported that it keeps the model of round 0")
    assert row.holds == read_manifest(archive.model_for(1)).content_sha256
    message = archive.read_round(1).message
    assert message["encoding"] == "delta-int8" and message["bytes"] < 0.6 * message["model_bytes"]
    assert sent(archive, "b", SETTINGS.rounds) == "delta-int8"  # the evaluation after an early end
    whole = outgoing(archive, SETTINGS, "a", 2)
    assert whole.bytes == message["model_bytes"] and whole.path == archive.model_for(2)


@pytest.mark.parametrize("rule", ["mean", "krum"])
def test_who_failed_at_a_round_that_ended_the_run_is_sent_the_whole_model_by_the_next_start(
    archive: Archive, rule: str
):
    """Facilities that had lost their kept models were sent the same difference by every start, and the federation never
    went on."""
    settings = dataclasses.replace(SETTINGS, retries=0, minimum_facilities=2)
    close(archive, 0, update(archive, "a", 0), update(archive, "b", 0))
    if rule == "krum":  # which compares three or more: the round cannot be made of two
        settings = dataclasses.replace(
            settings, minimum_facilities=1, aggregation=AggregationSettings(rule="krum", byzantine=0)
        )
    assert [sent(archive, name, 1) for name in "ab"] == ["delta-int8"] * 2
    failure = archive.path.parent / "failed"
    failure.mkdir()
    write_report(failure, Failure(facility="a", round=1, reason="the model arrived as a difference"))
    arrived = sort_out([failure, update(archive, "b", 1)])
    try:
        ended = close_round(
            CollectedRound(archive=archive, settings=settings, model=archive.model_for(1), number=1, arrived=arrived)
        )
        assert rule == "mean" and not ended.proceed and archive.read_note("stopped")
    except InputError:
        assert rule == "krum"
    start(archive, archive.path.parent / "model", settings)
    assert [sent(archive, name, 1) for name in "ab"] == ["full: it failed at round 1 before", "delta-int8"]
    assert number_of_attempt(archive, 1) == 1, "no retry is used up"


@pytest.mark.parametrize("back", [(3,), (2,), (3, 2)])
def test_after_a_rewind_every_facility_can_read_what_it_is_sent(
    archive: Archive, tmp_path: Path, back: tuple[int, ...]
):
    """It keeps the two models that it received last, which may be of rounds that were set aside."""
    kept = Models(tmp_path / "state")
    for number in range(4):
        kept.whole(outgoing(archive, SETTINGS_OF_MANY, "a", number).path)
        close(archive, number, update(archive, "a", number))
    kept.whole(outgoing(archive, SETTINGS_OF_MANY, "a", 4).path)
    for to in back:
        rewind(archive, to)
    travels = outgoing(archive, SETTINGS_OF_MANY, "a", to)
    assert kept.whole(travels.path) == kept.place(read_manifest(archive.model_for(to)).content_sha256)
    one_back = back == (3,)
    assert str(travels) == ("delta-int8" if one_back else f"full: {travels.reason}")
    assert one_back or f"crossfed rewind went back to round {to}" in travels.reason
    shutil.rmtree(archive.path.parent / f"a{to}")
    close(archive, to, update(archive, "a", to))
    assert str(outgoing(archive, SETTINGS_OF_MANY, "a", to + 1)) == "delta-int8"


def test_the_newest_model_is_evaluated_where_rounds_was_lowered_below_what_is_done(archive: Archive):
    for number in range(3):
        close(archive, number, update(archive, "a", number), update(archive, "b", number))
    lowered = dataclasses.replace(SETTINGS, rounds=1)
    assert outgoing(archive, lowered, "a", 1).path == archive.message_for(3), "not that of round 1, long gone there"


def test_facilities_hold_what_the_archive_holds_and_keep_two_models(archive: Archive, tmp_path: Path):
    kept = Models(tmp_path / "state")
    for number in range(3):
        travels = outgoing(archive, SETTINGS, "a", number).path
        model = kept.whole(travels)
        assert kept.whole(travels) == model  # asked for again
        here, there = verify_manifest(model), verify_manifest(archive.model_for(number))
        assert here.content_sha256 == there.content_sha256 == digest_of(read_manifest(travels))
        assert (model / "config.json").read_bytes() == (archive.model_for(number) / "config.json").read_bytes()
        assert len(list(kept.directory.iterdir())) == min(number + 1, 2)
        close(archive, number, update(archive, "a", number))
    # What the encoding loses of a round's step is part of the next difference: nothing drifts away from the master.
    state, error = archive.round_directory(2) / "state", archive.read_round(2).message["relative_error"]
    assert read_manifest(state).extra["model_sha256"] == read_manifest(archive.model_for(3)).content_sha256
    assert 0 < error < 0.01


def test_a_lost_or_damaged_reference_is_an_error_that_names_it(archive: Archive, tmp_path: Path):
    kept = Models(tmp_path / "state")
    first = kept.whole(archive.model_for(0))
    close(archive, 0, update(archive, "a", 0))
    message = outgoing(archive, SETTINGS, "a", 1).path
    digest = read_manifest(first).content_sha256
    with pytest.raises(
        InputError, match=f"difference to the one with sha256 {digest[:12]}.*keeps none in .*sent in full"
    ):
        Models(tmp_path / "elsewhere").whole(message)
    weights = bytearray((first / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (first / "model.safetensors").unlink()  # what is linked to it elsewhere stays
    (first / "model.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError, match="decodes to a model with sha256 .* send it in full"):
        kept.whole(message)
    assert not list(kept.directory.iterdir())
    assert verify_manifest(archive.model_for(0))


def test_a_model_that_a_full_disk_cut_off_takes_no_room_of_the_next_one(
    archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The half that had fitted stayed, and filled the disk of every later round."""
    kept = Models(tmp_path / "state")

    def fill(source: Path, target: Path) -> None:
        assert not list(kept.directory.iterdir()), "what a killed job left goes first"
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    (kept.directory / ".killed.1").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr("facility.rounds.models.link_tree", fill)
        with pytest.raises(OSError, match="No space"):
            kept.whole(archive.model_for(0))
    assert not list(kept.directory.iterdir())
    assert kept.whole(archive.model_for(0)).is_dir()


def test_a_sparse_message_leaves_the_master_halfway(archive: Archive):
    """Between the mean and what the facilities hold, sealed anew, and good to go on from."""
    settings = dataclasses.replace(SETTINGS, sending=SendingSettings(encoding="sparse", sparse_density=0.3))
    arrived = sort_out([update(archive, "a", 0)])
    wanted = read_all(next(iter(arrived.updates.values())))  # of one update under the mean rule
    settings = dataclasses.replace(settings, aggregation=AggregationSettings(rule="mean"))
    close_round(
        CollectedRound(archive=archive, settings=settings, model=archive.model_for(0), number=0, arrived=arrived)
    )
    held, master = read_all(archive.model_for(1)), read_all(archive.round_directory(0) / "state" / "master")
    verify_manifest(archive.round_directory(0) / "state")
    missed = 0.0
    for name, tensor in master.items():
        torch.testing.assert_close(tensor, (wanted[name].float() + held[name].float()) / 2, rtol=1e-6, atol=1e-8)
        missed += float((wanted[name].float() - held[name].float()).norm())
    assert missed > 0
    arrived = sort_out([update(archive, "a", 1)])
    assert (
        close_round(
            CollectedRound(archive=archive, settings=settings, model=archive.model_for(1), number=1, arrived=arrived)
        )[1]
        == 2
    )


def test_models_sent_without_loss_are_those_of_whole_models(tmp_path: Path):
    """Of rounds with the same updates: bit for bit, in the archive and at a facility that has had differences alone."""
    made: list[list[dict[str, torch.Tensor]]] = []
    start_from = save_pico(tmp_path / "model", dtype="bfloat16")
    for encoding in ("full", "changed"):
        settings = dataclasses.replace(SETTINGS, sending=SendingSettings(encoding=encoding))
        archive, kept = Archive(tmp_path / encoding / "archive"), Models(tmp_path / encoding / "state")
        start(archive, start_from, settings)
        made.append([])
        for number in range(3):
            travels = outgoing(archive, settings, "a", number)
            assert travels.encoding == (encoding if number else "full")
            held = kept.whole(travels.path)
            assert read_manifest(held).content_sha256 == read_manifest(archive.model_for(number)).content_sha256
            made[-1].append(read_all(held))
            arrived = sort_out([update(archive, "a", number)])
            close_round(
                CollectedRound(
                    archive=archive, settings=settings, model=archive.model_for(number), number=number, arrived=arrived
                )
            )
    whole, exact = made
    for one, other in zip(whole, exact, strict=True):
        assert all(torch.equal(tensor.view(torch.int16), other[name].view(torch.int16)) for name, tensor in one.items())
    assert any(not torch.equal(whole[1][name], whole[2][name]) for name in whole[1])


def test_a_model_with_other_tensors_is_sent_whole_and_says_so(archive: Archive, monkeypatch: pytest.MonkeyPatch):
    settings = dataclasses.replace(
        SETTINGS, aggregation=dataclasses.replace(SETTINGS.aggregation, output_dtype="float32")
    )
    arrived = sort_out([update(archive, "a", 0)])
    close_round(
        CollectedRound(archive=archive, settings=settings, model=archive.model_for(0), number=0, arrived=arrived)
    )
    assert "is F32" in archive.read_round(0).message["reason"] and "BF16" in sent(archive, "a", 1)


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="ssh-keygen is absent")
@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["delta-int8", pytest.param("sparse", marks=pytest.mark.nightly)])
def test_signed_rounds_encoded_both_ways_and_a_facility_that_lost_its_models(tmp_path: Path, encoding: str):
    signers = []
    for name in "ab":
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
        signers.append(f"{name} {(tmp_path / f'{name}.pub').read_text()}")
    (tmp_path / "allowed").write_text("".join(signers))
    training = {"encoding": encoding, "export_dtype": "float32", "optimizer_state": "personal"}
    path = write_federation(
        tmp_path,
        ["a", "b"],
        rounds=3,
        training=training,
        sending={"encoding": encoding},
        final_evaluation=False,
        aggregation={"allowed_signers": str(tmp_path / "allowed")},
    )
    text = path.read_text()
    for name in "ab":
        text = text.replace(f"- name: {name}\n", f"- name: {name}\n  training: {{signing_key: {tmp_path / name}}}\n")
    path.write_text(text)
    write_rendered(read_federation(path))
    states = {name: tmp_path / "sites" / name / ".crossfed" / "pico" / name / "models" for name in "ab"}
    process = crossfed("run", "--quiet", "-f", path, folder=tmp_path / "engine")
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "round 0: complete" in line:
            shutil.rmtree(states["b"])
    process.wait()
    assert process.returncode == 0, "".join(seen)
    archive = Archive(read_federation(path).archive_path)
    rounds = [{row.facility: row for row in entry.facilities} for entry in archive.history()]
    assert [rounds[n]["a"].sent.split(":")[0] for n in range(3)] == ["full", encoding, encoding]
    assert rounds[1]["b"].sent == encoding
    assert rounds[2]["b"].sent == "full: it has not reported that it keeps the model of round 1"
    assert [rounds[n]["b"].status for n in range(3)] == ["ok", "failed", "ok"]
    assert "it has to be sent in full" in rounds[1]["b"].reason and "keeps none" in rounds[1]["b"].reason
    whole = rounds[0]["a"].sent_bytes
    assert rounds[2]["a"].sent_bytes < 0.6 * whole and rounds[2]["a"].received_bytes < 0.6 * whole
    assert rounds[2]["b"].sent_bytes == whole
    for name, models in (("a", 2), ("b", 1)):
        assert len(list(states[name].iterdir())) == models
        assert Models(states[name].parent).holds(read_manifest(archive.model_for(2)).content_sha256)
    losses = [entry.global_loss for entry in archive.history()]
    assert losses[0] > losses[1] > losses[2]  # type: ignore[operator]
