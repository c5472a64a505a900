"""Ways around the gate's limits that need several requests, a race, or a policy that says more than its site meant."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from facility.exchange.errors import ConfigurationError
from facility.gating import grammar, jobs, ledger, transfers
from facility.gating.ledger import JobEntry, ledger_locked, read_ledger
from facility.gating.policy import read_policy
from tests.conftest import ROOT
from tests.security import test_gate
from tests.security.test_gate import Gate
from tests.security.test_gate_ahead import ahead, ordered

site = test_gate.site
SECRET = b"what the job printed"


def in_job(site: Gate, directory: str, request: str) -> str:
    (site.workdir / directory).mkdir(parents=True, exist_ok=True)
    return request.replace(f"--directory {site.workdir}/job ", f"--directory {site.workdir}/{directory} ")


def test_refused_requests_do_not_make_the_gate_forget_what_was_used(site: Gate, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ledger, "KEPT", 5)
    site.active = "17\n"
    request = site.round()
    assert [site.ask(request)[0] for _ in range(3)] == [0, 0, 77], "two jobs of two hours fit into five"
    for _ in range(12):
        assert site.ask(request)[0] == 77
    assert [job.id for job in read_ledger(site.home / "gate" / "ledger.json").jobs if job.id] == ["17", "17"]


def test_refused_requests_do_not_make_the_gate_forget_a_job_that_waits(site: Gate, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ledger, "KEPT", 5)
    request = ordered(site)
    assert ahead(site)[0] == 0
    for _ in range(12):
        site.ask(request.replace(f"{site.home}/data", "/etc"))
    assert ahead(site)[0] == 77, "one a federation"


def test_a_few_bytes_do_not_become_a_disk_full_or_hours_of_reading(site: Gate):
    """A header of a sparse file, from which the gate would write out zeros; a byte at a far offset, to be hashed."""
    entry = tarfile.TarInfo("hole")
    entry.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(entry.tobuf(tarfile.GNU_FORMAT))
    header[483:495] = b"%011o\0" % (60 << 20)  # what it would be, written out
    header[148:156] = b"%06o\0 " % (sum(header[:148]) + 8 * ord(" ") + sum(header[156:]))
    code, _, error = site.ask(f"crossfed-gate put-tree {site.workdir}/in", bytes(header) + bytes(10240))
    assert code == 77 and "nor a regular file, written out" in error
    assert not (site.workdir / "in" / "hole").exists()
    assert site.ask(f"crossfed-gate put-file {site.workdir}/far 600")[0] == 0
    assert site.ask(f"crossfed-gate put-piece {site.workdir}/far 900000000000 1", b"x")[0] == 0
    code, out, error = site.ask(f"crossfed-gate sha1 {site.workdir}/far")
    assert (code, out) == (77, b"") and "too large for a checksum" in error


@pytest.mark.parametrize("place", ["policy.yml", "coordinators", "site.sh", ".", "../work", ".."])
def test_a_gate_is_closed_where_every_user_may_write_what_it_goes_by(site: Gate, place: str):
    path = site.home / place
    mode = path.stat().st_mode
    path.chmod(mode | 0o002)
    with pytest.raises(ConfigurationError, match="every user may write .*; chmod o-w it"):
        read_policy(site.home / "policy.yml")
    path.chmod(mode)
    assert read_policy(site.home / "policy.yml").facility == "alpha"


def test_what_no_longer_counts_is_forgotten(tmp_path: Path):
    path, now = tmp_path / "ledger.json", 10 * ledger.DAY
    with ledger_locked(path, lambda: now) as (book, _):
        for number in range(3 * ledger.KEPT):
            id = str(number) if number % 2 else ""
            book.jobs.append(JobEntry(id=id, name="n", directory="/d", submitted=float(number), ended=number + 1.0))
        book.jobs.append(JobEntry(id="9999", name="n", directory="/d", submitted=now - 60, hours=1.0))
    jobs = read_ledger(path).jobs
    assert len(jobs) == 2 * ledger.KEPT + 1 and jobs[-1].id == "9999" and jobs[0].submitted == ledger.KEPT
    assert sum(not job.id for job in jobs) == ledger.KEPT, "refused requests push no job out"


def test_no_checksum_tells_what_a_job_printed(site: Gate, monkeypatch: pytest.MonkeyPatch):
    """Byte by byte: a zero more at the end of the file for each checksum, and each tells one byte of it."""
    monkeypatch.setattr(ledger, "KEPT", 5)
    site.policy(job_output=False, bytes_out_per_day=0)
    place, link = site.workdir / "job", site.workdir / "short"
    assert site.ask(site.round())[0] == 0
    (place / "slurm-17.out").write_bytes(SECRET)
    site.active = ""
    with ledger_locked(site.home / "gate" / "ledger.json", lambda: 1e10) as (book, _):
        book.jobs[0].ended = 1.0
    for _ in range(12):
        assert site.ask(site.round().replace(f"{site.home}/data", "/etc"))[0] == 77
    assert site.ask(f"crossfed-gate link {place}/slurm-17.out {link}")[0] == 77
    os.symlink(place / "slurm-17.out", link)
    (place / "update").mkdir(exist_ok=True)
    (place / "update" / "model.safetensors").write_bytes(SECRET)
    for path in (place / "slurm-17.out", link, place / "update" / "model.safetensors"):
        code, out, error = site.ask(f"crossfed-gate sha1 {path}")
        assert (code, out) == (77, b"") and "lies in a job's directory" in error
    assert site.ask(f"crossfed-gate sha1 {site.workdir}/in/alpha.json")[0] == 0, "what the engine sent"


@pytest.mark.parametrize("place", ["in/model/job", "in/model/moments"])
def test_no_model_holds_what_a_job_printed(site: Gate, place: str):
    """Its job says whether the digests of all files are those of the manifest: overwritten all around a byte, of a file
    with that byte and no other."""
    site.policy(job_output=False)
    assert site.ask(in_job(site, place, site.round()))[0] == 77, "nor what it prints itself"
    with ledger_locked(site.home / "gate" / "ledger.json") as (book, _):
        book.jobs = [JobEntry(id="17", name="crossfed-heron-alpha", directory=f"{site.workdir}/{place}", submitted=1.0)]
        book.jobs[0].ended = 2.0
    (site.workdir / place / "slurm-17.out").write_bytes(SECRET)
    code, _, error = site.ask(site.round())
    assert code == 77 and "holds the directory of a job" in error
    assert not [command for command, _ in site.calls if command[0] == "sbatch"]


def test_no_checksum_is_of_a_file_that_came_to_lie_there_after_the_look(site: Gate, monkeypatch: pytest.MonkeyPatch):
    """A link to the folder that holds a job's directory, made in place of a folder once the path through it was
    checked, by a request of its own."""
    site.policy(job_output=False, bytes_out_per_day=0)
    w, real = site.workdir, transfers.confined_source
    assert site.ask(in_job(site, "x/job", site.round()))[0] == 0
    (w / "x/job/slurm-17.out").write_bytes(SECRET)
    assert site.ask(f"crossfed-gate put-file {w}/folder/job/slurm-17.out 600", b"sent")[0] == 0

    def sent(word, session):
        found = real(word, session)
        assert transfers.link(session, grammar.parse_request(f"crossfed-gate link {w}/x {w}/folder")) == 0
        return found

    monkeypatch.setattr(transfers, "confined_source", sent)
    code, out, error = site.ask(f"crossfed-gate sha1 {w}/folder/job/slurm-17.out")
    assert (code, out) == (77, b"") and "was exchanged while it was read" in error, out


@pytest.mark.parametrize("job_output", [True, False])
def test_what_a_job_prints_is_in_no_reason_either(site: Gate, job_output: bool):
    site.policy(job_output=job_output)
    assert site.ask(site.round())[0] == 0
    script = next(text for command, text in site.calls if command[0] == "sbatch")
    assert script is not None and ("export CROSSFED_JOB_OUTPUT=0" in script) is not job_output


def test_a_jobs_directory_lies_in_no_other_jobs_update(site: Gate):
    """Else what the inner job prints and keeps would leave as the outer one's update."""
    site.policy(job_output=False, node_hours_per_day=100.0)
    outer = site.round()
    assert site.ask(outer)[0] == 0
    code, _, error = site.ask(in_job(site, "job/inner", outer))
    assert code == 77 and "another job's directory" in error
    for outer_job in ("job", "submitted-later"):
        code, _, error = site.ask(in_job(site, f"{outer_job}/update/inner", outer))
        assert code == 77 and "leaves through this gate" in error


@pytest.mark.parametrize("directory", ["a%x", "a%x/job", "%%j", "a%"])
def test_what_a_job_prints_goes_to_no_directory_whose_name_slurm_makes_of_the_jobs(site: Gate, directory: str):
    """Slurm 22.05 wrote what a job in `a%x` printed to `aNAME`, by a template's `--output=%x-%j.log`: that is not a
    job's directory, and checksums of what lies there are given."""
    site.policy(job_output=False)
    code, _, error = site.ask(in_job(site, directory, site.round()))
    assert code == 77 and "holds a %" in error
    assert not [command for command, _ in site.calls if command[0] == "sbatch"]
    with pytest.raises(ConfigurationError, match="workdir holds a %"):
        site.policy(workdir=str(site.folder / directory))
        read_policy(site.home / "policy.yml")


def test_what_lies_in_an_update_before_its_job_is_none_of_the_job_s(site: Gate):
    request = site.round()
    (site.workdir / "job/update").mkdir()
    (site.workdir / "job/update/left").write_bytes(SECRET)
    assert site.ask(request)[0] == 0
    code, out, _ = site.ask(f"crossfed-gate get-file {site.workdir}/job/update/left")
    assert code != 0 and out == b""


def test_nothing_is_copied_into_what_may_leave(site: Gate):
    assert site.ask(site.round())[0] == 0
    w = site.workdir
    (w / "job/update").mkdir(exist_ok=True)
    (w / "job/crossfed-job.log").write_bytes(SECRET)
    for verb in ("copy", "link"):
        site.ask(f"crossfed-gate {verb} {w}/job/crossfed-job.log {w}/job/update/x")
        code, out, _ = site.ask(f"crossfed-gate get-file {w}/job/update/x")
        assert code != 0 and out == b"", verb


@pytest.mark.parametrize("source", ["job/update", "job/update/x", "job/progress.json", "later/update/x"])
@pytest.mark.parametrize("target", ["next", "next/crossfed-job.log"])
def test_no_link_leads_into_what_may_leave(site: Gate, source: str, target: str):
    """What a job writes through it, its output for one, would leave as another job's update."""
    site.policy(job_output=False)
    assert site.ask(site.round())[0] == 0
    w = site.workdir
    (w / "next").mkdir()
    code, _, error = site.ask(f"crossfed-gate link {w}/{source} {w}/{target}")
    assert code == 77 and "leaves through this gate" in error and not (w / target).is_symlink()
    assert site.ask(f"crossfed-gate link {w}/in/model {w}/next/model")[0] == 0, "a model is linked, as the engine does"


@pytest.mark.parametrize("verb", ["get-file {p}", "get-piece {p} 0 99", "get-tree {d}"])
def test_a_directory_that_is_exchanged_after_the_check_gives_nothing_away(
    site: Gate, monkeypatch: pytest.MonkeyPatch, verb: str
):
    """The coordinator owns what lies in the workdir, and may replace it between the gate's look and its reading."""
    assert site.ask(site.round())[0] == 0
    w, real = site.workdir, transfers.readable
    (w / "job/update/deep").mkdir(parents=True)
    (w / "job/update/deep/x").write_bytes(b"public")
    (w / "job/kept").mkdir()
    (w / "job/kept/x").write_bytes(SECRET)

    def readable(path, session):
        found = real(path, session)
        if path.endswith("deep/x"):
            os.rename(w / "job/update/deep", w / "job/aside")
            os.symlink(w / "job/kept", w / "job/update/deep")
        return found

    monkeypatch.setattr(transfers, "readable", readable)
    request = verb.format(p=f"{w}/job/update/deep/x", d=f"{w}/job/update")
    code, out, _ = site.ask(f"crossfed-gate {request}", data=b"deep/x\0")
    assert code != 0 and SECRET not in out


@pytest.mark.parametrize("key", ["datasets", "task_directories"])
def test_the_workdir_holds_nothing_that_must_not_leave_or_change(site: Gate, key: str):
    (site.workdir / "own").mkdir()
    site.policy(**{key: [str(site.workdir / "own")]})
    with pytest.raises(ConfigurationError, match=f"{key}.*lies in the workdir"):
        read_policy(site.home / "policy.yml")


def test_a_template_beside_the_policy_lies_outside_of_the_workdir_too(site: Gate):
    inside = site.home / "scratch"
    inside.mkdir()
    (inside / "site.sh").write_text("{{ streamflow_command }}\n")
    site.policy(workdir=str(inside), template="scratch/site.sh")
    with pytest.raises(ConfigurationError, match="template .*lies in the workdir"):
        read_policy(site.home / "policy.yml")


@pytest.mark.parametrize("variable", ["CROSSFED_HOME", "CROSSFED_STATE"])
def test_what_a_facility_keeps_lies_outside_of_the_workdir(site: Gate, monkeypatch: pytest.MonkeyPatch, variable: str):
    monkeypatch.setenv(variable, str(site.workdir / "kept"))
    with pytest.raises(ConfigurationError, match=f"{variable}.*lies in the workdir"):
        read_policy(site.home / "policy.yml")


def test_the_workdir_does_not_hold_the_home_with_its_authorized_keys(site: Gate, monkeypatch: pytest.MonkeyPatch):
    """A policy that lies elsewhere could name the home: `put-file ~/.ssh/authorized_keys` would open a shell."""
    monkeypatch.setenv("HOME", str(site.workdir))
    with pytest.raises(ConfigurationError, match="the account's home .*lies in the workdir"):
        read_policy(site.home / "policy.yml")


def test_the_workdir_does_not_hold_the_code(site: Gate):
    site.policy(workdir=str(ROOT))
    with pytest.raises(ConfigurationError, match="this code .*lies in the workdir"):
        read_policy(site.home / "policy.yml")


@pytest.mark.parametrize("key", ["delta", "unit"])
def test_a_privacy_floor_without_an_epsilon_is_refused(site: Gate, key: str):
    site.policy(**{key: {"delta": 1e-6, "unit": "document"}[key]})
    with pytest.raises(ConfigurationError, match=f"{key} is set, and neither epsilon"):
        read_policy(site.home / "policy.yml")


@pytest.mark.parametrize(
    ("key", "value"),
    [("hours", "2:00"), ("hours", "1:30:00"), ("hours", "190:20:30.15"), ("nodes", "010"), ("nodes", "0x10")]
    + [("node_hours_per_day", "0b11"), ("bytes_out_per_day", "1:00"), ("ahead_seconds", "10:00")],
)
def test_a_number_in_the_policy_is_what_it_looks_like(site: Gate, key: str, value: str):
    """YAML 1.1 reads 2:00 as 120, and 010 as 8: a limit of other hours than the site meant."""
    policy = site.home / "policy.yml"
    site.policy(**{key: "VALUE"})
    policy.write_text(policy.read_text().replace('"VALUE"', value))
    with pytest.raises(ConfigurationError, match=f"{key} is '{value}', expected"):
        read_policy(policy)


def test_what_a_job_prints_goes_nowhere_else_by_a_link(site: Gate):
    """The scheduler writes a job's output by a name that is known ahead; where a link led, a checksum would tell it."""
    site.policy(job_output=False, node_hours_per_day=100.0)
    request, w = site.round(), site.workdir
    for name in ("slurm-17.out", "crossfed-job.log", "logs"):
        assert site.ask(f"crossfed-gate link {w}/out {w}/job/{name}")[0] == 0
        code, _, error = site.ask(request)
        assert code == 77 and f"{w}/job/{name} is a link" in error
        assert site.ask(f"crossfed-gate remove {w}/job/{name}")[0] == 0
    assert site.ask(request)[0] == 0
    for name in ("job/slurm-17.out", "job/a/b", "job"):
        code, _, error = site.ask(f"crossfed-gate link {w}/out {w}/{name}")
        assert code == 77 and "job 17" in error and not (w / name).is_symlink()
    assert site.ask(f"crossfed-gate link {w}/in/model {w}/next")[0] == 0


def test_no_link_comes_into_a_jobs_directory_while_it_is_approved(site: Gate, monkeypatch: pytest.MonkeyPatch):
    """Nor does that directory become one: it is looked at again once the ledger holds the job."""
    request, w = site.round(), site.workdir
    (w / "other").mkdir()
    real = jobs.approve_job

    def approve(session, request):
        if changes:
            changes.pop()()
        return real(session, request)

    monkeypatch.setattr(jobs, "approve_job", approve)
    for change in (
        lambda: os.symlink(w / "out", w / "job/slurm-17.out"),
        lambda: (os.rename(w / "job", w / "was"), os.symlink(w / "other", w / "job")),
    ):
        changes = [change]
        code, _, error = site.ask(request)
        assert code == 77 and "is a link" in error
        assert not any(command[0] == "sbatch" for command, _ in site.calls)
        assert not [job for job in read_ledger(site.home / "gate" / "ledger.json").jobs if job.id]
        (w / "job/slurm-17.out").unlink(missing_ok=True)
