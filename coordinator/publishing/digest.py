"""`python -m coordinator.publishing.digest MODEL --expect SHA256`: is this the published model?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from facility.exchange.command_line import parse_arguments
from facility.exchange.errors import exit_on_error
from facility.exchange.expected_digest import expected_digest, print_digest
from facility.exchange.logs import add_log_options
from facility.exchange.messages.manifest import verify_manifest


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m coordinator.publishing.digest", description=__doc__)
    parser.add_argument("model", type=Path, help="a model's directory with its manifest.json")
    parser.add_argument("--expect", help="SHA-256 of the weights; exit 1 where they have another")
    add_log_options(parser)
    arguments = parse_arguments(parser)
    expected = expected_digest(arguments.expect)
    return print_digest(arguments.model, verify_manifest(arguments.model).content_sha256, expected)


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
