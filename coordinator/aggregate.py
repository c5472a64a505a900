"""Aggregate the updates of a round into the next model.

    python -m coordinator.aggregate --base DIR --update DIR [--update DIR ...] --out DIR [--state-out DIR]

`--out` becomes a Hugging Face checkpoint in the base's dtypes, `--state-out` the float32 master and the server
optimiser's tensors, to be given as `--state-in` next time. Both appear atomically, the state first.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator.aggregation.request import Request
from coordinator.aggregation.rules.registry import RULES
from coordinator.aggregation.run import aggregate
from coordinator.aggregation.server_optimizers.registry import SERVER_OPTIMIZERS
from coordinator.aggregation.settings import AggregationSettings
from facility.exchange.command_line import parse_arguments
from facility.exchange.errors import ConfigurationError, exit_on_error
from facility.exchange.files.bounded import read_bounded
from facility.exchange.json_text import no_duplicates, parse_values
from facility.exchange.json_values import MOST_BYTES
from facility.exchange.logs import add_log_options
from facility.exchange.text import number_of
from facility.exchange.validation import parse_dataclass

log = logging.getLogger("coordinator.aggregate")


def read_settings(path: Path | None = None, rule: str | None = None, weights: str | None = None) -> AggregationSettings:
    """Settings from a YAML or JSON file (a whole federation.yml, or its `aggregation:` section), then the overrides.

    Without a file: the plain mean, since a server optimizer helps only where another round follows.
    """
    given = {"rule": rule, "weights": weights}
    overrides = {name: text for name, text in given.items() if text is not None}
    if path is None:
        return parse_dataclass(AggregationSettings, {"rule": "mean"} | overrides)
    if (plain := _plain_json(path, overrides)) is not None:
        return plain
    from coordinator.config.yaml_lines import Lined  # 2 MB that an aggregation in a step does not need

    lined = Lined(Path(path))
    whole = isinstance(lined.data, dict) and not lined.data.keys().isdisjoint(("aggregation", "facilities"))
    raw, where = (lined.data.get("aggregation", {}), "aggregation") if whole else (lined.data, "")
    try:
        return parse_dataclass(AggregationSettings, raw | overrides if isinstance(raw, dict) else raw, where=where)
    except ConfigurationError as error:
        raise lined.error(error.message, error.key or where) from None


def _plain_json(path: Path, overrides: Mapping[str, str]) -> AggregationSettings | None:
    """The settings in a JSON file; None where YAML's reader has to look into it, or to say what is wrong."""
    try:
        found = parse_values(read_bounded(path, MOST_BYTES), object_pairs_hook=no_duplicates)
        if not isinstance(found, dict) or "facilities" in found:
            return None
        return parse_dataclass(AggregationSettings, {**found.get("aggregation", found), **overrides})
    except (ValueError, TypeError, OSError, ConfigurationError):
        return None


def rule_help() -> str:
    """The names that `--rule` takes, from the registries."""
    return (
        f"aggregation rule ({', '.join(RULES.names())}), server optimizer ({', '.join(SERVER_OPTIMIZERS.names())}), "
        "one of each joined by '+', or the dotted path of your own; overrides the settings' rule (default: mean, or "
        "the file's)"
    )


def parser() -> argparse.ArgumentParser:
    assert __doc__
    p = argparse.ArgumentParser(prog="python -m coordinator.aggregate", description=__doc__.split("\n\n")[0])
    p.add_argument("--base", type=Path, required=True, metavar="DIR", help="model that the updates started from")
    p.add_argument("--update", type=Path, action="append", default=[], metavar="DIR", help="one update; repeat")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="next model; must not exist")
    p.add_argument("--rule", metavar="NAME", help=rule_help())
    p.add_argument(
        "--weights",
        choices=("tokens", "samples", "equal"),
        help="what an update counts: its report's tokens or samples, or the same for all (default: tokens)",
    )
    p.add_argument("--state-in", type=Path, metavar="DIR", help="state of the round before (default: start from base)")
    p.add_argument("--state-out", type=Path, metavar="DIR", help="float32 master and optimiser tensors; must not exist")
    p.add_argument("--settings", type=Path, metavar="FILE", help="YAML or JSON with the aggregation settings")
    p.add_argument(
        "--record", type=Path, metavar="FILE", help="round.json (default: in --state-out, or <out>.round.json)"
    )
    p.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="the federation's, from which facilities drew its first adapters: they then count by what they moved "
        "(default: by all that they hold)",
    )
    p.add_argument("--drop-refused", action="store_true", help="go on without updates that are refused, and say so")
    p.add_argument("--threads", type=int, default=0, help="worker threads (default: 0, automatic: at most 2)")
    p.add_argument("--json", action="store_true", help="print the record as JSON")
    add_log_options(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    a = parse_arguments(parser(), arguments)
    settings = read_settings(a.settings, a.rule, a.weights)
    settings = dataclasses.replace(settings, maximum_staleness=0)  # a late step counts from a model that is not given
    record = aggregate(
        Request(
            base=a.base,
            updates=a.update,
            out=a.out,
            settings=settings,
            state_in=a.state_in,
            state_out=a.state_out,
            record=a.record,
            threads=a.threads,
            seed=a.seed,
            drop_refused=a.drop_refused,
        )
    )
    if a.json:
        print(json.dumps(dataclasses.asdict(record), indent=2))
    else:
        names = ", ".join(f"{p.facility} {p.weight:.3f}" for p in record.participants)
        print(f"{a.out}: {record.rule} of {number_of(len(record.participants), 'update')} ({names})")
        for facility, reason in (record.quarantined | record.suspects).items():
            log.warning("outlier: %s: %s", facility, reason)
        for facility, reason in record.dropped.items():
            log.warning("dropped: %s: %s", facility, reason)
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
