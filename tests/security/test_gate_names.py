"""What requests and settings name behind a gate: the site's own files where its policy lists them, and of the workdir
what the coordinator sent. Of any other, an error would tell parts, and a private key would sign."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from facility.exchange.errors import ConfigurationError
from facility.exchange.masking.roster import AGREEMENT
from facility.exchange.masking.unmasking import REQUEST, ROSTER, SHARES
from facility.gating import ledger, queue
from facility.gating.ledger import JobEntry, ledger_locked, read_ledger
from facility.gating.policy import read_policy
from tests.security import test_gate, test_gate_masking
from tests.security.test_gate import Gate
from tests.security.test_gate_masking import MaskingGate

site = test_gate.site
masking = test_gate_masking.site
SECRET = "a line of a document"


def printed(site: Gate, before: str, after: str) -> Path:
    """The output of a job that is over, but for a line overwritten piece by piece from its coordinator's side."""
    site.policy(job_output=False, node_hours_per_day=100.0)
    assert site.ask(site.round())[0] == 0
    site.active = ""
    log = site.workdir / "job" / "slurm-17.out"
    log.write_bytes(b"-" * len(before) + SECRET.encode() + b"-" * len(after))
    for offset, text in ((0, before), (len(before) + len(SECRET), after)):
        code, _, error = site.ask(f"crossfed-gate put-piece {log} {offset} {len(text)}", text.encode())
        assert code == 0, error
    return log


def submitted(site: Gate, **others: object) -> str:
    """The request for a next job, with other paths in it."""
    (site.workdir / "next").mkdir(exist_ok=True)
    request = site.round().replace(f"--directory {site.workdir}/job ", f"--directory {site.workdir}/next ")
    for option, path in others.items():
        head, _, rest = request.partition(f"--{option} ")
        request = f"{head}--{option} {path} {rest.partition(' ')[2]}".rstrip()
    return request


def test_what_a_job_printed_is_no_settings(site: Gate):
    """An error quotes the value that is wrong; all around it was overwritten."""
    log = printed(
        site, '{"federation": "heron", "facility": "alpha", "rounds": 5, "seed": 1, "training": {"device": "', '"}}'
    )
    code, out, error = site.ask(submitted(site, settings=log))
    assert code == 77 and "job's directory" in error
    assert SECRET not in error and SECRET.encode() not in out
    assert SECRET not in (site.home / "gate" / "audit.jsonl").read_text()


@pytest.mark.parametrize("option", ["model", "roster"])
@pytest.mark.parametrize("through", ["the directory", "a link to it", "a link in it"])
def test_what_a_job_printed_is_no_model_and_no_roster(site: Gate, option: str, through: str):
    """The link was made before there was a job in that directory."""
    w = site.workdir
    for name in ("job", "other"):
        (w / name).mkdir()
    assert site.ask(f"crossfed-gate link {w}/job {w}/behind")[0] == 0
    assert site.ask(f"crossfed-gate link {w}/job/slurm-17.out {w}/other/agreement.json")[0] == 0
    printed(site, "{", "}")
    path = {"the directory": w / "job", "a link to it": w / "behind", "a link in it": w / "other"}[through]
    request = submitted(site, model=path) if option == "model" else f"{submitted(site)} --roster {path}"
    code, _, error = site.ask(request)
    assert code == 77 and "job's directory" in error


def test_no_link_leads_to_what_a_job_printed(site: Gate):
    log = printed(site, "", "")
    code, _, error = site.ask(f"crossfed-gate link {log} {site.workdir}/in/model/manifest.json")
    assert code == 77 and "job's directory" in error


def test_a_roster_stays_as_it_was_approved(site: Gate):
    roster = site.workdir / "roster"
    roster.mkdir()
    site.active = "17\n"
    assert site.ask(f"{site.round()} --roster {roster}")[0] == 0
    for request in (f"put-file {roster}/agreement.json 600", f"remove {roster}", f"link {site.workdir}/in {roster}"):
        code, _, error = site.ask(f"crossfed-gate {request}")
        assert code == 77 and "which is not over" in error


def test_a_reason_is_not_left_in_place_of_the_model_of_another_job(site: Gate):
    """Where a job's update would be, what lay there is removed: so a model could have been, while its job read it."""
    request, w = site.round(), site.workdir
    place = w / "place"
    place.mkdir()
    os.rename(w / "in" / "model", place / "update")
    site.active = "17\n"
    assert site.ask(request.replace(f"{w}/in/model", f"{place}/update"))[0] == 0
    code, _, error = site.ask(site.round().replace(f"--directory {w}/job ", f"--directory {place} "))
    assert code == 77 and "which is not over" in error
    assert (place / "update" / "model.safetensors").read_bytes() == b"weights"


def test_a_request_to_unmask_is_read_as_it_was_checked(masking: MaskingGate, monkeypatch: pytest.MonkeyPatch):
    """Not what a job printed, to which a link in it leads; nor what it is exchanged for before the command reads."""
    w = masking.workdir
    (w / "job").mkdir()
    masking.policy(peer_signers=str(masking.peers), node_hours_per_day=100.0)
    asked = w / "asked"
    for file in (REQUEST, f"{ROSTER}/{AGREEMENT}"):
        (asked / file).parent.mkdir(parents=True, exist_ok=True)
        (asked / file).write_text("{}")
    assert masking.ask(f"crossfed-gate link {w}/job {asked}/{SHARES}")[0] == 0
    assert masking.ask(masking.round())[0] == 0
    code, _, error = masking.ask(masking.step("unmask", "u", f" --request {asked}"))
    assert code == 77 and "job's directory" in error
    (asked / SHARES).unlink()
    read: list[str] = []

    def run(session, script: str, *rest: object, **more: object) -> int:
        (asked / REQUEST).write_text("exchanged")
        read.append(Path(script.partition("--request ")[2].split()[0], REQUEST).read_text())
        return 0

    monkeypatch.setattr(queue, "on_this_host", run)
    assert masking.ask(masking.step("unmask", "v", f" --request {asked}"))[0] == 0 and read == ["{}"]


def test_a_job_whose_directory_is_there_or_that_is_not_over_is_not_forgotten(tmp_path: Path):
    """Else its output could be read by checksums, and its model altered, after four hundred short jobs and a day."""
    path, now = tmp_path / "ledger.json", 10 * ledger.DAY
    (tmp_path / "there").mkdir()
    with ledger_locked(path, lambda: now) as (book, _):
        book.jobs.append(JobEntry(id="a", name="n", directory=str(tmp_path / "there"), submitted=1.0, ended=2.0))
        book.jobs.append(JobEntry(id="b", name="n", directory=str(tmp_path / "gone"), submitted=1.0))
        for number in range(2 * ledger.KEPT):
            book.jobs.append(JobEntry(id=str(number), name="n", directory="/none", submitted=3.0, ended=4.0))
    ids = [job.id for job in read_ledger(path).jobs]
    assert ids[:2] == ["a", "b"] and len(ids) == 2 + ledger.KEPT


NAMED = {
    "signing_key": lambda path: {"signing_key": path},
    "layout.plan": lambda path: {"layout": {"plan": path}},
    "sync.emulation.trace": lambda path: {"sync": {"emulation": {"trace": path}}},
}


@pytest.mark.parametrize("key", NAMED)
def test_settings_name_no_file_that_the_policy_does_not(site: Gate, key: str):
    """Another private key of the account's would sign; of any other file, or a job's output, an error tells parts."""
    own = site.home / "own"
    own.write_text("")
    for path in (own, site.home / "policy.yml", site.workdir / "job" / "slurm-17.out", "~/.ssh/id_ed25519"):
        code, _, error = site.ask(site.round(**NAMED[key](str(path))))
        assert code == 77 and f"training.{key} is {path}, the policy's files are: none" in error
    site.policy(files=[str(own)])
    assert site.ask(site.round(**NAMED[key](str(own))))[0] == 0
    site.policy(files=[str(site.workdir / "own")])
    with pytest.raises(ConfigurationError, match="files .* lies in the workdir"):
        read_policy(site.home / "policy.yml")


def test_keys_are_signed_with_no_key_that_the_policy_does_not_name(masking: MaskingGate):
    masking.round()
    masking.policy(peer_signers=str(masking.peers), files=[])
    code, _, error = masking.ask(masking.step("keys", "k"))
    assert code == 77 and "the policy's files are: none" in error


@pytest.mark.parametrize("named", [{"lora": {"rank": 4, "base": "{}"}}, {"preference": {"reference": "{}"}}])
def test_models_that_settings_name_are_none_of_the_workdir_whatever_the_policy_lists(site: Gate, named: dict):
    training = json.loads(json.dumps(named).replace("{}", str(site.workdir / "base")))
    code, _, error = site.ask(site.round(**training))
    assert code == 77 and "lies in the workdir" in error
