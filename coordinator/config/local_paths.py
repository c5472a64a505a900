"""Whether the paths of federation.yml that lie on this machine are there."""

from __future__ import annotations

from coordinator.config.federation import Federation
from coordinator.config.yaml_lines import Lined
from facility.exchange.messages.preference import BENEATH


def check_paths(federation: Federation) -> None:
    """Raise `ConfigurationError` when a path on this machine that a run needs is not there."""
    lined = Lined(federation.file)
    model = federation.path(federation.model)
    if not (model / "config.json").is_file():
        raise lined.error(
            f"model {federation.model!r} is {model}, which holds no config.json; expected a Hugging Face checkpoint "
            "(`make demo` makes the demo's, `crossfed model NAME --out DIR` fetches or converts one)",
            "model",
        )
    for number, facility in enumerate(federation.facilities):
        training = facility.training
        reference = training.preference.reference
        for key, path in (
            ("layout.plan", training.layout.plan),
            ("lora.base", training.lora.base),
            ("preference.reference", "" if reference == BENEATH else reference),
            ("sync.emulation.trace", training.sync.emulation.trace),
        ):
            if facility.deployment.type == "local" and path and not federation.path(path).exists():
                where = f"facilities[{number}].training.{key}"
                raise lined.error(
                    f"training.{key} of facility {facility.name!r} is {federation.path(path)}, which does not exist",
                    where if where in lined.lines else f"training.{key}",
                )
        if facility.deployment.type == "local" and not federation.path(facility.dataset).is_dir():
            raise lined.error(
                f"dataset of facility {facility.name!r} is {federation.path(facility.dataset)}, which is not a "
                "directory; expected the output of `python -m facility.prepare`",
                f"facilities[{number}].dataset",
            )
