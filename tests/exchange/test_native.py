"""The compiled loops give the bits of the numpy code beside them; without a compiler everything still works."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.aggregation.server_optimizers import nesterov
from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.steps import Steps
from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.delta import encode_update
from facility.exchange.checkpoints.floats import STORAGE, narrow, widen
from facility.exchange.delta_codecs import load_codec
from facility.exchange.messages.manifest import read_manifest
from tests.aggregation import make
from tests.aggregation.make import aggregate
from tests.cases import slow_but
from tests.made_once import made_once

compiled = pytest.mark.skipif(native.library() is None, reason="no C compiler here")
EVERY = np.arange(1 << 16, dtype=np.uint16)
"""All half-precision numbers, NaN among them."""


def both(monkeypatch: pytest.MonkeyPatch, work):
    """What `work` returns with the compiled code and without it."""
    first = work()
    with monkeypatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        return first, work()


def values(seed: int, n: int) -> np.ndarray:
    """float32 numbers of many magnitudes, ties for bfloat16 and zeros among them."""
    random = np.random.default_rng(seed)
    found = (random.standard_normal(n) * 10.0 ** random.integers(-42, 38, n)).astype(np.float32)
    found[::7] = (found[::7].view(np.uint32) & 0xFFFF0000 | 0x8000).view(np.float32)
    found[::11] = 0
    return found


@compiled
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_widening_every_number(monkeypatch: pytest.MonkeyPatch, dtype: str):
    def work():
        out = np.empty(len(EVERY), np.float32)
        widen(EVERY.view(np.float16) if dtype == "F16" else EVERY, dtype, out)
        return out

    ours, theirs = both(monkeypatch, work)
    number = ~np.isnan(theirs)
    assert (
        np.array_equal(ours.view(np.uint32)[number], theirs.view(np.uint32)[number]) and np.isnan(ours[~number]).all()
    )


@compiled
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("n", [1, 7, 1024, 100_001])
def test_narrowing(monkeypatch: pytest.MonkeyPatch, n: int, dtype: str):
    def work():
        out = np.empty(n, STORAGE[dtype])
        given = values(n, n)
        given[1::2] = np.random.default_rng(n).standard_normal(len(given[1::2])) * 1e-4
        return narrow(given, dtype, out, np.empty(n, np.uint32)), out.view(np.uint16)

    (finite, ours), (also, theirs) = both(monkeypatch, work)
    assert finite == also and np.array_equal(ours, theirs)


@compiled
def test_halves_and_what_lies_between_them_are_rounded_as_numpy_rounds_them():
    """Every float16, the middle of every two, and the floats beside those."""
    halves = EVERY.view(np.float16).astype(np.float32)
    halves = np.sort(halves[np.isfinite(halves)])
    middle = (halves[:-1] + halves[1:]) / 2
    largest = np.array([65520, np.nextafter(np.float32(65520), np.float32(0)), 3e38, np.inf], np.float32)
    given = np.concatenate([halves, middle, *(np.nextafter(middle, np.float32(to)) for to in (-1e9, 1e9)), largest])
    given = np.ascontiguousarray(np.concatenate([given, -given]))
    out = np.empty(len(given), np.float16)
    assert narrow(given[: len(halves)], "F16", out[: len(halves)], np.empty(len(halves), np.uint32))
    assert not narrow(given, "F16", out, np.empty(len(given), np.uint32))
    with np.errstate(over="ignore"):
        assert np.array_equal(out.view(np.uint16), given.astype(np.float16).view(np.uint16))


@compiled
@pytest.mark.parametrize("rate", [1.0, 0.7])
def test_the_outer_step(monkeypatch: pytest.MonkeyPatch, rate: float):
    master, step, velocity = (values(seed, 9_999) for seed in (1, 2, 3))

    def work():
        with np.errstate(all="ignore"):
            new, (slot,) = nesterov.apply(master, step, [velocity], learning_rate=rate, momentum=0.8)
        return np.stack([new, slot]).view(np.uint32)

    ours, theirs = both(monkeypatch, work)
    assert np.array_equal(ours, theirs)


@compiled
@pytest.mark.parametrize("updates", [1, 2, 3, 4, 7, 9, 17])
@pytest.mark.parametrize("n", [5, 1024, 9_999])
def test_steps_their_products_and_their_sum(monkeypatch: pytest.MonkeyPatch, updates: int, n: int):
    dtypes = [("BF16", "F16", "F32")[i % 3] for i in range(updates + 1)]
    random = np.random.default_rng(0)
    exact = [random.standard_normal(n).astype(np.float32) for _ in dtypes]
    stored = [
        {"F32": x, "F16": x.astype(np.float16), "BF16": (x.view(np.uint32) >> 16).astype(np.uint16)}[dtype]
        for x, dtype in zip(exact, dtypes, strict=True)
    ]
    weights = [float(w) for w in random.random(updates)]

    def work(rows: bool = True):
        gram = np.ones((updates, updates))
        memory = Steps(updates, 10_000, "float32")
        base, steps, total = memory.take(stored, dtypes, gram=gram, coefficients=weights, rows=rows)
        return base.copy(), None if steps is None else steps.copy(), total.copy(), gram

    ours, theirs = both(monkeypatch, work)
    for mine, other in zip(ours[:3], theirs[:3], strict=True):
        assert np.array_equal(mine, other)
    expected = theirs[1].astype(np.float64) @ theirs[1].astype(np.float64).T + 1
    for gram in (ours[3], theirs[3]):
        np.testing.assert_allclose(gram, expected, rtol=1e-5, atol=1e-4 * np.sqrt(n))
    without = work(rows=False)
    assert without[1] is None and np.array_equal(without[2], ours[2]) and np.array_equal(without[3], ours[3])


@pytest.fixture(scope="module", params=[pytest.param("x86-64", marks=pytest.mark.slow), "haswell"])
def narrower(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The library for processors with narrower registers."""
    processor = request.param
    if platform.machine() != "x86_64":
        pytest.skip("registers of this processor have one width")
    if processor == "haswell" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("registers of 256 bits are not there")

    def compile_it(place: Path) -> None:
        flags = [flag for flag in native.FLAGS if not flag.startswith("-march")]
        compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))))
        command = [compiler, *flags, f"-march={processor}", str(native.SOURCE), "-o", str(place / "other.so"), "-lm"]
        subprocess.run(command, check=True, capture_output=True)

    return native._load(made_once(tmp_path_factory.mktemp(processor), f"native-{processor}", compile_it) / "other.so")


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    """Cut off, not rounded."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def encoded(kind: str, seed: int, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(numbers, scales, difference) of a message, all numbers and scales of either sign and zero among them."""
    random = np.random.default_rng(seed)
    if kind == "SPARSE":
        values = random.standard_normal(n).astype(np.float32)
        message = load_codec("sparse").encode(values, (0.0, 0.3, 9.0)[seed % 3] or 1e-30)
        record = np.array([native.address(message["level"]), native.address(message["code"]), 7], np.uint64)
        KEPT_ALIVE.append(message)
        return message["kept"], record, load_codec("sparse").decode(message, n)
    if kind == "PLACED":
        sent = load_codec("sparseloco").encode(random.standard_normal(n).astype(np.float32), 0.0)
        return sent["code"], sent["level"], load_codec("sparseloco").decode(sent, n)
    layout = native.BLOCKS[kind]
    numbers = random.integers(0, 256, -(-n // layout.values), np.uint8)
    scales = (random.standard_normal(-(-n // layout.block)) * 10.0 ** random.integers(-30, 3)).astype(np.float32)
    scales[::5] = 0
    if kind == "INT8":
        stored, codec = {"q": numbers.view(np.int8), "scale": np.abs(scales)}, "delta-int8"
    else:
        stored, codec = {"q": numbers, "scale": as_bfloat16(scales)}, "delta-int4"
    return stored["q"], stored["scale"], load_codec(codec).decode(stored, n)


KEPT_ALIVE: list[dict[str, np.ndarray]] = []
"""What records point to."""
KINDS_OF_SIX = {
    "sparse": ["SPARSE"] * 6,
    "sparseloco": ["PLACED"] * 6,
    "int8": ["INT8"] * 6,
    "int4": ["INT4"] * 6,
    "mixed": ["INT8", "F32", "PLACED", "SPARSE", "BF16", "INT4"],
}


@compiled
@pytest.mark.parametrize("count", [1, 4, 5, 6])
@pytest.mark.parametrize("n", [1, 255, 1024, 9_999])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("kinds", KINDS_OF_SIX.values(), ids=KINDS_OF_SIX)
def test_messages_as_they_are_stored_have_the_bits_of_decoded_updates(
    monkeypatch: pytest.MonkeyPatch, kinds: list[str], dtype: str, n: int, count: int
):
    random, wide = np.random.default_rng(n), np.empty(n, np.float32)
    exact = random.standard_normal(n).astype(np.float32)
    base = {"F32": exact, "F16": exact.astype(np.float16), "BF16": as_bfloat16(exact)}[dtype]
    widen(base, dtype, wide)
    stored, scales, plain, dtypes = [base], [0], [base], [dtype]
    kept = []
    for number, kind in enumerate(kinds[:count]):
        if kind in native.BLOCKS | native.MARKED:
            numbers, scale, difference = encoded(kind, number, n)
            kept.append(scale)
            stored.append(numbers)
            scales.append(native.address(scale))
            plain.append(wide + difference)
            dtypes.append("F32")
        else:
            values = random.standard_normal(n).astype(np.float32)
            values = values if kind == "F32" else as_bfloat16(values)
            stored.append(values)
            scales.append(0)
            plain.append(values)
            dtypes.append(kind)
    weights = [float(weight) for weight in random.random(count)]

    def taken(rows: bool, **given: Any) -> list[np.ndarray]:
        gram = np.ones((count, count))
        memory = Steps(count, 10_000, "float32")
        base, steps, total = memory.take(gram=gram, coefficients=weights, rows=rows, **given)
        return [base.copy(), total.copy(), *([steps.copy()] if steps is not None else []), gram]

    for rows in (True, False):
        ours = taken(
            rows, sources=stored, dtypes=[dtype, *kinds[:count]], places=[*map(native.address, stored)], scales=scales
        )
        decoded = taken(rows, sources=plain, dtypes=dtypes)
        for mine, other in zip(ours, decoded, strict=True):
            assert mine.tobytes() == other.tobytes()
    monkeypatch.setattr(native, "library", lambda: None)
    for mine, other in zip(ours[:2], taken(True, sources=plain, dtypes=dtypes)[:2], strict=True):
        assert np.array_equal(mine, other)


@pytest.mark.slow
@compiled
@pytest.mark.parametrize("kinds", KINDS_OF_SIX.values(), ids=KINDS_OF_SIX)
def test_steps_have_the_same_bits_whatever_the_width_of_the_registers(narrower: ctypes.CDLL, kinds: list[str]):
    ours, n, count = native.library(), 3_001, len(kinds)
    assert ours is not None
    base = values(1, n)
    base[~(np.abs(base) < 1e15)] = 1
    stored, scales, whole = [base], [np.zeros(1, np.float32)], {"F32": base[::-1].copy(), "BF16": as_bfloat16(base)}
    for number, kind in enumerate(kinds):
        numbers, scale = (
            encoded(kind, number, n)[:2] if kind in native.BLOCKS | native.MARKED else (whole[kind], scales[0])
        )
        stored.append(numbers)
        scales.append(scale)
    weights, found = np.linspace(0.1, 0.7, count, dtype=np.float32), []
    for library in (ours, narrower):
        widened, total, rows = np.empty(n, np.float32), np.empty(n, np.float32), np.empty((count, n), np.float32)
        gram, scratch = np.zeros((count, count)), np.empty(count * native.RUN + native.SPARE, np.float32)
        native.steps(
            library,
            [*map(native.address, stored)],
            [native.NUMBERS[kind] for kind in ("F32", *kinds)],
            widened,
            rows,
            gram,
            weights,
            total,
            True,
            scratch,
            [*map(native.address, scales)],
        )
        found.append([widened, rows, gram, total])
    for mine, other in zip(*found, strict=True):
        assert mine.tobytes() == other.tobytes()


@compiled
def test_inner_products_have_the_same_bits_whatever_the_width_of_the_registers(narrower: ctypes.CDLL):
    """Facilities state norms that the coordinator, on another processor, compares bit by bit."""
    ours, other = native.library(), narrower
    assert ours is not None
    for updates in (*range(1, 10), 17):
        for n in (3, 16, 31, 512, 1_500):
            rows = values(n, updates * n).reshape(updates, n)
            rows[~(np.abs(rows) < 1e15)] = 1
            grams = np.ones((2, updates, updates))
            for library, gram in zip((ours, other), grams, strict=True):
                library.crossfed_products(n, updates, native.address(rows), n, native.address(gram), 0)
            exact = rows.astype(np.float64) @ rows.astype(np.float64).T + 1
            lengths = np.sqrt(exact.diagonal())
            assert np.array_equal(grams[0], grams[1]) and np.array_equal(grams[0], grams[0].T)
            assert (np.abs(grams[0] - exact) <= 1e-5 * lengths[:, None] * lengths[None, :]).all()


@compiled
@pytest.mark.parametrize("encoding", ["delta-int8", "delta-int4", "sparse", "sparseloco"])
def test_a_whole_round_of_messages_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encoding: str):
    start = make.random_tensors(0, {"a": (300, 400), "b": (77,)}, torch.bfloat16)
    base, messages = make.model(tmp_path / "base", start), []
    for number, name in enumerate("uvwxyz"):
        moved = make.moved({name: tensor.float() for name, tensor in start.items()}, number, 1e-3)
        full = make.update(tmp_path / name, moved, base=base, facility=name)
        messages.append(tmp_path / f"message-{name}")
        encode_update(full=full, reference=base, out=messages[-1], encoding=encoding)
    names = iter("12")

    def work():
        out = tmp_path / next(names)
        aggregate(base=base, updates=messages, out=out / "model", state_out=out / "state", settings=NESTEROV)
        return [read_manifest(out / part).content_sha256 for part in ("model", "state")]

    ours, theirs = both(monkeypatch, work)
    assert ours == theirs


NESTEROV = AggregationSettings(rule="nesterov", clip_ratio=0)
"""Factors of clipping follow from sums of products, whose last bits may differ."""


@compiled
@pytest.mark.parametrize("rule", ["mean", "median", "fedadam"])
def test_a_whole_round_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rule: str):
    start = make.random_tensors(0, {"a": (300, 400), "b": (77,)}, torch.bfloat16)
    base = make.model(tmp_path / "base", start)
    updates = [make.update(tmp_path / f, make.moved(start, i), base=base, facility=f) for i, f in enumerate("xyz")]
    names = iter("12")

    def work():
        out = tmp_path / next(names)
        aggregate(base=base, updates=updates, out=out, settings=AggregationSettings(rule=rule))
        return make.read_all(out)

    ours, theirs = both(monkeypatch, work)
    assert all(torch.equal(ours[name], theirs[name]) for name in start)


def test_without_a_compiler(tmp_path: Path):
    code = "from facility.exchange.checkpoints import native; print(native.library())"
    for environment in ({"CROSSFED_NATIVE": "0", "PATH": "/usr/bin:/bin"}, {"PATH": str(tmp_path)}):
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout == "None\n", done.stderr


@pytest.fixture
def nothing_beside_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The user's cache, where the folder of Python's compiled files may not be written."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(native, "_digest", lambda compiler: "0" * 16)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    yield tmp_path / "crossfed"
    assert not (native.SOURCE.parent / "__pycache__" / NAME).exists()
    native.library.cache_clear()


NAME = f"native.{'0' * 16}.so"


@compiled
def test_an_installation_that_cannot_be_written_is_compiled_once_a_user(
    nothing_beside_the_source: Path, monkeypatch: pytest.MonkeyPatch
):
    cache = nothing_beside_the_source
    assert native.library() is not None
    assert cache.stat().st_mode & 0o777 == 0o700 and [path.name for path in cache.iterdir()] == [NAME]
    native.library.cache_clear()
    monkeypatch.setattr(native, "_compiled", lambda *_: pytest.fail("compiled once more"))
    assert native.library() is not None


@compiled
@pytest.mark.parametrize(
    "fault",
    slow_but(
        ["folder that others write"], ["folder that others write", "folder that is a link", "file that others write"]
    ),
)
def test_what_others_can_write_is_never_loaded(nothing_beside_the_source: Path, fault: str):
    cache = nothing_beside_the_source
    planted = b"not a library"
    target = cache if "link" not in fault else cache.with_name("elsewhere")
    target.mkdir(mode=0o700)
    if "link" in fault:
        cache.symlink_to(target)
    (target / NAME).write_bytes(planted)
    (target / NAME).chmod(0o666 if "file" in fault else 0o600)
    target.chmod(0o777 if "folder that others" in fault else 0o700)
    assert native.library() is not None
    replaced = (target / NAME).read_bytes() != planted
    assert replaced == ("file" in fault), "made anew in one's own folder, left alone in another's"


@compiled
@pytest.mark.parametrize("n", [1, 63, 255, 256, 65_535, 65_536])
@pytest.mark.parametrize("encoding", ["delta-int8", "delta-int4", "sparse", "sparseloco"])
def test_codecs(monkeypatch: pytest.MonkeyPatch, encoding: str, n: int):
    codec = load_codec(encoding)
    for seed, scale in ((0, 1e-4), (1, 1.0), (2, 1e-36), (3, 0.0)):
        difference = np.random.default_rng(seed).standard_normal(n).astype(np.float32) * np.float32(scale)
        if seed == 1:
            difference = values(seed, n) * np.float32(1e-6)

        def work(difference=difference):
            sent = codec.encode(difference, 1e-4)
            return sent, codec.decode(sent, n)

        (sent, decoded), (other_sent, other_decoded) = both(monkeypatch, work)
        assert sent.keys() == other_sent.keys() and np.array_equal(decoded, other_decoded)
        for name, array in sent.items():
            assert array.dtype == other_sent[name].dtype and np.array_equal(array, other_sent[name]), name
