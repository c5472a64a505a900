"""Bad input, a full disk, and SIGKILL: one clear error or a clean restart, and nothing half-written."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from coordinator.aggregate import main, read_settings
from coordinator.aggregation.reading import TensorReader
from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.verify import check_tokenizer, check_update
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.writer import TensorWriter
from facility.exchange.errors import CheckpointError, ConfigurationError, CrossFedError, InputError, UpdateRefused
from facility.exchange.messages.manifest import Manifest, read_manifest, verify_manifest, write_manifest
from tests.aggregation import make
from tests.aggregation.make import aggregate

SHAPES = {"a.weight": (30, 20), "b.bias": (7,)}


@pytest.fixture
def round0(tmp_path: Path) -> tuple[Path, list[Path]]:
    start = make.random_tensors(0, SHAPES, torch.bfloat16) | {"steps": torch.arange(4)}
    base = make.model(tmp_path / "base", start)
    return base, [make.update(tmp_path / f, make.moved(start, i), base=base, facility=f) for i, f in enumerate("xyz")]


def nothing_left(tmp_path: Path) -> bool:
    return not list(tmp_path.glob("out*")) and not list(tmp_path.glob(".*"))


def test_no_updates(round0, tmp_path: Path):
    with pytest.raises(InputError, match="no updates.*--update"):
        aggregate(base=round0[0], updates=[], out=tmp_path / "out")


def test_one_update_is_itself(round0, tmp_path: Path):
    base, updates = round0
    aggregate(base=base, updates=updates[:1], out=tmp_path / "out")
    got, sent = make.read_all(tmp_path / "out"), make.read_all(updates[0])
    assert all(torch.equal(got[name], sent[name]) for name in sent)


def test_the_same_facility_twice(round0, tmp_path: Path):
    base, updates = round0
    with pytest.raises(InputError, match="both updates of facility 'x'"):
        aggregate(base=base, updates=[updates[0], updates[0]], out=tmp_path / "out")


CHANGES = {
    "a tensor too few": (lambda t: t.pop("b.bias"), "1 missing .*b.bias"),
    "a tensor too many": (lambda t: t.update(more=torch.zeros(3)), "1 unknown .*more"),
    "another shape": (
        lambda t: t.update({"a.weight": torch.zeros(20, 30, dtype=torch.bfloat16)}),
        r"shape \[20, 30\], expected \[30, 20\]",
    ),
    "a whole number for a float": (lambda t: t.update({"b.bias": torch.zeros(7, dtype=torch.int32)}), "dtype I32"),
    "another buffer": (lambda t: t.update(steps=torch.arange(4) + 1), "differs from the base's"),
    "NaN": (lambda t: t["a.weight"].view(-1)[3].fill_(float("nan")), "a.weight.*NaN"),
    "infinity": (lambda t: t["b.bias"][0].fill_(float("-inf")), "b.bias.*infinity"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_tensors_that_do_not_fit(round0, tmp_path: Path, case: str):
    base, updates = round0
    change, words = CHANGES[case]
    tensors = make.read_all(updates[1])
    change(tensors)
    bad = make.update(tmp_path / "bad", tensors, base=base, facility="bad")
    with pytest.raises(UpdateRefused, match=f"'bad'.*{words}"):
        aggregate(base=base, updates=[*updates, bad], out=tmp_path / "out", state_out=tmp_path / "out-state")
    assert nothing_left(tmp_path)
    with pytest.raises(UpdateRefused, match=f"'bad'.*{words}"):
        check_update(bad, open_checkpoint(base), read_manifest(base), "bad", 0)


@pytest.mark.parametrize("rule", ["mean", "median"])
@pytest.mark.parametrize("statistics", ["off", "sample", "exact"])
def test_one_value_that_is_none_is_never_hidden(tmp_path: Path, rule: str, statistics: str):
    start = {"w": torch.zeros(3 << 16)}
    base = make.model(tmp_path / "base", start)
    updates = [make.update(tmp_path / f, make.moved(start, i), base=base, facility=f) for i, f in enumerate("xyz")]
    tensors = make.moved(start, 9)
    tensors["w"][100_000] = float("nan")
    bad = make.update(tmp_path / "bad", tensors, base=base, facility="bad")
    settings = AggregationSettings(rule=rule, statistics=statistics)
    with pytest.raises(UpdateRefused, match="'bad'"):
        aggregate(base=base, updates=[*updates, bad], out=tmp_path / "out", settings=settings)


@pytest.mark.parametrize("accumulate", ["float32", "float64"])
def test_nan_of_any_payload_is_refused_where_nothing_is_measured(tmp_path: Path, accumulate: str):
    """Rounded to bfloat16 by an addition to its bits, this one became -0.0, and NaN stayed in the master."""
    base = make.model(tmp_path / "base", {"w": torch.zeros(100, dtype=torch.bfloat16)})
    sound = make.update(tmp_path / "sound", {"w": torch.ones(100)}, base=base, facility="sound")
    tensors = {"w": torch.ones(100)}
    tensors["w"].view(torch.int32)[3] = 0x7FFFFFFF
    bad = make.update(tmp_path / "bad", tensors, base=base, facility="bad")
    settings = AggregationSettings(rule="mean", statistics="off", accumulate=accumulate)
    with pytest.raises(UpdateRefused, match="'bad'"):
        aggregate(base=base, updates=[sound, bad], out=tmp_path / "out", settings=settings)


def test_another_round_another_model_another_tokenizer(round0, tmp_path: Path):
    base, updates = round0
    tensors = make.read_all(updates[0])
    late = make.update(tmp_path / "late", tensors, base=base, facility="late", round=3)
    with pytest.raises(UpdateRefused, match="'late'.*round 3, expected round 0"):
        aggregate(base=base, updates=[late], out=tmp_path / "out")
    other = make.model(tmp_path / "other", make.moved(tensors, 9))
    stray = make.update(tmp_path / "stray", tensors, base=other, facility="stray")
    with pytest.raises(UpdateRefused, match="'stray'.*another model"):
        aggregate(base=base, updates=[stray], out=tmp_path / "out")
    (base / "tokenizer.json").write_text("{}")
    write_manifest(base, Manifest(kind="model", federation="test", round=0))
    (updates[0] / "tokenizer.json").write_text("{ }")
    write_manifest(updates[0], read_manifest(updates[0]))
    with pytest.raises(UpdateRefused, match="'x'.*tokenizer"):
        aggregate(base=base, updates=updates, out=tmp_path / "out")
    assert nothing_left(tmp_path)


def test_a_tokenizer_of_another_size_is_refused_without_reading_it(tmp_path: Path, monkeypatch):
    """A sparse file of a terabyte takes no room at a facility, and an hour to hash here."""
    base, update = tmp_path / "base", tmp_path / "update"
    for place in (base, update):
        place.mkdir()
        (place / "tokenizer.json").write_text("{}")
    os.truncate(update / "tokenizer.json", 1 << 40)
    monkeypatch.setattr("coordinator.aggregation.verify.sha256_of", lambda path: pytest.fail(f"{path} is read"))
    with pytest.raises(UpdateRefused, match="'x'.*its tokenizer.json differs from the base model's"):
        check_tokenizer(base, update, "x")


def test_a_late_update_is_discounted_where_that_is_allowed(tmp_path: Path):
    base = make.model(tmp_path / "base", {"w": torch.zeros(2)}, round=3)
    fresh = make.update(tmp_path / "f", {"w": torch.tensor([1.0, 0])}, base=base, facility="fresh")
    late = make.update(tmp_path / "l", {"w": torch.tensor([0, 1.0])}, base=base, facility="late", round=0)
    settings = AggregationSettings(rule="mean", maximum_staleness=3, staleness_exponent=0.5)
    record = aggregate(base=base, updates=[late, fresh], out=tmp_path / "out", settings=settings)
    # three rounds late: (1 + 3) ** -0.5 = 1/2, so 2/3 and 1/3
    assert [(p.facility, p.staleness, round(p.weight, 6)) for p in record.participants] == [
        ("fresh", 0, 0.666667),
        ("late", 3, 0.333333),
    ]
    torch.testing.assert_close(make.read_all(tmp_path / "out")["w"], torch.tensor([2 / 3, 1 / 3]))


def test_by_hand_a_late_update_is_refused_whatever_the_settings_say(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Its step counts from the model of its own round: from `--base`, what others learned since was taken back."""
    before = make.model(tmp_path / "before", {"w": torch.zeros(2)}, round=0)
    late = make.update(tmp_path / "late", {"w": torch.tensor([0, 1.0])}, base=before, facility="late")
    base = make.model(tmp_path / "base", {"w": torch.ones(2)}, round=1)
    fresh = make.update(tmp_path / "fresh", {"w": torch.tensor([2.0, 1])}, base=base, facility="fresh")
    (tmp_path / "settings.yml").write_text("aggregation: {rule: mean, maximum_staleness: 3}\n")
    arguments = ["--base", str(base), "--update", str(late), "--update", str(fresh), "--out", str(tmp_path / "out")]
    arguments += ["--settings", str(tmp_path / "settings.yml")]
    with pytest.raises(UpdateRefused, match="'late'.*it is of round 0, expected round 1$"):
        main(arguments)
    assert main([*arguments, "--drop-refused"]) == 0
    assert "dropped: late: it is of round 0" in caplog.text
    assert make.read_all(tmp_path / "out")["w"].tolist() == [2.0, 1.0]


@pytest.mark.parametrize("name", ["evil.bin", "evil.PKL", "modeling.py"])
def test_files_that_run_code_are_refused(round0, name: str):
    base, updates = round0
    (updates[0] / name).write_bytes(b"\x80\x02.")
    write_manifest(updates[0], read_manifest(updates[0]))
    with pytest.raises(UpdateRefused, match=f"'x'.*{name}.*safetensors only"):
        check_update(updates[0], open_checkpoint(base), read_manifest(base), "x", 0)


def test_a_link_out_of_the_directory_is_refused(round0, tmp_path: Path):
    base, updates = round0
    (tmp_path / "secret").write_text("secret")
    (updates[0] / "notes.txt").symlink_to(tmp_path / "secret")
    write_manifest(updates[0], read_manifest(updates[0]))
    with pytest.raises(UpdateRefused, match="'x'.*'notes.txt' is a symbolic link out of"):
        check_update(updates[0], open_checkpoint(base), read_manifest(base), "x", 0)
    os.mkfifo(updates[1] / "pipe")
    with pytest.raises(UpdateRefused, match="'y'.*'pipe' is neither"):
        check_update(updates[1], open_checkpoint(base), read_manifest(base), "y", 0)


def test_a_value_that_does_not_fit_the_output(tmp_path: Path):
    base = make.model(tmp_path / "base", {"w": torch.zeros(2, dtype=torch.float16)})
    far = make.update(tmp_path / "u", {"w": torch.full((2,), 6e4, dtype=torch.float16)}, base=base, facility="far")
    with pytest.raises(InputError, match="'w'.*does not fit F16.*learning rate"):
        aggregate(
            base=base,
            updates=[far],
            out=tmp_path / "out",
            settings=AggregationSettings(rule="fedavgm", server_learning_rate=3),
        )
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("rule", ["fedadam", "fedyogi", "fedadagrad"])
def test_a_value_whose_square_the_optimizer_could_not_keep_is_its_facilitys_fault(rule: str, tmp_path: Path):
    """An infinite second moment would hold its weight where it is, in this round and in all that follow."""
    base = make.model(tmp_path / "base", {"w": torch.zeros(3)})
    sound = make.update(tmp_path / "u0", {"w": torch.ones(3)}, base=base, facility="near")
    far = make.update(tmp_path / "u1", {"w": torch.tensor([1.0, 1e20, 1.0])}, base=base, facility="far")
    settings = AggregationSettings(rule=rule)
    with pytest.raises(UpdateRefused, match="'far'.*'w'.*absurdly large"):
        aggregate(base=base, updates=[sound, far], out=tmp_path / "out", settings=settings)
    assert nothing_left(tmp_path)
    out, state = tmp_path / "out", tmp_path / "state"
    record = aggregate(base=base, updates=[sound, far], out=out, state_out=state, settings=settings, drop_refused=True)
    assert list(record.dropped) == ["far"] and make.read_all(state / "second_moment")["w"].isfinite().all()


def test_a_state_of_another_round_or_model(round0, tmp_path: Path):
    base, updates = round0
    aggregate(base=base, updates=updates, out=tmp_path / "m1", state_out=tmp_path / "s1")
    with pytest.raises(CheckpointError, match="state for round 1 .*model of round 0"):
        aggregate(base=base, updates=updates, out=tmp_path / "m2", state_in=tmp_path / "s1")
    other = make.model(tmp_path / "other", make.read_all(base), round=1)
    update = make.update(tmp_path / "later", make.read_all(updates[0]), base=other, facility="x")
    with pytest.raises(CheckpointError, match="state of another model"):
        aggregate(base=other, updates=[update], out=tmp_path / "m2", state_in=tmp_path / "s1")


def test_a_state_that_is_not_there_is_named_as_it_was_typed(round0, tmp_path: Path):
    base, updates = round0
    (tmp_path / "file").write_text("")
    for name, found in (("NOSUCH", "is not there"), ("file", "is a file")):
        with pytest.raises(CheckpointError, match=rf"/{name} {found}: expected a directory with a manifest\.json"):
            aggregate(base=base, updates=updates, out=tmp_path / "m1", state_in=tmp_path / name)
    assert not (tmp_path / "m1").exists()


def test_sharding_on_either_side_and_mixed_dtypes(tmp_path: Path):
    start = make.random_tensors(0, {f"t{i}": (50, 40) for i in range(6)}, torch.bfloat16)
    results = []
    for number, sizes in enumerate(((1 << 30, 1 << 30), (9000, 5000), (4000, 20000))):
        root = tmp_path / str(number)
        base = make.model(root / "base", start, shard_bytes=sizes[0])
        updates = [
            make.update(
                root / f"u{i}",
                {n: t.to(d) for n, t in make.moved({n: t.float() for n, t in start.items()}, i).items()},
                base=base,
                facility=f"u{i}",
                shard_bytes=sizes[1],
            )
            for i, d in enumerate((torch.bfloat16, torch.float16, torch.float32))
        ]
        aggregate(base=base, updates=updates, out=root / "out")
        results.append(make.read_all(root / "out"))
        assert len(list((root / "out").glob("*.safetensors"))) == len(list((root / "base").glob("*.safetensors")))
    for other in results[1:]:
        assert all(torch.equal(other[name], results[0][name]) for name in start)


def test_float64_is_the_correctly_rounded_mean(tmp_path: Path):
    start = make.random_tensors(0, {"w": (200_000,)}, torch.bfloat16)
    base = make.model(tmp_path / "base", start)
    sent = [make.moved(start, i, 1e-3) for i in range(4)]
    updates = [make.update(tmp_path / f"u{i}", t, base=base, facility=f"u{i}") for i, t in enumerate(sent)]
    aggregate(
        base=base,
        updates=updates,
        out=tmp_path / "out",
        settings=AggregationSettings(rule="mean", accumulate="float64", weights="equal", **make.UNBOUNDED),
    )
    exact = sum(t["w"].double() for t in sent) / 4
    # Rounded once: torch goes through float32, so compare distances, not torch's own rounding.
    got = make.read_all(tmp_path / "out")["w"]
    for neighbour in (-1, 1):
        other = (got.view(torch.int16) + neighbour).view(torch.bfloat16).double()
        assert bool(((got.double() - exact).abs() <= (other - exact).abs()).all())


def test_parts_of_a_model_are_personal(tmp_path: Path):
    start = make.random_tensors(0, {"body.w": (30,), "head.w": (30,)}, torch.float32)
    base = make.model(tmp_path / "base", start)
    one = make.moved(start, 1)
    updates = [
        make.update(tmp_path / "a", one, base=base, facility="a"),
        make.update(tmp_path / "b", {"body.w": one["body.w"]}, base=base, facility="b"),  # its head never leaves
    ]
    record = aggregate(
        base=base, updates=updates, out=tmp_path / "out", settings=AggregationSettings(rule="mean", exclude=["head.*"])
    )
    got = make.read_all(tmp_path / "out")
    torch.testing.assert_close(got["body.w"], one["body.w"])
    assert torch.equal(got["head.w"], start["head.w"]) and record.tensors_personal == 1
    with pytest.raises(ConfigurationError, match="leave no floating-point tensor"):
        aggregate(base=base, updates=updates, out=tmp_path / "o", settings=AggregationSettings(include=["nothing.*"]))


def test_output_exists_already(round0, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("mine")
    with pytest.raises((CrossFedError, FileExistsError), match="exists already"):
        aggregate(base=round0[0], updates=round0[1], out=tmp_path / "out")
    assert (tmp_path / "out" / "precious").read_text() == "mine"


@pytest.mark.parametrize(("out", "state"), [("o", "o"), ("o/model", "o"), ("o", "o/state"), ("o", "x/../o")])
def test_outputs_in_one_another_are_refused_before_anything_is_written(round0, tmp_path: Path, out: str, state: str):
    """The state took the name first, and stayed where the model had no place left."""
    base, updates = round0
    with pytest.raises(InputError, match="neither in the other"):
        aggregate(base=base, updates=updates, out=tmp_path / out, state_out=tmp_path / state)
    assert not (tmp_path / "o").exists()


def test_fewer_threads_than_none(round0, tmp_path: Path):
    with pytest.raises(InputError, match="threads is -3, expected 1 or more"):
        aggregate(base=round0[0], updates=round0[1], out=tmp_path / "out", threads=-3)


def test_command_line(round0, tmp_path: Path, capsys):
    base, updates = round0
    arguments = ["--base", str(base), *[w for u in updates for w in ("--update", str(u))]]
    assert main([*arguments, "--out", str(tmp_path / "out"), "--rule", "median", "--json"]) == 0
    assert '"combiner": "median"' in capsys.readouterr().out
    plain = make.checkpoint(tmp_path / "plain", make.read_all(base))  # no report says what it counts
    by_hand = ["--base", str(plain), "--update", str(plain), "--out", str(tmp_path / "by-hand")]
    with pytest.raises(UpdateRefused, match="set weights to 'equal'"):
        main(by_hand)
    with pytest.raises(InputError, match="--rule is empty, expected a value"):
        main([*by_hand, "--weights", "equal", "--rule", ""])
    assert main([*by_hand, "--weights", "equal"]) == 0
    (tmp_path / "settings.yml").write_text("aggregation:\n  rulle: mean\n")
    with pytest.raises(ConfigurationError, match=r"settings.yml:2: .*did you mean 'rule'"):
        read_settings(tmp_path / "settings.yml")
    (tmp_path / "federation.yml").write_text("name: whole\nfacilities: []\n")
    assert read_settings(tmp_path / "federation.yml") == AggregationSettings(), "its defaults, as for a run"
    done = subprocess.run(
        [sys.executable, "-m", "coordinator.aggregate", "--base", str(base), "--out", str(tmp_path / "out2")],
        capture_output=True,
        text=True,
    )
    assert (
        done.returncode == 2
        and done.stderr.startswith("error: there are no updates")
        and "Traceback" not in done.stderr
    )


@pytest.fixture
def large(tmp_path: Path) -> list[str]:
    """Arguments of an aggregation that takes long enough to be interrupted: 24 MB of bfloat16."""
    start = {f"t{i}": torch.full((1 << 20,), 0.5 + i, dtype=torch.bfloat16) for i in range(12)}
    base = make.model(tmp_path / "base", start)
    arguments = [sys.executable, "-m", "coordinator.aggregate", "--base", str(base)]
    for name in "xyz":
        update = make.update(tmp_path / name, {n: t + 1 for n, t in start.items()}, base=base, facility=name)
        arguments += ["--update", str(update)]
    return arguments


def test_a_full_disk_is_one_clear_error(large: list[str], tmp_path: Path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = (
        os.geteuid() == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", str(small)], capture_output=True
        ).returncode
        == 0
    )
    limited = [] if mounted else ["bash", "-c", 'ulimit -f 10000; trap "" XFSZ; exec "$@"', "bash"]  # 10 MB a file
    try:
        done = subprocess.run(
            [*limited, *large, "--out", str(small / "out"), "--state-out", str(small / "state")],
            capture_output=True,
            text=True,
        )
        assert done.returncode not in (0, 1) and "Traceback" not in done.stderr, done.stderr
        assert done.stderr.startswith(f"error: {small} is full: {small}/" if mounted else f"error: {small}/")
        assert "nothing was left behind" in done.stderr and ("free now" in done.stderr) == mounted
        assert list(small.iterdir()) == []
    finally:
        if mounted:
            subprocess.run(["umount", str(small)], check=True)
    done = subprocess.run([*large, "--out", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("where", ["read", "write"])
def test_an_error_in_one_thread_ends_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str):
    start = {f"t{i}": torch.ones(1 << 12) for i in range(40)}
    base = make.model(tmp_path / "base", start)
    updates = [make.update(tmp_path / f, make.moved(start, i), base=base, facility=f) for i, f in enumerate("xy")]
    owner, name = (TensorReader, "read") if where == "read" else (TensorWriter, "write")
    whole, calls = getattr(owner, name), itertools.count()

    def failing(*arguments):
        if next(calls) == 17:
            raise OSError(errno.EIO, "Input/output error")
        return whole(*arguments)

    monkeypatch.setattr(owner, name, failing)
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="Input/output error"):
        aggregate(base=base, updates=updates, out=tmp_path / "out", threads=3)
    assert nothing_left(tmp_path) and not set(threading.enumerate()) - before


def test_sigkill_at_any_moment_leaves_nothing_half(large: list[str], tmp_path: Path):
    out, state = tmp_path / "out", tmp_path / "state"
    (temporary := tmp_path / "tmp").mkdir()
    command = ["env", f"TMPDIR={temporary}", *large, "--out", str(out), "--state-out", str(state)]
    began = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    whole, wanted = time.monotonic() - began, read_manifest(out).content_sha256
    shutil.rmtree(out), shutil.rmtree(state)
    for share in (0.4, 0.6, 0.8, 0.95):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(share * whole)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for directory in (out, state):
            if directory.exists():
                verify_manifest(directory)  # whole, or not there
        if out.exists():  # it was done before the signal came
            assert state.exists()
            shutil.rmtree(out), shutil.rmtree(state)
    done = subprocess.run(command, capture_output=True, text=True)  # the same command again
    assert done.returncode == 0, done.stderr
    assert verify_manifest(out).content_sha256 == wanted
    assert verify_manifest(state).kind == "state"
    assert not [*tmp_path.glob(".*"), *temporary.iterdir()], "litter of killed runs is removed"
