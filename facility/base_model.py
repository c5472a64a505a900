"""`python -m facility.base_model DIR [--expect SHA256]`: the digest of a base model, for `training.lora.base_sha256`.

Reads the tensor files once and remembers their digests, so that neither `crossfed check` nor a job has to.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from facility.exchange.checkpoints.base_model import base_digest
from facility.exchange.command_line import parse_arguments
from facility.exchange.errors import exit_on_error
from facility.exchange.expected_digest import expected_digest, print_digest
from facility.exchange.files.paths import resolve_path
from facility.exchange.logs import add_log_options


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m facility.base_model", description=__doc__)
    parser.add_argument("model", metavar="DIR", help="the model's directory; relative paths count from $CROSSFED_HOME")
    parser.add_argument("--expect", metavar="SHA256", help="exit 1 where the digest is another")
    add_log_options(parser)
    arguments = parse_arguments(parser)
    directory, expected = Path(resolve_path(arguments.model)), expected_digest(arguments.expect)
    return print_digest(directory, base_digest(directory), expected)


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
