"""Fixtures every test may use."""

from __future__ import annotations

import errno
import gc
import hashlib
import itertools
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from facility.exchange import logs
from tests.pico import save_pico

ROOT = Path(__file__).resolve().parent.parent

# Processes that tests start must find the packages, and must never ask a hub.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Processes that tests start share byte code and the compiled kernel; a shell that says otherwise costs each a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Processes that run tests are as many as there are cores, and more: a second thread of each waits for a core and spins.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Every connection to torch's store asks the name server; one that does not answer costs 5 s each time.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# A machine that is slow, or busy, fails no law: hypothesis would fail an example that takes more than 0.2 s.
hypothesis.settings.register_profile("any-machine", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("any-machine")


def _fsync(descriptor: int) -> None:
    """In the tests' own processes nothing waits for the disk, tens of thousands of times: no test takes its power away,
    and what a process that is killed has written is there without. Commands that tests start do wait."""
    os.fstat(descriptor)  # of one that is closed the error remains


os.fsync = _fsync  # type: ignore[assignment]

# Importing every test and torch leaves half a million objects that live to the end: looking through them for garbage
# again and again takes a fifth of the time until the first test.
gc.disable()

LONG = (
    *("training/test_gpu_bench.py", "engine", "demo", "rounds", "masking", "launching", "testbed"),
    *("training", "sync", "aggregation", "security", "streamflow_plugin", "preflight", "house"),
)
"""Tests that run whole federations or rounds, compile, train, or wait: they come before all that take less than a few
seconds, so that no process ends with one alone."""


def pytest_configure(config: pytest.Config) -> None:
    """Of pytest-xdist: processes that run tests are forks of the one that hands them out, which imports once what each
    would; and the servers of ranks and trainers are forks of each of those. Now, before pytest or execnet has threads,
    or handlers of logs with descriptors that a fork closes."""
    if config.pluginmanager.hasplugin("_cov") or config.getoption("collectonly"):
        return
    if hasattr(config, "workerinput"):
        from tests import distributed, forked_trainers

        distributed.fork_server_from_here()
        forked_trainers.fork_server_from_here()
    elif config.getoption("dist", "no") != "no" and config.getoption("tx"):
        from xdist.workermanage import parse_tx_spec_config

        from tests import forked_workers

        forked_workers.fork_workers(len(parse_tx_spec_config(config)), config.args, ROOT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests by what they may take: long ones, then all others, each in its own order. Where CROSSFED_TURN is
    set (to a day, say), order the files by chance, the same for the same text: a run that ends early leaves out others
    each time."""
    if turn := os.environ.get("CROSSFED_TURN"):
        items.sort(key=lambda item: by_turns(item.path, turn))
    else:
        items.sort(key=lambda item: _place(item.path))


def pytest_collection_finish() -> None:
    """From here on garbage is collected, among what the tests themselves make. torch's 80 loggers hand what they say to
    the one above them, which has a handler, too: six times a test pytest adds one of its own to each that does not."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger) and name != "torch.__trace":
            logger.handlers.clear()
            logger.propagate = True
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of pytest-xdist with `--dist loadgroup`: hand the tests out, and forget groups that are over."""
    from tests.forked_workers import Groups

    return Groups(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """That a test passed goes from one process to another without its names and marks and those of all that holds it:
    no one there reads them, and they are most of it."""
    sent = yield
    if sent and sent.get("outcome") == "passed":
        sent["keywords"] = {}
    return sent


def by_turns(path: Path, turn: str) -> str:
    """The place of a file of tests in the order of this turn."""
    return hashlib.sha256(f"{turn} {path.relative_to(ROOT).as_posix()}".encode()).hexdigest()


@cache
def _place(path: Path) -> int:
    """The place of a file's tests, looked up once a file: of each test it took a fifth of the collection."""
    below = path.relative_to(ROOT / "tests")
    return next((place for place, long in enumerate(LONG) if below.is_relative_to(long)), len(LONG))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin no test after the time that CROSSFED_BEGIN_BY states, in seconds since 1970: a slow machine's CI ends, too,
    and says what it left out. What a test computes itself, it computes on one thread, and what it logs is from warnings
    on, whatever one before has set, or a command that it called in its own process."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    for name in logs.OURS:
        logger = logging.getLogger(name)
        if logger.level:  # to set it forgets what every logger of the process has found out
            logger.setLevel(logging.NOTSET)
        logger.handlers.clear()
        logger.propagate = True  # a trainer in a test's own process hands nothing on
    os.environ.pop(logs.VARIABLE, None)
    limit = os.environ.get("CROSSFED_BEGIN_BY")
    if limit and time.time() > float(limit):
        pytest.skip("not begun: the time of this run was over (CROSSFED_BEGIN_BY)")


SET_BY_COMMANDS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def own_umask_and_signals() -> Iterator[None]:
    """What a command sets for its own process ends with its test, which may be in the process of many."""
    os.umask(mask := os.umask(0o022))
    handlers = {number: signal.getsignal(number) for number in SET_BY_COMMANDS}
    yield
    os.umask(mask)
    for number, handler in handlers.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


NUMBERS = itertools.count()


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the test alone, as pytest's own fixture makes it, but numbered by this process. pytest looks through
    the folders of all tests before for the next number and moves a link, which takes more than most tests."""
    name = re.sub(r"\W", "_", request.node.name)[:30]
    path = tmp_path_factory.getbasetemp() / f"{name}-{next(NUMBERS)}"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def no_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file system of this process is as one that has no hard links: AFS or BeeGFS across directories, SMB."""

    def refused(source: object, target: str, **_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM), os.fspath(target))

    monkeypatch.setattr(os, "link", refused)


@pytest.fixture
def pico_llama(tmp_path: Path) -> Path:
    """A pico Llama checkpoint in float32."""
    return save_pico(tmp_path / "pico-llama")
