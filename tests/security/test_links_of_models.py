"""A published model with links to files of the account that took it, none of which is sent to facilities; or with
modules, none of which is run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import transformers

from coordinator import bundle, evaluation_cache
from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from coordinator.model import convert_model
from coordinator.models.adapter_export import load_base
from coordinator.preflight.coordinator import failing_here
from coordinator.quickstart import equip
from coordinator.share import share_tokenizer
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.companions import TENSORS, refuse_links_elsewhere
from facility.exchange.errors import CheckpointError, InputError
from facility.exchange.files.durable import write_json
from tests.federations import write_federation
from tests.pico import save_pico
from tests.preparing.corpora import save_tokenizer

LINKS = ("chat_template.jinja", "additional_chat_templates/tools.jinja", "notes/key", "keys")
"""As `git clone` leaves them: a file, a file of a folder, and a whole folder."""


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A file of the account's, beside the folder of its models."""
    file = tmp_path / ".ssh" / "id_ed25519"
    file.parent.mkdir()
    file.write_text("PRIVATE KEY")
    return file


def linked(model: Path, link: str, key: Path) -> Path:
    """The model, with a link that leads to the key."""
    for file in save_tokenizer(model.with_name("tokenizer")).glob("tokenizer*"):
        shutil.copyfile(file, model / file.name)
    (model / link).parent.mkdir(exist_ok=True)
    (model / link).symlink_to(key.parent if link == "keys" else key)
    return model


@pytest.mark.parametrize("link", LINKS)
def test_no_command_takes_a_model_with_a_link_out_of_its_folder(tmp_path: Path, key: Path, link: str):
    model = linked(save_pico(tmp_path / "models" / "evil", dtype="float32"), link, key)
    with pytest.raises(InputError, match=f"{link} is a link to .*expected the files themselves"):
        convert_model(str(model), tmp_path / "out", dtype="float32", revision="main")
    with pytest.raises(InputError, match="is a link to"):
        load_base(model)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("link", LINKS)
def test_no_federation_begins_with_one_or_shares_it(tmp_path: Path, key: Path, link: str):
    federation = read_federation(write_federation(tmp_path / "f", ["a"]))
    assert not failing_here(federation)
    model = linked(federation.path(federation.model), link, key)
    (row,) = failing_here(federation)
    assert row.check == "model" and f"{link} is a link to" in row.found
    with pytest.raises(InputError, match="is a link to"):
        list(share_tokenizer(federation, weights=False))
    Archive(federation.archive_path).model_for(0).mkdir(parents=True)
    assert not [row for row in failing_here(federation) if "link" in row.found], f"{model} is sent no more"


@pytest.mark.parametrize("link", LINKS)
def test_nor_does_one_that_streamflow_begins_without_crossfed_run(tmp_path: Path, key: Path, link: str):
    """Its first step copied what the link leads to into the model that facilities are sent."""
    archive = Archive(tmp_path / "archive")
    model = linked(save_pico(tmp_path / "models" / "evil", dtype="float32"), link, key)
    with pytest.raises(InputError, match=f"{link} is a link to .*expected the files themselves"):
        archive.begin(model, "heron")
    assert not archive.rounds() and not (archive.path / "initial").exists()


def test_no_index_names_weights_of_another_folder(tmp_path: Path):
    """transformers reads them: another model of the account's would be sent as the published one."""
    own, model = save_pico(tmp_path / "own", dtype="float32"), save_pico(tmp_path / "evil", dtype="float32")
    (model / "model.safetensors").unlink()
    names = dict.fromkeys(open_checkpoint(own).tensors, "../own/model.safetensors")
    write_json(model / "model.safetensors.index.json", {"metadata": {}, "weight_map": names})
    transformers.AutoModelForCausalLM.from_pretrained(model)
    with pytest.raises(CheckpointError, match=r"names the shard '\.\./own/"):
        convert_model(str(model), tmp_path / "out", dtype="float32", revision="main")
    with pytest.raises(CheckpointError, match=r"names the shard '\.\./own/"):
        load_base(model)


def test_links_within_a_download_to_the_hubs_cache_and_to_weights_elsewhere_are_taken(tmp_path: Path):
    model = tmp_path / "models--o--n" / "snapshots" / "revision"
    model.mkdir(parents=True)
    for name in ("blobs/0f", "elsewhere.safetensors"):
        (tmp_path / "models--o--n" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "models--o--n" / name).touch()
    (model / "config.json").symlink_to("../../blobs/0f")
    (model / "again.json").symlink_to("config.json")
    refuse_links_elsewhere(model)
    (model / "model.safetensors").symlink_to("../../elsewhere.safetensors")
    refuse_links_elsewhere(model, but=TENSORS)
    with pytest.raises(InputError, match="is a link to"):
        refuse_links_elsewhere(model)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("../../blobs")
    refuse_links_elsewhere(model)


def test_no_module_of_the_folder_that_a_command_is_given_in_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`python -m` and `-c` look there first: in a model's folder, say, for a `pip.py` of its maker."""
    started: list[Sequence[str]] = [bundle.download(tmp_path, python="3.11", platform="manylinux_2_28_x86_64")]
    words = ["--input", "text", "--tokenizer", "tokenizer", "--out", "data", "--block-tokens", "8"]
    monkeypatch.setattr(equip.subprocess, "run", lambda command, **_: started.append(command))
    equip.prepare_here(words)
    monkeypatch.undo()
    loaded = subprocess.CompletedProcess([], 0, "", "")
    evaluation_cache.fill_cache(tmp_path / "b", ["t"], run=lambda command, _: started.append(command) or loaded)
    for name in ("pip", "argparse"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(77)\n")
    for command in started[:3]:
        at = next(index for index, word in enumerate(command) if word in ("-m", "-c")) + 2
        ended = subprocess.run([*command[:at], "--help"], cwd=tmp_path, capture_output=True, text=True)
        assert ended.returncode == 0 and "usage" in ended.stdout.lower(), (command, ended)
