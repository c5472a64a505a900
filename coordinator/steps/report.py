"""`python -m coordinator.steps.report`: the last step of the workflow; summarises the archive."""

from __future__ import annotations

import dataclasses
import logging
import sys
import traceback
from pathlib import Path

from coordinator.archive.narrow import print_rounds
from coordinator.archive.remarks import summary_remarks
from coordinator.archive.rounds import Archive
from coordinator.archive.summary import summary
from coordinator.config.settings import read_coordinator_settings
from coordinator.console import command_console
from coordinator.events.event import emit
from coordinator.report.data import gather
from coordinator.report.redaction import redacted
from coordinator.report.write import write_report
from coordinator.shown_text import safe_line
from coordinator.steps.options import step_parser
from facility.exchange.errors import ERROR, exit_on_error, first_line
from facility.exchange.files.durable import write_json
from facility.exchange.files.paths import resolve_path

log = logging.getLogger("coordinator.steps.report")


def main() -> int:
    parser = step_parser("report", __doc__, "archive")
    parser.add_argument("--out", type=Path, required=True, help="file to write, JSON")
    arguments = parser.parse_args()
    settings = read_coordinator_settings(arguments.federation)
    archive = Archive(resolve_path(arguments.archive))
    data = summary(archive) | {"federation": settings.federation, "aggregation": settings.chosen}
    write_json(arguments.out, data)
    try:
        gathered = gather(
            archive,
            federation=settings.federation,
            settings=redacted(dataclasses.asdict(dataclasses.replace(settings, described={}))),
            carbon=settings.carbon_g_per_kwh,
        )
        write_report(gathered, archive.path / "report.html")
    except Exception as error:  # the federation is finished all the same
        if not isinstance(error, OSError):
            traceback.print_exc()
        said = first_line(error)
        log.warning("%s cannot be written: %s; `crossfed report` tries again", archive.path / "report.html", said)
        emit("problem", text=f"the report page cannot be written ({said}): fix that, then run `crossfed report`")
    print_rounds(command_console(140), data)
    for line in summary_remarks(data):
        print(line)
    if data["stopped"]:
        reason = f"federation {settings.federation} stopped: {safe_line(data['stopped'])}"
        emit("failed", step="report", reason=reason, futile=True)
        print(f"{ERROR}{reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main, in_job=True))
