"""Laws of `tests.forked_workers`: a worker of pytest-xdist that is a fork is to execnet what a new Python is."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import execnet
import pytest

from tests import distributed, forked_workers
from tests.conftest import ROOT

ASK = """
import os, sys, threading
channel.send((os.getpid(), 'tests.conftest' in sys.modules, hasattr(sys.modules['__main__'], '__file__')))
"""


def test_a_gateway_is_a_fork_while_there_are_some_then_a_new_python_and_all_end(monkeypatch: pytest.MonkeyPatch):
    forked = forked_workers.Forked()
    monkeypatch.setattr(forked_workers, "READY", [forked])
    monkeypatch.setattr(execnet.gateway_io, "Popen2IOMaster", forked_workers.Gateway)
    group = execnet.Group(execmodel="main_thread_only")
    told = [group.makegateway("popen").remote_exec(ASK).receive(60) for _ in range(2)]
    group.terminate(60)
    (first, imported, from_a_file), (second, anew, _) = told
    assert (first, imported, from_a_file) == (forked.pid, True, False)
    assert second != first and not anew
    for process in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_a_server_that_is_a_fork_runs_its_code_with_the_words_after_it():
    """Python 3.14 starts the server of `multiprocessing` with the words of this process, such as those of pytest."""
    reads, writes = os.pipe()
    code = f"import os, sys; os.write({writes}, repr(sys.argv).encode())"
    child = distributed._serve_in_a_fork(b"", ["python", "-X", "dev", "-c", code, "-m", "not slow"], (writes,))
    os.close(writes)
    os.waitpid(child, 0)
    with open(reads) as answer:
        assert answer.read() == "['-c', '-m', 'not slow']"


def test_no_worker_is_forked_where_a_test_began_a_thread_as_it_was_imported(monkeypatch: pytest.MonkeyPatch):
    """A fork waits for ever for threads of OpenMP that it lacks, at the first sum that is made on two."""
    monkeypatch.setattr(forked_workers, "READY", [])
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert forked_workers.threads() > 1  # those of gateways that have just ended may be counted, or not
        forked_workers.fork_workers(1, [__file__], ROOT)
        assert not forked_workers.READY
    finally:
        ended.set()
        thread.join()


def test_what_is_imported_is_what_the_arguments_name(tmp_path: Path):
    tests = Path(__file__).parent
    assert forked_workers._modules([f"{__file__}::test_a"], ROOT) == [__name__]
    below = forked_workers._modules([str(tests)], ROOT)
    assert below == [f"{__package__}.{file.stem}" for file in sorted(tests.glob("test_*.py"))]
    assert not forked_workers._modules([str(tmp_path), str(tmp_path / "none.py")], ROOT)
