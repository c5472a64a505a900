"""Files that are none: named pipes, devices, links that lead back to themselves, files without an end."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from coordinator.aggregate import read_settings
from coordinator.aggregation.state import make_way
from coordinator.aggregation.verify import check_files
from coordinator.config.federation import read_federation
from coordinator.config.locate import named_in_utf8
from coordinator.model import convert_model
from coordinator.models.adapter_export import export_adapter
from coordinator.models.adapter_import import import_adapter
from coordinator.plan import budget_of
from coordinator.publishing.publish import publish
from facility import evaluate, measure, probe
from facility.dataset import DatasetError, open_dataset
from facility.exchange.errors import ConfigurationError, CrossFedError, InputError, UpdateRefused
from facility.exchange.files.audit_log import append
from facility.exchange.files.bounded import read_bounded
from facility.exchange.files.durable import new_directory, write_text
from facility.exchange.files.storage import file_error_sentence
from facility.exchange.json_values import read_values
from facility.exchange.messages.audit_compare import compare_logs, head_of
from facility.exchange.messages.manifest import Manifest, write_manifest
from facility.exchange.messages.report import read_failure
from facility.exchange.messages.settings import read_facility_settings
from facility.exchange.messages.template_inheritance import find_template, read_template
from facility.gating.policy import read_policy
from facility.measuring.allocation import check_out, sizes_of
from facility.preparing.shared_signatures import read_salt
from tests.distributed import Started
from tests.federations import write_dataset
from tests.publishing.made import made_federation

KINDS = ("pipe", "device", "loop", "endless", "deep", "folder", "bytes")


def special(place: Path, kind: str) -> Path:
    """A file of this kind at `place`; the device is endless, and nobody writes to the pipe."""
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    elif kind == "loop":
        place.symlink_to(place.name)
    elif kind == "endless":
        place.touch()
        os.truncate(place, 1 << 40)
    elif kind == "deep":
        place.write_text("[" * 100_000)
    elif kind == "folder":
        place.mkdir()
    else:
        place.write_bytes(b"\xff\xfe\x00\x81")
    return place


def one_log(path: Path) -> Path:
    """An audit log of one line."""
    append(path, "made")
    return path


READERS = {
    "federation": lambda path: read_federation(named_in_utf8(path)),
    "aggregation": read_settings,
    "facility settings": read_facility_settings,
    "values": read_values,
    "policy": read_policy,
    "template": lambda path: read_template(find_template(str(path), path.parent)),
    "dataset": lambda path: open_dataset(path.parent),
    "salt": read_salt,
    "audit log": head_of,
    "compared log": lambda path: compare_logs(one_log(path.with_name("log")), [str(path)]),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_one_error_and_neither_waited_for_nor_read_to_its_end(
    reader: str, kind: str, tmp_path: Path
):
    if (reader, kind) == ("template", "deep"):
        pytest.skip("text that is a template")
    with pytest.raises(CrossFedError) as caught:
        READERS[reader](special(tmp_path / "dataset.json", kind))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.timeout(60)
def test_a_plans_problem_that_is_nested_deep_asks_for_no_budget(tmp_path: Path):
    for kind in KINDS:
        assert budget_of(special(tmp_path / kind, kind), queues=[], samples=None, gain=0.0) is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device", "loop", "folder"])
def test_an_array_of_a_dataset_is_a_file(kind: str, tmp_path: Path):
    dataset = write_dataset(tmp_path / "dataset")
    (dataset / "train.npy").unlink()
    special(dataset / "train.npy", kind)
    with pytest.raises(DatasetError, match=r"train\.npy"):
        open_dataset(dataset)


def test_a_link_of_an_update_that_leads_back_to_itself_is_refused_by_its_facilitys_name(tmp_path: Path):
    special(tmp_path / "extra", "loop")
    with pytest.raises(UpdateRefused, match="'alpha' refused: 'extra' is neither a file nor a directory"):
        check_files(tmp_path, "alpha")
    with pytest.raises(CrossFedError, match="is not a regular file"):
        write_manifest(tmp_path, Manifest(kind="model", federation="f", round=0))


def test_a_command_says_in_one_line_that_a_path_leads_back_to_itself(tmp_path: Path):
    for module, arguments in {
        "coordinator.cli": ["status", "-f", special(tmp_path / "federation.yml", "loop")],
        "coordinator.model": ["--source", special(tmp_path / "model", "loop"), "--out", tmp_path / "out"],
        "coordinator.aggregate": [
            "--base",
            tmp_path / "model",
            "--update",
            tmp_path / "model",
            "--out",
            tmp_path / "o",
        ],
    }.items():
        done = Started(module, [*map(str, arguments)], tmp_path / module, dict(os.environ)).ended()
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("error: ")


def test_a_pipe_that_the_shell_opened_is_read_whole(tmp_path: Path):
    reads, writes = os.pipe()
    with os.fdopen(writes, "wb") as file:
        file.write(json.dumps({"a": 1}).encode())
    assert read_values(Path(f"/dev/fd/{reads}")) == {"a": 1}
    os.close(reads)


def test_more_bytes_than_are_expected_are_an_error_of_the_file(tmp_path: Path):
    (tmp_path / "file").write_bytes(bytes(100))
    assert read_bounded(tmp_path / "file", 100) == bytes(100)
    with pytest.raises(OSError, match="larger than 99 bytes, expected at most"):
        read_bounded(tmp_path / "file", 99)
    with pytest.raises(ConfigurationError, match="larger than 99 bytes, expected at most"):
        read_values(tmp_path / "file", most_bytes=99)


def test_a_dataset_whose_name_no_file_can_have_is_missing(tmp_path: Path):
    name = tmp_path / ("x" * 300)
    assert probe.dataset(name) == {"error": "missing"}
    with pytest.raises(DatasetError, match="is not a directory"):
        open_dataset(name)


def test_a_reason_that_names_a_file_by_bytes_that_are_not_utf_8_is_written(tmp_path: Path):
    """Else the job would leave nothing, and end with a code that the engine does not know."""
    missing = tmp_path / os.fsdecode(b"\xff.json")
    words = ["--model", "m", "--dataset", "d", "--settings", str(missing), "--round", "0", "--out", "out"]
    done = Started("facility.round", words, tmp_path / "said", dict(os.environ), directory=tmp_path).ended()
    assert done.returncode == 7, done.stderr
    failure = read_failure(tmp_path / "out")
    assert failure is not None and "\\udcff.json: cannot be read: No such file" in failure.reason


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_what_others_wait_for_is_not_replaced_by_a_file(kind: str, tmp_path: Path):
    """`report --out PIPE` took the pipe away from whoever reads it, and said nothing."""
    place, listening = tmp_path / "there", socket.socket(socket.AF_UNIX)
    with listening:
        if kind == "pipe":
            os.mkfifo(place)
        else:
            listening.bind(str(place))
        before = place.lstat().st_ino
        with pytest.raises(FileExistsError, match="expected a file") as caught:
            write_text(place, "text")
        assert place.lstat().st_ino == before and os.listdir(tmp_path) == ["there"]
        assert file_error_sentence(caught.value).startswith(
            f"{place} exists already: remove it, or choose another name"
        )


def test_a_folder_that_fills_while_it_is_removed_does_not_stand_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "job" / "output").mkdir(parents=True)
    with pytest.raises(OSError) as caught:
        os.rmdir(tmp_path / "job")
    told = file_error_sentence(caught.value)
    assert told.startswith(f"{tmp_path / 'job'} is written to, or holds files that are still open"), told


def test_no_directory_takes_the_place_of_a_link_that_leads_nowhere(tmp_path: Path):
    """It was found out once the directory was made, or another was made where the link leads."""
    link, place = tmp_path / "federation" / "link", tmp_path / "federation"
    place.mkdir()
    file = made_federation(place)
    before = sorted(os.listdir(place))
    link.symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="exists already; remove it"), new_directory(link):
        raise AssertionError("nothing is made for it")
    for make in (
        lambda: publish(file, link),
        lambda: make_way(None, link),
        lambda: make_way(link, tmp_path / "model"),
        lambda: export_adapter(tmp_path, base=tmp_path, out=link),
        lambda: import_adapter(tmp_path, base=tmp_path, out=link),
        lambda: convert_model("model", link, dtype="float32", revision=""),
    ):
        with pytest.raises(InputError, match="link exists"):
            make()
    assert sorted(os.listdir(place)) == sorted([*before, "link"])


@pytest.mark.parametrize("module", ["facility.probe", "facility.measure", "facility.keys", "facility.base_model"])
def test_a_name_that_no_file_can_have_is_one_error(module: str, tmp_path: Path):
    name = str(tmp_path / ("x" * 300))
    words = {
        "facility.probe": ["--dataset", "d", "--workdir", name],
        "facility.measure": ["--model", name, "--out", "o"],
        "facility.keys": ["--settings", "s", "--dataset", "d", "--round", "0", "--out", name],
        "facility.base_model": [name],
    }[module]
    done = Started(module, words, tmp_path / "said", dict(os.environ), directory=tmp_path).ended()
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("out", ["folder", "pipe", "x" * 300, "none/x"])
def test_where_a_profile_cannot_be_written_nothing_is_measured(out: str, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigurationError, match=r"--out .* directory|exists already|too long a name"):
        check_out(tmp_path / out)
    for sound in (tmp_path / "new", Path("/dev/stdout"), Path("/dev/null")):
        check_out(sound)


@pytest.mark.parametrize("option", ["--threads", "--repeats", "--warmup"])
@pytest.mark.parametrize("number", ["-1", "9" * 400], ids=["negative", "huge"])
def test_numbers_with_which_no_measurement_ends_are_one_error(option: str, number: str):
    with pytest.raises(ConfigurationError, match=f"{option} is .* expected [01] to"):
        measure.main(["--model", "m", "--out", "o", option, number])


@pytest.mark.parametrize(
    "samples",
    ["0", "1,x", "1,1", ",1", "9" * 400, "1," + "9" * 5000],
    ids=["none", "no number", "twice", "nothing", "huge", "beyond what Python reads"],
)
def test_sizes_of_a_micro_batch_that_no_tensor_has_are_one_error(samples: str):
    with pytest.raises(ConfigurationError, match="--samples is .{,50}, expected different whole numbers of 1 to"):
        sizes_of(samples)


@pytest.mark.parametrize("kind", ["device", "deep", "bytes"])
def test_settings_of_an_evaluation_that_are_no_file_are_one_error(kind: str, tmp_path: Path, monkeypatch):
    special(tmp_path / "settings", kind)
    monkeypatch.setattr(
        sys, "argv", ["evaluate", "--model", "m", "--settings", str(tmp_path / "settings"), "--out", "o"]
    )
    with pytest.raises(ConfigurationError, match="cannot be read"):
        evaluate.main()
