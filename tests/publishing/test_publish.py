"""What is published is valid, complete and silent about those who want no name; the model can be made again from it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import save_file

from coordinator.archive.rewind import AGAIN
from coordinator.archive.rounds import CARRIED, Archive, FacilityRow
from coordinator.comparison.account import Account, OwnTraining, read_account, write_account
from coordinator.config.federation import read_federation
from coordinator.config.publishing import Creator
from coordinator.publishing.card import license_of
from coordinator.publishing.names import public_names, renamed
from coordinator.publishing.publish import anonymous, loaded_otherwise, publish
from coordinator.report.make import data_of
from facility.exchange.checkpoints.adapters import PREFIX
from facility.exchange.checkpoints.checkpoint import ADAPTER
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.files.storage import file_error_sentence
from facility.exchange.messages.manifest import Manifest, read_manifest, write_manifest
from tests.comparison.made import add_comparison
from tests.pico import save_pico
from tests.publishing.made import MOST_BYTES, made_federation, record_model


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    return made_federation(tmp_path)


def test_a_publication_holds_the_model_its_card_and_a_crate(federation: Path, tmp_path: Path):
    out = publish(federation, tmp_path / "out")
    card = ModelCard.load(out / "model" / "README.md")
    assert card.data.license == "apache-2.0" and card.data.language == ["it"]
    assert (out / "model" / "model.safetensors").is_file()
    text = "\n".join(
        path.read_text(errors="replace") for path in out.rglob("*") if path.is_file() and path.suffix != ".safetensors"
    )
    assert "facility-00" in text and "facility 2" in text and "0000-0002-1825-0097" in text
    assert "facility-01" not in text and "facility-02" not in text
    assert "no differential privacy was applied" in card.text
    crate = out / "crate"
    graph = json.loads((crate / "ro-crate-metadata.json").read_text())["@graph"]
    actions = [one for one in graph if one["@type"] == "CreateAction"]
    assert len(actions) == 1 + 3 * 3
    assert sum("#run" == one["@id"] for one in actions) == 1
    assert sum(one["actionStatus"]["@id"].endswith("FailedActionStatus") for one in actions) == 2
    assert sum(path.stat().st_size for path in crate.rglob("*") if path.is_file()) < MOST_BYTES
    assert not list(crate.rglob("*.safetensors"))
    cards = list((crate / "croissant").glob("*.json"))
    assert [one.name for one in cards] == ["facility-00.json"] and "a" * 64 in cards[0].read_text()
    bill = json.loads((crate / "sbom.json").read_text())
    assert bill["bomFormat"] == "CycloneDX" and {"torch", "transformers"} <= {one["name"] for one in bill["components"]}


@pytest.mark.parametrize("wanted", [3, 5])
def test_a_model_of_a_federation_that_goes_on_is_published_as_that(
    federation: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, wanted: int
):
    """After a rewind, for one: its last model was not evaluated either."""
    content = yaml.safe_load(federation.read_text())
    federation.write_text(yaml.safe_dump(content | {"rounds": wanted}))
    archive = Archive(read_federation(federation).archive_path)
    assert len(archive.rounds()) == 3
    (archive.path / "evaluation.json").unlink(missing_ok=True)
    out = publish(federation, tmp_path / "out")
    text = (out / "model" / "README.md").read_text()
    assert "## Evaluation\n\nThe facilities have not evaluated this model.\n" in text
    assert ("this is the model after 3 of 5 rounds" in caplog.text) == (wanted == 5)


def test_a_comparison_of_models_names_nobody_who_wants_no_name(federation: Path, tmp_path: Path):
    names = ["facility-00", "facility-01", "facility-02"]
    add_comparison(Archive(tmp_path / "archive"), names, absent="facility-02")
    out = publish(federation, tmp_path / "out")
    card = (out / "model" / "README.md").read_text()
    assert "facility-00 alone" in card and "facility 2's update" in card and "bootstrap" in card
    text = "\n".join(path.read_text(errors="replace") for path in (out / "crate").rglob("*") if path.is_file())
    assert "facility 2's update" in card + text
    assert "facility-01" not in card + text and "facility-02" not in card + text


def test_what_cannot_be_published_is_refused(federation: Path, tmp_path: Path):
    publish(federation, tmp_path / "out")
    with pytest.raises(InputError, match="exists already"):
        publish(federation, tmp_path / "out")
    shutil.rmtree(tmp_path / "archive")
    with pytest.raises(InputError, match="no round is complete"):
        publish(federation, tmp_path / "other")


def test_a_coordinator_without_the_package_for_crates_is_told_which(tmp_path: Path):
    """coordinator/setup.sh does not install it; the command showed a traceback."""
    code = (
        "import sys; sys.modules['rocrate'] = None; sys.argv = ['crossfed', 'publish', '--federation', 'f.yml']\n"
        "from coordinator.cli import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "rocrate, which is not installed here: pip install" in done.stderr


def test_a_model_that_does_not_fit_is_told_as_that_and_nothing_is_left(federation: Path, tmp_path: Path):
    out, before = tmp_path / "here" / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, before[1]))
    try:
        with pytest.raises(OSError) as refused:
            publish(federation, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file_error_sentence(refused.value).startswith(
        f"{out}/model/model.safetensors may not grow so large: raise the limit"
    )
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize("orcid", ["0000-0002-1825-0098", "1825-0097", "0000-0002-1825-009X"])
def test_an_orcid_with_a_wrong_check_digit_is_refused(orcid: str):
    with pytest.raises(ConfigurationError, match="orcid"):
        Creator(name="a", orcid=orcid)


def test_no_name_survives_as_a_part_of_a_longer_one():
    assert renamed("ab a abc", {"a": "1", "abc": "3", "ab": "2"}) == "2 1 3"


def test_results_of_facilities_and_metrics_are_kept_apart_on_the_card(federation: Path, tmp_path: Path):
    """huggingface_hub joins results that differ in the name of the data set alone."""
    archive = tmp_path / "archive"
    rows = [
        FacilityRow(round=3, facility=f"facility-{n:02d}", status="ok", perplexity_received=10.0 + n) for n in range(3)
    ]
    scores = {"results": [{"task": "made_here", "metric": "acc", "value": 0.25, "stderr": 0.1}]}
    note = {"after_round": 2, "global_loss": 2.3, "global_loss_over": [], "scores": scores}
    (archive / "evaluation.json").write_text(
        json.dumps(note | {"facilities": [dataclasses.asdict(row) for row in rows]})
    )
    card = ModelCard.load(publish(federation, tmp_path / "out") / "model" / "README.md")
    found = {(one.dataset_name, one.metric_type): one.metric_value for one in card.data.eval_results}
    names = ("facility-00", "facility 2", "facility 3")
    expected = {(f"validation data of {name}", "perplexity"): 10.0 + number for number, name in enumerate(names)}
    assert found == expected | {("made_here", "acc"): 0.25}
    assert "| made_here | coordinator | acc | 0.250 |" in card.text
    assert "| validation data of facility 2 | facility 2 | perplexity | 11.000 |" in card.text


def test_the_digests_on_the_card_are_those_of_the_files_beside_it(federation: Path, tmp_path: Path):
    model = tmp_path / "archive" / "round-0002" / "model"
    (model / "second_moments").mkdir()
    shutil.copy(model / "model.safetensors", model / "second_moments")
    (model / "source.json").write_text('{"source": "/home/somebody/models/pico"}')
    (model / "README.md").write_text("of the base model")
    write_manifest(model, Manifest(kind="model", federation="made", round=3))
    record_model(Archive(tmp_path / "archive"))
    out = publish(federation, tmp_path / "out") / "model"
    assert not (out / "source.json").exists(), "a path of the coordinator's machine"
    card = (out / "README.md").read_text()
    told = dict(re.findall(r"- SHA-256 of `(.*)`: `(.*)`", card))
    beside = [path for path in out.rglob("*") if path.is_file() and path.name != "README.md"]
    assert told == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in beside}
    assert "config.json" in told and "of the base model" not in card
    assert not (out / "second_moments").exists(), "what only the federation's optimizers need"


def test_published_adapters_name_the_public_base_and_no_path(federation: Path, tmp_path: Path):
    """An adapter that peft saved names its base by a path of its own machine."""
    model = Archive(tmp_path / "archive").round_directory(2) / "model"
    configuration = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": "/home/alice/secret/llama"}
    (model / "adapter_config.json").write_text(json.dumps(configuration))
    write_manifest(model, Manifest(kind="model", federation="made", round=0))
    described = yaml.safe_load(federation.read_text()) | {"base_model": "HuggingFaceTB/SmolLM2-135M"}
    federation.write_text(yaml.safe_dump(described))
    published = publish(federation, tmp_path / "out") / "model"
    file = published / "adapter_config.json"
    named = {"base_model_name_or_path": described["base_model"], "task_type": "CAUSAL_LM"}
    assert json.loads(file.read_text()) == configuration | named
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert f"SHA-256 of `adapter_config.json`: `{digest}`" in (published / "README.md").read_text()


@pytest.mark.parametrize("moments", [True, False])
def test_whoever_has_the_published_files_alone_finds_them_in_the_records(
    federation: Path, tmp_path: Path, moments: bool
):
    """The digest that crate and records name follows from the files and the card, as the card says."""
    model = tmp_path / "archive" / "round-0002" / "model"
    if moments:
        (model / "second_moments").mkdir()
        (model / "second_moments" / "model.safetensors").write_bytes(b"other tensors")
    write_manifest(model, Manifest(kind="model", federation="made", round=3))
    record_model(Archive(tmp_path / "archive"))
    out = publish(federation, tmp_path / "out")
    card = (out / "model" / "README.md").read_text()
    (recorded,) = re.findall(r"this model is `(\w{64})`", card)
    assert f"urn:sha256:{recorded}" in (out / "crate" / "ro-crate-metadata.json").read_text()
    beside = [path for path in (out / "model").rglob("*.safetensors")]
    found = {one.relative_to(out / "model").as_posix(): hashlib.sha256(one.read_bytes()).hexdigest() for one in beside}
    behind = dict(re.findall(r"`([^`]*)` `(\w{64})`", card))
    assert bool(behind) == moments
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted((found | behind).items()))
    assert hashlib.sha256(lines.encode()).hexdigest() == recorded


def test_weights_that_are_not_those_of_the_round_are_not_published(federation: Path, tmp_path: Path):
    model = tmp_path / "archive" / "round-0002" / "model"
    save_pico(model, seed=9)
    write_manifest(model, Manifest(kind="model", federation="made", round=3))
    with pytest.raises(InputError, match="the record of its round names"):
        publish(federation, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_keys_and_trackers_of_those_who_trained_are_not_published(federation: Path, tmp_path: Path):
    """Nor asked for of whoever makes the model again."""
    described = yaml.safe_load(federation.read_text())
    described["training"] = {"signing_key": "/home/bob/.ssh/key", "tracker": "wandb", "trace": True, "steps": 7}
    sync = {"emulation": {"trace": "~/bob/speeds.json", "seconds": 0.0}}
    described["facilities"][1]["training"] = {"signing_key": "~/.ssh/bobs-key", "sync": sync}
    federation.write_text(yaml.safe_dump(described))
    crate = publish(federation, tmp_path / "out") / "crate"
    again = yaml.safe_load((crate / "workflow" / "federation.yml").read_text())
    assert again["training"] == {"steps": 7}
    assert again["facilities"][1]["training"] == {"sync": {"emulation": {"seconds": 0.0}}, "ranks": 8}
    assert "replicas of facility 2 were slowed down" in (crate / "reproduce.md").read_text()
    assert not [file for file in crate.rglob("*") if file.is_file() and "bob" in file.read_text()]


def test_nothing_of_a_facilitys_machines_is_in_a_crate(federation: Path, tmp_path: Path):
    text = federation.read_text().replace("dataset: /data", "dataset: /work/EUHPC_D01/corpus")
    slurm = "deployment: {type: slurm, host: h, template: slurm, workdir: /w, options: {account: EUHPC_D01}}"
    text = text.replace("name: facility-01,", f"name: facility-01, {slurm},")
    text += (
        "training: {lora: {rank: 4, base: /work/EUHPC_D01/bases/smollm}}\n"
        "evaluation: {tasks: [t], facility: facility-02, directory: /work/EUHPC_D01/tasks}\n"
        "sending: {signing_key: ~/.ssh/coordinator, encoding: full}\ntrackers: [tensorboard]\n"
        "notify: {command: [mail]}\n"
    )
    federation.write_text(text)
    crate = publish(federation, tmp_path / "out") / "crate"
    told = "\n".join(path.read_text(errors="replace") for path in crate.rglob("*") if path.is_file())
    for secret in ("EUHPC_D01", ".ssh/coordinator", "facility-02", "facility-01"):
        assert secret not in told, secret
    again = yaml.safe_load((crate / "workflow" / "federation.yml").read_text())
    assert not {"evaluation", "trackers", "notify"} & set(again) and again["sending"] == {"encoding": "full"}
    assert again["training"]["lora"] == {"rank": 4, "base": "smollm"}
    assert "as `smollm` in the folder that `$CROSSFED_HOME` names" in (crate / "reproduce.md").read_text()


def test_a_name_of_digits_is_published_as_it_is_written(federation: Path, tmp_path: Path):
    """YAML 1.1 takes 0123 for 83; federation.yml does not."""
    text = federation.read_text().replace("{name: facility-01,", "{name: 0123, public: {named: true},")
    federation.write_text(text)
    again = publish(federation, tmp_path / "out") / "crate" / "workflow" / "federation.yml"
    assert [one.name for one in read_federation(again).facilities] == ["facility-00", "0123", "facility-3"]


def told_by(out: Path) -> str:
    """All text of a publication."""
    files = [path for path in out.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    return "\n".join(f"{path}\n{path.read_text(errors='replace')}" for path in files)


def changed_rows(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what the archive has of each round."""
    archive = Archive(root / "archive")
    for number in archive.rounds():
        path = archive.round_directory(number) / "round.json"
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))


def test_an_unnamed_facility_keeps_its_own_words_to_itself(federation: Path, tmp_path: Path):
    words = "nid001234: /scratch/veiled is gone"

    def change(record: dict[str, Any]) -> None:
        for row in record["facilities"][1:]:
            row |= {"note": words, "unasked": words, "scores": {"results": [], "problem": words}}
            row["drift"] = {"rates": 1.0, "corrected": False, "share": 0.0, "reason": words}

    changed_rows(tmp_path, change)
    archive = add_comparison(Archive(tmp_path / "archive"), ["facility-00", "facility-01", "facility-02"])
    account = read_account(archive)
    assert account is not None
    alone = account.alone | {"facility-02": OwnTraining(rounds=1, of=3, reason=words)}
    write_account(archive, dataclasses.replace(account, alone=alone, gaps={"facility-01": f"not evaluated: {words}"}))
    told = told_by(publish(federation, tmp_path / "out"))
    assert "nid001234" not in told and "veiled" not in told


def test_a_facility_that_left_the_federation_is_not_named(federation: Path, tmp_path: Path):
    federation.write_text(federation.read_text().replace("  - {name: facility-02, dataset: /data}\n", ""))
    told = told_by(publish(federation, tmp_path / "out"))
    assert "facility-02" not in told and "facility 3" in told


def test_no_path_of_a_facility_that_is_named_or_of_a_key_is_published(federation: Path, tmp_path: Path):
    """Reasons in its own words hold paths, and with them names of accounts; so do relative ones in the settings."""
    described = yaml.safe_load(federation.read_text())
    described["training"] = {"lora": {"rank": 4, "base": "hospital/models/base7"}}
    federation.write_text(yaml.safe_dump(described))
    said = "no room in /home/alice/veiled/data.npy or ~/veiled/x"
    keys = [
        f"{at}: veiled/old -> veiled/new; no result changes" for at in ("sending.signing_key", "training.lora.base")
    ]
    keys += [f"facilities[facility-00].{key}: veiled/old -> veiled/new; x" for key in ("training.signing_key", "model")]
    keys += ["aggregation.allowed_signers: veiled/old -> veiled/new; x", "training.steps: 10 -> 20; x"]

    archive = Archive(tmp_path / "archive")
    for number in range(3):
        path = archive.round_directory(number) / "round.json"
        record = json.loads(path.read_text()) | {"changes": keys}
        record["facilities"][0]["reason"] = record["facilities"][0]["note"] = said
        path.write_text(json.dumps(record))
    out = publish(federation, tmp_path / "out")
    whole = told_by(out)
    assert "no room in …/data.npy or …/x" in whole and "training.steps: 10 -> 20" in whole and "…/base7" in whole
    for part in ("alice", "veiled", "hospital"):
        assert part not in whole, part


def test_no_path_that_settings_of_training_may_hold_is_published(federation: Path, tmp_path: Path):
    """Whatever key it is of, however it is written, and what it was before."""
    keys = ("lora.base", "layout.plan", "preference.reference", "sync.emulation.trace", "signing_key")
    changes, training = [], dict[str, Any]()
    for key in keys:
        *above, last = key.split(".")
        place = training
        for name in above:
            place = place.setdefault(name, {})
        place[last] = f"veiled/{last}.x" if last == "plan" else f"/home/veiled/{last}.x"
        changes.append(f"training.{key}: veiled/old -> veiled/new; holds from the next round on")
    described = yaml.safe_load(federation.read_text())
    described["training"] = {"lora": training.pop("lora") | {"rank": 4}}
    described["facilities"][1]["training"] = training
    federation.write_text(yaml.safe_dump(described))
    changed_rows(tmp_path, lambda record: record.update(changes=changes))
    told = told_by(publish(federation, tmp_path / "out"))
    at = told.find("veiled")
    assert at < 0, told[max(0, at - 300) : at + 60]


def test_changes_tell_nothing_of_what_is_published_of_nobody(federation: Path, tmp_path: Path):
    lines = [
        "facilities[facility-00].deployment.options.account: EUHPC_D01 -> EUHPC_D02; its jobs start",
        "facilities[facility-00].dataset: veiled/a -> veiled/b; it trains on other data from the next round on",
        "evaluation.directory: veiled -> veiled2; results do not change",
        "training.steps: 10 -> 20; holds from the next round on",
    ]
    changed_rows(tmp_path, lambda record: record.update(changes=lines if record["round"] == 1 else []))
    told = told_by(publish(federation, tmp_path / "out"))
    assert "EUHPC" not in told and "veiled" not in told
    assert "facilities[facility-00].deployment.options.account was changed" in told
    assert "training.steps: 10 -> 20; holds" in told


@pytest.mark.parametrize("name", ["facility", "rounds", "facility-0", "facility-000"])
def test_a_name_may_be_a_key_of_the_report_or_a_part_of_another_name(name: str, federation: Path, tmp_path: Path):
    for path in [federation, *(tmp_path / "archive").rglob("*.json*")]:
        path.write_text(path.read_text().replace("facility-01", name))
    out = publish(federation, tmp_path / "out")
    history = json.loads((out / "crate" / "history.json").read_text())
    assert {row["facility"] for entry in history for row in entry["facilities"]} == {
        "facility-00",
        "facility 2",
        "facility 3",
    }
    page = (out / "crate" / "report.html").read_text()
    assert "facility-00: as received" in page and "facility 2: as received" in page


@pytest.mark.parametrize("name", ["ok", "train", "rounds", "coordinator"])
def test_a_facility_may_be_called_as_our_own_words(name: str, federation: Path, tmp_path: Path):
    """`ok` was replaced in every row's status, `train` in the timeline's kinds, `rounds` in what a curve counts."""

    def shown() -> dict[str, Any]:
        data = data_of(read_federation(federation))
        result = anonymous(data, public_names(read_federation(federation), data["facilities"]))
        result["timeline"]["segments"].sort(key=json.dumps)  # they are in the order of names
        return result

    expected = shown()
    for path in [federation, *(tmp_path / "archive").rglob("*.json*")]:
        path.write_text(path.read_text().replace("facility-01", name))
    found = shown()
    for key in ("mode", "facilities", "rounds", "timeline", "failures", "traffic", "matrix", "curves", "similarity"):
        assert found[key] == expected[key], key
    assert found["settings"]["aggregation"]["weights"] == "tokens"
    own = "the coordinator" if name == "coordinator" else "coordinator"
    assert found["versions"][own]["crossfed"] == expected["versions"]["coordinator"]["crossfed"]


def test_a_published_page_has_no_links_into_the_archive(federation: Path, tmp_path: Path):
    page = (publish(federation, tmp_path / "out") / "crate" / "report.html").read_text()
    assert re.findall(r'href="([^"#]+)"', page) == []


def test_weights_by_facility_are_published_under_published_names(federation: Path, tmp_path: Path):
    weights = "{facility-00: 1.0, facility-01: 2.0, facility-02: 3.0}"
    federation.write_text(federation.read_text() + f"aggregation: {{weights: {weights}}}\n")
    out = publish(federation, tmp_path / "out")
    assert "facility-01" not in told_by(out)
    again = yaml.safe_load((out / "crate" / "workflow" / "federation.yml").read_text())
    assert again["aggregation"]["weights"] == {"facility-00": 1.0, "facility-2": 2.0, "facility-3": 3.0}
    assert set(again["aggregation"]["weights"]) == {one["name"] for one in again["facilities"]}


def test_a_run_that_cannot_be_repeated_says_why_and_promises_no_digest(federation: Path, tmp_path: Path):
    text = (publish(federation, tmp_path / "out") / "crate" / "reproduce.md").read_text()
    assert "not to the same bits" in text and "--expect" not in text
    archive = Archive(tmp_path / "archive")
    for record in archive.history():
        for row in record.facilities:
            line = f"round {record.round} was aggregated without"
            assert row.status == "ok" or line in text
        path = archive.round_directory(record.round) / "round.json"
        raw = json.loads(path.read_text())
        for row in raw["facilities"]:
            row.update(status="ok", reason="")
        path.write_text(json.dumps(raw))
    text = (publish(federation, tmp_path / "whole") / "crate" / "reproduce.md").read_text()
    assert "bit for bit" in text and "--expect" in text
    raw["changes"] = [f"{AGAIN}, from its half-precision model"]
    path.write_text(json.dumps(raw))
    text = (publish(federation, tmp_path / "rewound") / "crate" / "reproduce.md").read_text()
    assert f"round 2 was {AGAIN}" in text and "federation.yml was changed" not in text and "--expect" not in text


def test_a_short_name_is_replaced_where_it_stands_alone():
    assert (
        renamed("model of de, de_2 and de's", {"de": "facility 1"})
        == "model of facility 1, facility 1_2 and facility 1's"
    )


def test_the_mean_of_the_last_models_is_published_with_its_own_figures_where_it_was_chosen(
    federation: Path, tmp_path: Path
):
    archive = Archive(tmp_path / "archive")
    mean = save_pico(archive.path / "averaged" / "model", seed=5)
    write_manifest(mean, Manifest(kind="model", federation="made", round=3, extra={"mean_of_rounds": [1, 2]}))
    own = {"held_out": False, "blocks": 9, "predictions": 99, "against": {}}
    figures = [
        own | {"model": model, "loss": {"value": loss, "low": loss, "high": loss}}
        for model, loss in (("global", 2.0), ("last.2", 1.0))
    ]
    write_account(
        archive, Account(after_round=2, over=True, chosen="last.2", gain=1.0, figures={"facility-00": figures})
    )
    out = publish(federation, tmp_path / "out")
    assert (out / "model" / "model.safetensors").read_bytes() == (mean / "model.safetensors").read_bytes()
    card = ModelCard.load(out / "model" / "README.md")
    assert "mean of the global models of rounds 1 to 2" in card.text
    assert [one.metric_value for one in card.data.eval_results] == [pytest.approx(2.7183, abs=1e-4)]
    again = yaml.safe_load((out / "crate" / "workflow" / "federation.yml").read_text())
    assert again["evaluation"] == {"last_models": 2} and again["keep_rounds"] == 0, "else no mean is made"
    told = (out / "crate" / "reproduce.md").read_text()
    digest = read_manifest(mean).content_sha256
    assert f"archive/averaged/model --expect {digest}" in told or "archive/averaged/model\n" in told and digest in told
    graph = json.loads((out / "crate" / "ro-crate-metadata.json").read_text())["@graph"]
    run = next(one for one in graph if one["@id"] == "#run")
    assert any(digest in json.dumps(one) for one in graph if {"@id": one["@id"]} in run["result"])


def test_a_model_of_an_earlier_round_than_the_last_is_kept_where_it_is_made_again(federation: Path, tmp_path: Path):
    """The archive of a whole run drops it: by default it keeps the models of the last three rounds."""
    crate = publish(federation, tmp_path / "whole") / "crate"
    assert "keep_rounds" not in yaml.safe_load((crate / "workflow" / "federation.yml").read_text())
    federation.write_text(federation.read_text().replace("rounds: 3", "rounds: 20"))
    crate = publish(federation, tmp_path / "half") / "crate"
    assert yaml.safe_load((crate / "workflow" / "federation.yml").read_text())["keep_rounds"] == 0
    text = (crate / "reproduce.md").read_text()
    assert "ran 3 rounds" in text and "run all 20" in text and "archive/round-0002/model" in text


def test_the_crate_says_of_a_late_update_which_model_it_was_made_from_and_when_alone_that_is_known(
    federation: Path, tmp_path: Path
):
    """Facility-00 is late in rounds 0 and 1; in round 2 its update of round 0 is averaged. Of facility-01 nothing came
    in round 0, and no event says when."""

    def change(record: dict[str, Any]) -> None:
        late, absent, _ = record["facilities"]
        if record["round"] < 2:
            late |= {"status": "late", "reason": CARRIED, "update_sha256": ""}
        else:
            late |= {"status": "ok", "reason": "", "staleness": 2}
        if record["round"] == 0:
            absent |= {"status": "absent", "reason": "nothing came back"}

    changed_rows(tmp_path, change)
    events = tmp_path / "archive" / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(one for one in lines if not ("facility-01" in one and '"round": 0' in one)))
    crate = publish(federation, tmp_path / "out") / "crate"
    graph = {one["@id"]: one for one in json.loads((crate / "ro-crate-metadata.json").read_text())["@graph"]}
    assert "#round-0-facility-00" not in graph and "#round-1-facility-00" not in graph
    action = graph["#round-2-facility-00"]
    assert graph[action["object"]["@id"]]["name"] == "initial model"
    assert action["name"] == "Training at facility-00, round 0, averaged in round 2"
    assert "startTime" not in graph["#round-0-facility-2"], "the whole run is not when it trained"
    assert graph[graph["#round-2-facility-3"]["object"]["@id"]]["name"] == "global model after round 1"


@pytest.mark.parametrize(
    ("license", "expected"),
    [
        ("", {}),
        ("Apache-2.0", {"license": "apache-2.0"}),
        ("GPL-3.0-only", {"license": "other", "license_name": "gpl-3.0-only"}),
        ("https://e.example/a b", {"license": "other", "license_name": "e.example-a-b"}),
        ("Our own, see LICENSE", {"license": "other", "license_name": "our-own-see-license"}),
        ("許諾", {"license": "other", "license_name": "see-link"}),
    ],
)
def test_the_hub_takes_the_cards_licence(license: str, expected: dict[str, str]):
    """It refuses a card whose `license` is not one of its own identifiers, which are in small letters."""
    found = license_of(license)
    link = found.pop("license_link", "")
    assert found == expected
    assert link == {"GPL-3.0-only": "https://spdx.org/licenses/GPL-3.0-only"}.get(
        license, "https://e.example/a%20b" if "://" in license else ""
    )


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_that_peft_loads_with_the_bases_head_are_told(
    tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """An embedding that is trained whole beside adapters is the head too, where the model ties them."""
    model = save_pico(tmp_path / "model", tie_word_embeddings=tied)
    for path in model.glob("*.safetensors*"):
        path.unlink()
    embedding = {f"{PREFIX}model.embed_tokens.weight": torch.zeros(128, 32)}
    save_file(embedding, model / ADAPTER)
    (model / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    (line,) = loaded_otherwise(model) or [""]
    assert ("`model.embed_tokens.weight` was trained as one weight with `lm_head.weight`" in line) == tied, line
    assert ("takes from the base" in caplog.text) == tied
