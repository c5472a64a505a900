"""`python -m facility.base_model DIR [--expect SHA256]`: the digest of a base model, for `training.lora.base_sha256`.

Reads the tensor files once and remembers their digests, so that neither `crossfed check` nor a job has to.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from facility.exchange.checkpoints.base_model import base_digest
from facility.exchange.errors import exit_on_error
from facility.exchange.exit_codes import ExitCode
from facility.exchange.files.paths import resolve
from facility.exchange.logs import add_log_options
from facility.exchange.messages.manifest import expected_digest


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m facility.base_model", description=__doc__)
    parser.add_argument("model", metavar="DIR", help="the model's directory; relative paths count from $CROSSFED_HOME")
    parser.add_argument("--expect", metavar="SHA256", help="exit 1 where the digest is another")
    add_log_options(parser)
    arguments = parser.parse_args()
    directory, expected = Path(resolve(arguments.model)), expected_digest(arguments.expect)
    found = base_digest(directory)
    print(found)
    if expected is not None and found != expected:
        print(f"{directory} is another model, expected {expected}", file=sys.stderr)
        return int(ExitCode.FOUND)
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
