"""Letters of paths that schedulers and container runtimes take for more than a letter."""

from __future__ import annotations

import pytest

from facility.exchange.errors import ConfigurationError
from tests.deployments import read_deployment

PLAIN = {"type": "slurm", "host": "h", "workdir": "/w", "template": "slurm"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"type": "pbs", "template": "pbs", "workdir": "/scratch/a:b"}, "workdir is .* qsub takes .* for a host"),
        ({"type": "gridengine", "template": "gridengine", "workdir": "/scratch/a,b"}, "workdir is .* qsub takes"),
        ({"workdir": "/scratch/a:b", "environment": {"image": "/i.sif"}}, "workdir is .* a container's runtime"),
        ({"environment": {"image": "/i.sif", "home": "/h/a,b"}}, "environment.home is .* a container's runtime"),
        ({"fill": {"home": "/h/a:b"}, "environment": {"image": "/i.sif"}}, "environment.home is .* a container"),
        ({"workdir": "/scratch/a:b,c"}, ""),
        ({"environment": {"image": "/i.sif", "bind": ["/data:/mnt:ro"]}}, ""),
    ],
)
def test_a_letter_that_ends_a_path_elsewhere_is_refused(change: dict[str, object], words: str):
    """qsub(1), `-o [host:]path`; apptainer-exec(1), `--bind src[:dest[:opts]],...`."""
    if words:
        with pytest.raises(ConfigurationError, match=words):
            read_deployment(PLAIN | change, "d")
    else:
        read_deployment(PLAIN | change, "d")
