"""Law: `layout.compile` compiles where TMPDIR has no locks (Lustre mounted without `flock`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TRAINER = """
import errno, fcntl, os, tempfile

real, place = fcntl.flock, tempfile.gettempdir()

def flock(file, how):
    number = file if isinstance(file, int) else file.fileno()
    if os.readlink(f"/proc/self/fd/{number}").startswith(place):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    real(file, how)

fcntl.flock = flock
if "RANK" not in os.environ:
    import sys
    from facility.launch import main
    sys.argv = ["launch", "--ranks", "1", *sys.argv]
    raise SystemExit(main())

import torch
from transformers import AutoModelForCausalLM
from facility.exchange.messages.layout import LayoutSettings
from facility.exchange.messages.settings import TrainingSettings
from facility.training.parallel.assemble import prepare_blocks
from tests.pico import pico_config

torch.manual_seed(0)
ids, model = torch.arange(16).view(1, 16), AutoModelForCausalLM.from_config(pico_config(num_hidden_layers=1))
eager = model(input_ids=ids, labels=ids).loss
prepare_blocks(model, TrainingSettings(layout=LayoutSettings(compile=True)))
with torch.no_grad():
    compiled = model(input_ids=ids, labels=ids).loss
assert torch.allclose(eager, compiled, atol=1e-5), (eager, compiled)
print("compiled in", os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


@pytest.mark.slow
def test_what_is_compiled_lies_in_memory_where_tmpdir_has_no_locks(tmp_path: Path):
    """torch failed, in its C++ headers even where TORCHINDUCTOR_CACHE_DIR named a folder that has locks."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "tmp").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    told = subprocess.run(
        [sys.executable, tmp_path / "trainer.py"],
        env=environment | {"TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert told.returncode == 0, told.stdout[-4000:]
    (place,) = (Path(line.split()[-1]) for line in told.stdout.splitlines() if line.startswith("compiled in"))
    assert place.parent == Path("/dev/shm") and not place.exists()
