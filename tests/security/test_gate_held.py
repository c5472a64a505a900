"""The model of a job that is not over stays as it was signed: the job compares it once, and reads it much later."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import pytest

from facility import gate
from facility.exchange.messages import order
from facility.exchange.messages.manifest import read_manifest, with_run, write_manifest
from facility.gating import approval, jobs, queue, transfers
from facility.gating.held import Target, places_of
from facility.gating.ledger import ledger_locked, read_ledger
from facility.gating.policy import read_policy
from facility.gating.refusal import Refused
from facility.gating.session import Session
from facility.rounds.models import Models
from tests.security.test_gate import KEY, Gate, packed, site  # noqa: F401 (a fixture)

ALTER = [
    ("put-piece {}/model.safetensors 0 7", b"unlike!"),
    ("put-file {}/model.safetensors 600", b"unlike!"),
    ("put-file {}/more 600", b"unlike!"),
    ("put-tree {}", packed(manifest=b"{}")),
    ("put-tree {}/..", packed(manifest=b"{}")),
    ("remove {}/manifest.json", b""),
    ("remove {}", b""),
    ("remove {}/..", b""),
    ("link {w}/else {}/model.safetensors", b""),
    ("link {w}/else {}", b""),
    ("put-piece {w}/else/weights 0 7", b"unlike!"),
    ("remove {w}/else", b""),
    ("make {}/moments {}/walk", b""),
]
"""Requests that would exchange what a job reads; `else` holds a file to which the model links."""


def content(site: Gate) -> dict[str, bytes]:  # noqa: F811
    places = [site.workdir / "in" / "model", site.workdir / "else"]
    return {
        str(path): path.read_bytes() if path.is_file() else b"" for place in places for path in sorted(place.iterdir())
    }


def submitted(site: Gate) -> Path:  # noqa: F811
    """A job in the queue whose model has a link to a file elsewhere in the workdir; returns the model."""
    model, other = site.workdir / "in" / "model", site.workdir / "else"
    for place in (model, other):
        place.mkdir(parents=True)
    (other / "weights").write_bytes(b"1234567")
    (model / "linked.safetensors").symlink_to(other / "weights")
    assert site.ask(site.round())[0] == 0
    site.active = "17\n"
    return model


@pytest.mark.parametrize(("request_", "data"), ALTER)
def test_no_request_alters_the_model_of_a_job_before_that_is_over(site: Gate, request_: str, data: bytes):  # noqa: F811
    model = submitted(site)
    request_ = f"crossfed-gate {request_.replace('{}', str(model)).format(w=site.workdir)}".replace("/model/..", "")
    before = content(site)
    code, _, error = site.ask(request_, data)
    assert code == 77 and "the model of job 17, which is not over" in error
    assert content(site) == before and site.log()[-1]["what"] == "refused"
    site.active = ""
    assert site.ask(request_, data)[0] == 0, "once it is over, whatever the coordinator likes"


def test_what_lies_beside_the_model_may_be_written_meanwhile(site: Gate):  # noqa: F811
    model = submitted(site)
    assert site.ask(f"crossfed-gate make {site.workdir} {model} {model.parent} {site.workdir}/in/more")[0] == 0
    for word in ("in/other", "in/model2", "next"):
        assert site.ask(f"crossfed-gate put-file {site.workdir}/{word} 600", b"x")[0] == 0


def test_a_piece_that_began_before_its_job_and_comes_after_is_refused(site: Gate, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    """The connection stays open until the job has compared the model."""
    model, request = site.workdir / "in" / "model", site.round()

    class Late(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            assert queue_job(site, request)
            return super().read(size)

    monkeypatch.setattr(transfers, "_input", lambda: Late(b"unlike!"))
    code, _, error = site.ask(f"crossfed-gate put-piece {model}/model.safetensors 0 7")
    assert code == 77 and "which is not over" in error
    assert (model / "model.safetensors").read_bytes() == b"weights"


def queue_job(site: Gate, request: str) -> bool:  # noqa: F811
    """As another connection's request that submits a job."""
    session = Session(policy=read_policy(site.home / "policy.yml"), key=KEY, state=site.home / "gate")
    done = gate.serve(session, request) == 0
    site.active = "17\n"
    return done


def test_a_job_that_a_killed_gate_never_submitted_holds_nothing_for_ever(site: Gate, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    submitted(site)
    ledger = site.home / "gate" / "ledger.json"
    with ledger_locked(ledger) as (found, _):
        found.jobs[0].id = "reserved-1.0"
    remove = f"crossfed-gate remove {site.workdir}/in/model"
    site.active = ""
    assert site.ask(remove)[0] == 77, "it may be about to be submitted"
    with ledger_locked(ledger) as (found, _):
        found.jobs[0].submitted -= 700
    site.active = "18\n"
    assert site.ask(remove)[0] == 77, "it was submitted, and the gate killed before it could note its name"
    site.active = ""
    assert site.ask(remove)[0] == 0
    assert read_ledger(ledger).jobs[0].ended


def test_a_job_whose_gate_was_killed_as_it_submitted_is_one_of_ours_once_it_is_listed(
    site: Gate,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    """Its coordinator learns its id from the queue, and was refused an answer about it: the job ran for nobody."""

    class Killed(BaseException):
        pass

    def killed(*_: object) -> str:
        raise Killed

    request, enqueue = site.round(), queue.submit_script
    name = "crossfed-heron-alpha"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(queue, "submit_script", killed)
        site.ask(request)
    assert queue.submit_script is enqueue and read_ledger(site.home / "gate" / "ledger.json").jobs[0].unnamed(name)
    site.active = ""
    assert site.ask(f"crossfed-gate jobs {name}")[0] == 0 and site.ask("crossfed-gate states 18")[0] == 77
    site.active = "18\n"
    assert site.ask("crossfed-gate states 18")[0] == 77, "of this name, or of another: the listing says it"
    assert site.ask(f"crossfed-gate jobs {name}")[:2] == (0, b"18\n")
    (job,) = read_ledger(site.home / "gate" / "ledger.json").jobs
    assert job.id == "18" and job.directory == str(site.workdir / "job")
    site.active = ""
    assert site.ask("crossfed-gate ending 18")[0] == 0, "also after its end"
    (found,) = [entry for entry in site.log() if entry["what"] == "found"]
    assert (found["job"], found["name"]) == ("18", name)
    site.active = "18\n19\n"
    assert site.ask(f"crossfed-gate jobs {name}")[0] == 0 and site.ask("crossfed-gate states 19")[0] == 77


@pytest.mark.parametrize("scheduler", ["slurm", "ssh"])
def test_a_job_that_a_killed_gate_never_submitted_uses_no_hours_of_the_day(
    site: Gate,  # noqa: F811
    scheduler: str,
    monkeypatch: pytest.MonkeyPatch,
):
    """It counted with its whole time limit for a day, and the next jobs were refused."""
    submitted(site)
    site.active, there = "18\n", [1]
    monkeypatch.setattr(queue, "processes", lambda name: there)
    site.policy(node_hours_per_day=3.0, scheduler=scheduler)
    with ledger_locked(site.home / "gate" / "ledger.json") as (found, _):
        found.jobs[0].id, found.jobs[0].submitted = "reserved-1.0", found.jobs[0].submitted - 700
    session = Session(policy=read_policy(site.home / "policy.yml"), key=KEY, state=site.home / "gate")
    name = session.job_name("heron")
    with pytest.raises(Refused, match="2.00 were used or reserved"):
        jobs.reserve_job(session, name, site.workdir)
    site.active = ""
    there.clear()
    assert jobs.reserve_job(session, name, site.workdir).id.startswith("reserved-")
    with pytest.raises(Refused, match="2.19 were used or reserved"):
        jobs.reserve_job(session, name, site.workdir)  # the one just entered may be about to be submitted


def test_on_a_host_without_a_queue_processes_say_whether_it_is_over(site: Gate, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    model = submitted(site)
    site.policy(scheduler="ssh")
    there = [1]
    monkeypatch.setattr(queue, "processes", lambda name: there)
    with ledger_locked(site.home / "gate" / "ledger.json") as (found, _):
        found.jobs[0].id, found.jobs[0].submitted = "reserved-1.0", found.jobs[0].submitted - 700
    assert site.ask(f"crossfed-gate remove {model}")[0] == 77
    there.clear()
    assert site.ask(f"crossfed-gate remove {model}")[0] == 0


def test_a_manifest_that_is_exchanged_while_it_is_verified_is_the_one_that_was_verified(
    site: Gate,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
):
    """Signed is a model that the policy does not list; what is read of it says that it is another."""
    request, model = site.round(), site.workdir / "in" / "model"
    listed = site.folder / "listed"
    shutil.copytree(model, listed)
    site.policy(models=[read_manifest(listed).content_sha256])
    (model / "model.safetensors").write_bytes(b"other weights")
    write_manifest(model, read_manifest(listed))
    with_run(model, "b" * 32)
    site.sign()
    signed = (model / "manifest.json").read_bytes()
    real, check = order.verify_signature, approval.check_settings

    def exchange(*arguments, **options):
        found = real(*arguments, **options)
        (model / "manifest.json").write_bytes((listed / "manifest.json").read_bytes())
        return found

    def restore(*arguments, **options):
        (model / "manifest.json").write_bytes(signed)
        return check(*arguments, **options)

    monkeypatch.setattr(order, "verify_signature", exchange)
    monkeypatch.setattr(approval, "check_settings", restore)
    code, _, error = site.ask(request)
    assert code == 77 and "not among the policy's models" in error, error


def linked(site: Gate) -> str:  # noqa: F811
    """A model with a link to `b/f`, where `b` has become a link to `c`; returns the request that submits it."""
    w = site.workdir
    for request, data in (
        ("put-tree {w}/b", packed(f=b"1234567")),
        ("make {w}/in/model", b""),
        ("link {w}/b/f {w}/in/model/linked.safetensors", b""),
        ("remove {w}/b", b""),
        ("put-tree {w}/c", packed(f=b"1234567")),
        ("link {w}/c {w}/b", b""),
    ):
        assert site.ask(f"crossfed-gate {request.format(w=w)}", data)[0] == 0
    return site.round()


def test_a_link_on_the_way_to_a_models_file_stays_as_well(site: Gate):  # noqa: F811
    """The file where it ends was held, and the link before it could be led to another."""
    request = linked(site)
    assert site.ask(request)[0] == 0
    site.active = "17\n"
    for attack, data in (("remove {w}/b", b""), ("put-tree {w}/b", packed(f=b"unlike!")), ("link {w}/in {w}/b", b"")):
        code, _, error = site.ask(f"crossfed-gate {attack.format(w=site.workdir)}", data)
        assert code == 77 and "which is not over" in error
    assert (site.workdir / "in" / "model" / "linked.safetensors").read_bytes() == b"1234567"


def test_a_linked_folder_of_a_model_is_held_with_the_links_in_it(site: Gate):  # noqa: F811
    w, request = site.workdir, site.round()
    for attack, data in (
        ("put-tree {w}/e", packed(f=b"1234567")),
        ("make {w}/d", b""),
        ("link {w}/e/f {w}/d/f", b""),
        ("link {w}/d {w}/in/model/folder", b""),
    ):
        assert site.ask(f"crossfed-gate {attack.format(w=w)}", data)[0] == 0
    assert site.ask(request)[0] == 0
    site.active = "17\n"
    code, _, error = site.ask(f"crossfed-gate put-piece {w}/e/f 0 7", b"unlike!")
    assert code == 77 and "which is not over" in error
    assert (w / "in" / "model" / "folder" / "f").read_bytes() == b"1234567"


def test_links_in_a_circle_are_refused(site: Gate):  # noqa: F811
    request, model = site.round(), site.workdir / "in" / "model"
    (model / "round").symlink_to(model)
    code, _, error = site.ask(request)
    assert code == 77 and "links, expected files" in error


def test_a_link_that_is_exchanged_while_its_job_is_approved_is_noticed(site: Gate, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    request, real = linked(site), queue.note_ends

    def exchange(session: Session) -> None:
        (site.workdir / "b").unlink(missing_ok=True)
        (site.workdir / "b").symlink_to(site.workdir / "in")
        real(session)

    monkeypatch.setattr(queue, "note_ends", exchange)
    code, _, error = site.ask(request)
    assert code == 77 and "was exchanged while its job was approved" in error
    assert not [job for job in read_ledger(site.home / "gate" / "ledger.json").jobs if job.id]


@pytest.mark.parametrize("verb", ["put-tree {}", "put-file {}/more 600"])
def test_a_stream_that_began_before_its_job_adds_nothing_to_its_model(
    site: Gate,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
):
    """An index of other weights, say, which came once the job had compared the files that the manifest names."""
    model = site.workdir / "in" / "model"
    request = site.round()
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    data = packed(**files, more=b"unlike!") if "tree" in verb else b"unlike!"
    stream, done = io.BytesIO(data), []
    real = transfers._copy

    def late(source, file, target, incoming):
        if not done and target.path.name != "model" or len(list(model.iterdir())) == len(files) + 1:
            done.append(True)
            assert queue_job(site, request)
        return real(source, file, target, incoming)

    monkeypatch.setattr(transfers, "_input", lambda: stream)
    monkeypatch.setattr(transfers, "_copy", late)
    code, _, error = site.ask(f"crossfed-gate {verb.format(model)}")
    assert code == 77 and "which is not over" in error
    assert b"unlike!" not in [path.read_bytes() for path in model.iterdir()]


def test_a_model_of_many_links_is_refused(site: Gate):  # noqa: F811
    """Where each leads would stand in the ledger, which is written anew for every piece that leaves."""
    request, model = site.round(), site.workdir / "in" / "model"
    for number in range(101):
        (model / f"{number}").symlink_to(model / "model.safetensors")
    code, _, error = site.ask(request)
    assert code == 77 and "more than 100 links" in error and not site.calls


@pytest.mark.parametrize("name", ["config.json", "manifest.json", "linked.safetensors"])
def test_what_a_facility_keeps_of_a_model_stays_as_it_was_once_the_job_is_over(site: Gate, name: str):  # noqa: F811
    """It has hard links to it: with another config.json, and its digest in the manifest, the kept model was trained
    from in place of the one that was signed and sent again."""
    model = submitted(site)
    (model / "config.json").write_text('{"model_type": "llama"}')
    write_manifest(model, read_manifest(model))
    digest = read_manifest(model).content_sha256
    kept = Models(site.home / "state").whole(model)
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    site.active = ""
    place = (model / name).resolve()
    code, _, error = site.ask(f"crossfed-gate put-piece {place} 0 7", b"unlike!")
    assert code == 77 and "has another name" in error
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    assert site.ask(f"crossfed-gate put-file {place} 600", b"unlike!")[0] == 0, "a new file"
    assert site.ask(f"crossfed-gate put-piece {place} 0 7", b"UNLIKE!")[0] == 0
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    assert Models(site.home / "state").holds(digest)


def test_a_piece_that_began_before_a_file_was_kept_is_refused_after(site: Gate, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    place, kept = site.workdir / "file", site.home / "kept"
    place.write_bytes(b"1" * (3 << 20))
    check = Target.check

    def keep(self: Target) -> None:
        check(self)
        if place.read_bytes().startswith(b"2") and not kept.exists():
            os.link(place, kept)

    monkeypatch.setattr(Target, "check", keep)
    code, _, error = site.ask(f"crossfed-gate put-piece {place} 0 {3 << 20}", b"2" * (3 << 20))
    assert code == 77 and "has another name" in error
    assert kept.read_bytes() == b"2" * (1 << 20) + b"1" * (2 << 20)


@pytest.mark.parametrize("verb", ["put-tree {}", "put-file {}/file 600"])
def test_a_stream_that_began_before_a_file_was_kept_is_refused_after(
    site: Gate,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
):
    """Another request completes the file as it was signed, and the stream waits until the job has kept it."""
    place, kept, check = site.workdir / "sent", site.home / "kept", Target.check
    place.mkdir()

    def keep(self: Target) -> None:
        check(self)
        if (file := place / "file").exists() and file.stat().st_size == 1 << 20:
            with open(file, "ab") as rest:
                rest.write(b"1" * (1 << 20))
            os.link(file, kept)

    monkeypatch.setattr(Target, "check", keep)
    data = b"1" * (1 << 20) + b"2" * (1 << 20)
    code, _, error = site.ask(f"crossfed-gate {verb.format(place)}", packed(file=data) if "tree" in verb else data)
    assert code == 77 and "has another name" in error
    assert kept.read_bytes() == b"1" * (2 << 20)


def test_links_that_lead_to_one_another_are_no_model(tmp_path: Path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(Refused, match="leads over more than 100 links"):
        places_of(tmp_path)


def test_a_link_on_the_way_is_held_where_it_lies_however_it_is_reached(tmp_path: Path):
    for name in ("model/part", "else/real"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "else/real/weights").touch()
    (tmp_path / "else/folder").symlink_to("./real")
    (tmp_path / "model/part/x").symlink_to("../../else//folder/../folder/weights")
    expected = ["model", "model/part/x", "else/folder", "else/real/weights"]
    assert places_of(tmp_path / "model") == [str(tmp_path / name) for name in expected]
