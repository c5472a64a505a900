"""federation.yml is read strictly: each mistake is one clear error with its file and line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from coordinator.config.closing import ClosingSettings
from coordinator.config.federation import Federation, read_federation
from coordinator.config.local_paths import check_paths
from coordinator.config.options import check_options
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.settings import read_facility_settings
from tests.federations import write_federation

GOOD = """\
name: two-sites.v1
model: ../model
rounds: 3
training:
  steps: 7
  learning_rate: 1e-3
facilities:
  - name: site-a
    dataset: ../a
    training: {ranks: 2}
  - name: b.2
    dataset: /data/b
aggregation: {rule: mean}
"""


def read(tmp_path: Path, text: str):
    path = tmp_path / "federation.yml"
    path.write_text(text)
    return read_federation(path)


def test_defaults_are_merged_facility_by_facility(tmp_path: Path):
    federation = read(tmp_path, GOOD)
    first, second = federation.facilities
    assert (first.training.steps, first.training.ranks, first.training.learning_rate) == (7, 2, 1e-3)
    assert (second.training.steps, second.training.ranks) == (7, 1)
    assert first.deployment.type == "local"


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("rounds: 3", "rounds: 0", 3, "rounds is 0, expected 1 or more"),
        ("rounds: 3", "rounds: many", 3, "rounds is 'many', expected a whole number"),
        ("rounds: 3", "roundz: 3", 3, "unknown key 'roundz'; did you mean 'rounds'?"),
        ("  steps: 7", "  stepz: 7", 5, "unknown key 'training.stepz'; did you mean 'steps'?"),
        ("  steps: 7", "  steps: 0", 5, "steps is 0, expected more than 0"),
        ("  steps: 7", "  beta1: 1.5", 5, "beta1 is 1.5, expected 0 or more and less than 1"),
        ("  steps: 7", "  beta2: 1", 5, "beta2 is 1, expected 0 or more and less than 1"),
        ("  steps: 7", "  epsilon: -1.0e-8", 5, "epsilon is -1e-08, expected 1e-30 or more"),
        ("  steps: 7", "  epsilon: 0", 5, "epsilon is 0, expected 1e-30 or more"),
        ("  steps: 7", "  minimum_learning_rate_ratio: -5", 5, "learning_rate_ratio is -5, expected 0 or more"),
        ("  steps: 7", "  lora: {rank: 4, alpha: 0}", 5, "training.lora.alpha is 0, expected more than 0"),
        ("  steps: 7", "  sync: {relay: -1}", 5, "training.sync.relay is -1, expected 0 or more"),
        ("{ranks: 2}", "{rank: 2}", 10, "unknown key 'facilities[0].training.rank'; did you mean 'ranks'?"),
        ("name: b.2", "name: site-A", 11, "facility 'site-A' is listed twice"),
        ("name: b.2", "name: Site-a-ssh", 11, "made for facility 'Site-a', its connection; choose another"),
        ("name: b.2", "name: site-a-api", 11, "made for facility 'site-a', its connection"),
        ("name: b.2", "name: site-a-ahead", 11, "its jobs ahead of their model"),
        ("name: b.2", "name: site-a-login", 11, "its login commands"),
        ("name: b.2", "name: ../b", 11, "expected 1-63 letters, digits"),
        ("name: b.2", "name: 'b 2'", 11, "expected 1-63 letters, digits"),
        ("name: two-sites.v1", "name: -x", 1, "the first a letter or digit"),
        ("    dataset: /data/b\n", "", 11, "lacks dataset"),
        ("{rule: mean}", "{rule: meen}", 13, "rule is 'meen'"),
        ("rounds: 3", "rounds: 3\nrounds: 4", 4, "key 'rounds' is given twice"),
        ("rounds: 3", "rounds: [3", None, "not valid YAML"),
        ("  steps: 7", "  steps: 7\n   threads: 1", 6, "; indent the lines of one level alike, by blanks and no tab"),
        ("  steps: 7", "\tsteps: 7", 5, "; indent the lines of one level alike, by blanks and no tab"),
        ("  steps: 7", "  lr: 1e-4", 5, "unknown key 'training.lr'; did you mean 'learning_rate'?"),
        ("  steps: 7", "  precision: bf16", 5, "unknown key 'training.precision'; did you mean 'compute_dtype'?"),
        ("  steps: 7", "  gpus: 4", 5, "unknown key 'training.gpus'; did you mean 'ranks'?"),
        ("  steps: 7", "  lora: {r: 4}", 5, "unknown key 'training.lora.r'; did you mean 'rank'?"),
        ("/data/b", "$WORK/data", 12, "dataset is '$WORK/data', expected the path of a prepared dataset, written out"),
        ("model: ../model", "file: x", 2, "unknown key 'file'"),
        ("rounds: 3", "rounds: 3\nminimum_facilities: 5", 4, "expected 1 to 2"),
        (
            "    dataset: /data/b\n",
            "    dataset: /data/b\n    deployment:\n      type: slurm\n      host: a b\n      workdir: /w\n"
            "      template: t.sh\n",
            15,
            "facilities[1].deployment: host is 'a b', expected a name or address",
        ),
        ("/data/b", '"/data/b\\nrm -rf x"', 12, "expected one line of text"),
        ("/data/b", '"/data/\\u2028b"', 12, "expected one line of text"),
        ("../model", '"m\\tx"', 2, "expected one line of text"),
        ("name: two-sites.v1", 'name: "a\\nb"', 1, "expected 1-63 letters"),
        ("name: two-sites.v1", "name: /etc", 1, "a name, not a path"),
        ("{rule: mean}", '{rule: mean, exclude: ["a\\nb"]}', 13, "expected one line of text"),
        *(
            (
                "    dataset: /data/b\n",
                "    dataset: /data/b\n    deployment:\n      type: slurm\n      host: h\n      workdir: /w\n"
                f"      template: t.sh\n      options: {{account: {value}}}\n",
                18,
                words,
            )
            for value, words in (
                ('"$(id)"', "'$' means something to the shell"),
                ('{"$(id)": b}', "'$' means something to the shell"),
                ("'`id`'", "'`' means something to the shell"),
                ('"a\\nb"', "'\\n' means something to the shell"),
                ("a;b", "';' means something to the shell"),
                ("{a: b}", "expected text or a number"),
            )
        ),
    ],
)
def test_a_mistake_is_one_error_with_file_and_line(tmp_path: Path, old: str, new: str, line: int | None, words: str):
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path, GOOD.replace(old, new))
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'federation.yml'}:")
    if line is not None:
        assert caught.value.line == line


@pytest.mark.parametrize(
    ("aggregation", "words"),
    [
        (
            "{maximum_share: 0.4, screen: {minimum_updates: 2}}",
            "shares of 2 facilities make 1 together: expected 0.5",
        ),
        ("{rule: krum}", "krum with byzantine 0 compares 3 updates or more, and the federation has 2 facilities"),
        ("{rule: bulyan+nesterov, byzantine: 1}", "bulyan with byzantine 1 compares 7 updates or more"),
        ("{rule: trimmed_mean}", "trimmed_mean with trim 0.2 compares 3 updates or more"),
        (
            "{weights: {site-a: 1.0}}",
            "aggregation.weights names site-a, expected a number for each facility: b.2 missing",
        ),
        ("{weights: {site-a: 1.0, b-2: 1.0}}", "b.2 missing"),
        ("{rule: trimmed_mean, trim: 0}", ""),
        ("{weights: {site-a: 1.0, b.2: 2.0, left: 1.0}}", ""),
    ],
)
def test_what_could_average_no_round_is_told_before_one_is_trained(tmp_path: Path, aggregation: str, words: str):
    text = GOOD.replace("{rule: mean}", aggregation)
    if not words:
        read(tmp_path, text)
        return
    with pytest.raises(ConfigurationError, match=re.escape(words)) as caught:
        read(tmp_path, text)
    assert caught.value.line == 13


def test_the_coordinator_evaluates_no_adapters_that_travel_without_their_base(tmp_path: Path):
    """It has no model below them; a facility has."""
    lora = "  steps: 7\n  lora: {rank: 2, base: /data/base}\n"
    asked = GOOD.replace("  steps: 7\n", lora) + "evaluation: {tasks: [arc_easy], facility: WHERE}\n"
    with pytest.raises(ConfigurationError, match="adapters alone travel and the coordinator has no model below them"):
        read(tmp_path, asked.replace("WHERE", "coordinator"))
    assert read(tmp_path, asked.replace("WHERE", "b.2")).evaluation.facility == "b.2"
    read(tmp_path, asked.replace("WHERE", "coordinator").replace("base: /data/base", "alpha: 4"))


def test_all_that_is_left_to_fill_in_is_told_at_once(tmp_path: Path):
    text = GOOD.replace("../model", "<model's directory>").replace("dataset: /data/b", "dataset: <prepared dataset>")
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path, text)
    assert "values in <angle brackets> are still to be filled in" in str(caught.value) and caught.value.line == 2
    assert "model (line 2), facilities[1].dataset (line 12)" in str(caught.value)


def test_no_facilities(tmp_path: Path):
    with pytest.raises(ConfigurationError, match="facilities is empty"):
        read(tmp_path, "name: x\nmodel: m\nrounds: 1\nfacilities: []\n")


def test_missing_paths_are_told_with_their_line(tmp_path: Path):
    path = write_federation(tmp_path, ["a", "b"])
    check_paths(read_federation(path))
    (tmp_path / "sites" / "b" / "dataset").rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="dataset of facility 'b' is .*expected the output of") as caught:
        check_paths(read_federation(path))
    assert caught.value.line is not None and "dataset" in path.read_text().splitlines()[caught.value.line - 1]


def test_the_command_writes_nothing_on_bad_input(tmp_path: Path):
    path = write_federation(tmp_path, ["a", "b"], rounds=0)
    before = sorted(tmp_path.rglob("*"))
    result = subprocess.run(
        [sys.executable, "-m", "coordinator.cli", "render", "-f", path], capture_output=True, text=True, env=os.environ
    )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "rounds is 0" in result.stderr and f"{path}:" in result.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("key", ["layout: {plan: PATH}", "lora: {base: PATH}", "sync: {emulation: {trace: PATH}}"])
def test_a_local_facilitys_paths_count_from_the_file_and_must_be_there(tmp_path: Path, key: str):
    path = write_federation(tmp_path, ["a"])
    path.write_text(path.read_text().replace("training:\n", f"training:\n  {key.replace('PATH', '../here/x')}\n"))
    with pytest.raises(ConfigurationError, match=f"is {tmp_path / 'here' / 'x'}, which does not exist") as caught:
        check_paths(read_federation(path))
    assert caught.value.line is not None and "../here/x" in path.read_text().splitlines()[caught.value.line - 1]
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "x").touch()
    check_paths(read_federation(path))


@pytest.mark.parametrize("name", ["/abs", "..", "../x", "a/b", "", "a\nb"])
def test_names_in_a_facilitys_settings_are_never_paths(tmp_path: Path, name: str):
    file = tmp_path / "settings.json"
    for key in ("federation", "facility"):
        values = {"federation": "f", "facility": "a", "rounds": 1, "seed": 0} | {key: name}
        file.write_text(json.dumps(values))
        with pytest.raises(ConfigurationError, match=f"{key} is .*, expected 1-63 letters"):
            read_facility_settings(file)


@pytest.mark.parametrize(("share", "facilities", "needed"), [(0.28, 25, 7), (0.07, 100, 7), (0.281, 25, 8)])
def test_a_quorum_that_is_a_share_is_that_share_of_the_facilities(share: float, facilities: int, needed: int):
    assert ClosingSettings(quorum=share).needed(facilities) == needed


def test_rounds_may_say_how_they_close(tmp_path: Path):
    def described(**rounds: object) -> Federation:
        return read_federation(write_federation(tmp_path / uuid.uuid4().hex, ["a", "b", "c"], rounds=rounds))

    assert described(count=4).rounds == 4 and described(count=4).closing is None
    for quorum, needed in ((2, 2), (0.5, 2), (0.67, 3), (1, 1)):
        closing = described(count=4, quorum=quorum, late="carry").closing
        assert (closing.needed(3) if closing else 3) == needed
    assert described(count=4, quorum=1, late="wait").closing is None
    for wrong, sentence in (
        ({"count": 4, "quorum": 4}, "rounds.quorum is 4, expected 1 to 3"),
        ({"count": 4, "quorum": 0}, "rounds.quorum"),
        ({"quorum": 2}, "rounds lacks count"),
        ({"count": 4, "qorum": 2}, "did you mean 'quorum'"),
        ({"count": 4, "quorum": 2, "grace": -1}, "rounds.grace"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(sentence)):
            described(**wrong)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ('{resources: {walltime: "02:00:00", select: "2:ncpus=8"}, priority: "3"}', ""),
        ('{resources: "walltime=02:00:00"}', "expected a mapping such as"),
        ("{resources: {walltime: {a: b}}}", "expected text or a number"),
        ("{destination: {a: b}}", "expected text or a number"),
        ("{destination: 5}", "options.destination is 5, expected text: put it between quotes"),
        ("{destination: on}", "options.destination is true, expected text: put it between quotes"),
        ("{priority: 3}", "options.priority is 3, expected text: put it between quotes"),
        ('{rerunnable: "yes"}', "options.rerunnable is 'yes', expected true or false"),
    ],
)
def test_options_have_the_form_that_streamflow_takes(tmp_path: Path, options: str, words: str):
    deployment = f"deployment: {{type: pbs, host: h, workdir: /w, template: pbs, options: {options}}}"
    file = tmp_path / "federation.yml"
    file.write_text(f"name: a\nmodel: m\nrounds: 1\nfacilities:\n  - {{name: a, dataset: /d, {deployment}}}\n")
    if words:
        with pytest.raises(ConfigurationError, match=words):
            read_federation(file)
    else:
        assert read_federation(file).facilities[0].deployment.options["resources"]["walltime"] == "02:00:00"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exclusive": "user"}, "options.exclusive is set, but .* script's name; .*`#SBATCH --exclusive="),
        ({"nice": 100}, "script's name"),
        ({"propagate": "NONE"}, "script's name"),
        ({"getUserEnv": "10"}, "`#SBATCH --get-user-env="),
        ({"mincpus": 4}, "does not know"),
        ({"useMinNodes": True}, "`#SBATCH --use-min-nodes`"),
        ({"distribution": "block"}, "does not hand it on"),
        ({"array": "0-3"}, "a round is one job"),
        ({"clusters": "b"}, "name a login node of that cluster"),
    ],
)
def test_what_sbatch_would_not_get_as_it_is_meant_is_refused(options: dict[str, object], words: str):
    """`sbatch --exclusive "user"` of Slurm 22.05: Unable to open file user. The check, which wrote --exclusive=user,
    was content."""
    with pytest.raises(ConfigurationError, match=words):
        check_options("slurm", options)


def test_a_whole_number_stands_without_quotes():
    with pytest.raises(ConfigurationError, match="options.ntasks is '4', expected a whole number, without quotes"):
        check_options("slurm", {"ntasks": "4"})
    check_options("slurm", {"ntasks": 4, "nodes": "4", "exclusive": True, "overcommit": False})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("3.10", "fill.python is 3.1, expected text: put it between quotes, since a number is written without"),
        ("on", "fill.python is true, expected text: put it between quotes, since YAML takes yes, no, on and off for"),
        ("[a, b]", r"fill.python is \['a', 'b'\], expected text or a whole number"),
        ("", "fill.python is empty, expected text or a whole number"),
    ],
)
def test_what_fills_a_template_is_what_was_typed(tmp_path: Path, value: str, words: str):
    """`3.10` reached the job's script as 3.1, `on` as True."""
    file = tmp_path / "federation.yml"
    deployment = f"deployment: {{type: pbs, host: h, workdir: /w, template: pbs, fill: {{python: {value}}}}}"
    file.write_text(f"name: a\nmodel: m\nrounds: 1\nfacilities:\n  - {{name: a, dataset: /d, {deployment}}}\n")
    with pytest.raises(ConfigurationError, match=words):
        read_federation(file)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("name: a\nmodel: m\nrounds: 1\nfacilties: []\n", 4, "unknown key 'facilties'; did you mean 'facilities'"),
        ("name: a\nmodel: m\nfacilities: [{name: a, dataset: d}]\n", 1, "rounds missing, expected name, model"),
        ("name: a\nmodel: m\nrounds: 1\nsteps: 5\n", 4, "unknown key 'steps'; did you mean 'training.steps'"),
        ("name: a\nmodel: m\nrounds: 1\nfacilities: [{name: no, dataset: d}]\n", 4, "put it between quotes, since"),
        ('name: a\nmodel: m\nrounds: "3"\nfacilities: [{name: a, dataset: d}]\n', 3, "remove the quotes"),
        (
            "name: a\nmodel: m\nrounds: 1\nfacilities:\n- {name: a, dataset: d, deployment: {type: ssh, host: 'h:0', "
            "workdir: /w}}\n",
            5,
            "host is 'h:0', expected a port of 1 to 65535",
        ),
    ],
)
def test_first_mistakes_are_told_at_their_line(tmp_path: Path, text: str, line: int, words: str):
    file = tmp_path / "federation.yml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=words) as caught:
        read_federation(file)
    assert caught.value.line == line


def test_a_folder_whose_name_is_not_utf_8_is_told_as_the_file_is_read(tmp_path: Path):
    """What names it, streamflow.yml and JSON, could not be written: the check broke, the run began anew for ever."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/h\xe9me"))
    folder.mkdir()
    with pytest.raises(ConfigurationError, match="bytes that are not UTF-8") as told:
        read(folder, GOOD)
    assert "dce9me" in str(told.value) and str(told.value).isascii()
