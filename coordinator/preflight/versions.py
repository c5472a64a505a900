"""Whether a facility's CrossFed and packages go with the coordinator's."""

from __future__ import annotations

from coordinator.preflight.probe_answer import ProbeAnswer
from coordinator.preflight.row import Row, fail, ok, warning
from facility import __version__
from facility.exchange.files.paths import shipped_path
from facility.exchange.hints import keys_of
from facility.exchange.messages import manifest, report, settings
from facility.exchange.messages.settings import FacilitySettings

FORMATS = {"manifest": manifest.FORMAT, "report": report.FORMAT, "settings": settings.FORMAT}


def check_versions(name: str, answer: ProbeAnswer) -> list[Row]:
    """Rows on its CrossFed and its packages."""
    rows = []
    if answer.formats != FORMATS:
        other = ", ".join(
            f"{key} {value} there, {FORMATS.get(key)} here"
            for key, value in answer.formats.items()
            if FORMATS.get(key) != value
        )
        rows.append(
            fail(
                name,
                "message format",
                f"the facility speaks another message format: {other}",
                "bring both sides to the same version of CrossFed",
            )
        )
    elif (row := _unknown_settings(name, answer)) is not None:
        rows.append(row)
    elif answer.crossfed != __version__:
        rows.append(
            warning(
                name,
                "message format",
                f"CrossFed {answer.crossfed} there, {__version__} here; formats agree",
                "bring both to one version when you can",
            )
        )
    else:
        rows.append(ok(name, "message format", f"CrossFed {answer.crossfed} on both sides"))
    return [*rows, _packages(name, answer)]


def _unknown_settings(name: str, answer: ProbeAnswer) -> Row | None:
    """A row where the facility's jobs would, or may, refuse their settings, which name every key: a CrossFed of the
    same version number may be older, and its jobs ended so only after their wait in the queue."""
    fix = f"bring it to the coordinator's CrossFed: crossfed setup {name}, or facility/setup.sh there"
    if answer.settings_keys is None:
        found = f"CrossFed {answer.crossfed} there is older than the one here: its jobs may not know all settings"
        return warning(name, "message format", found, fix)
    unknown = sorted(set(keys_of(FacilitySettings)) - answer.settings_keys)
    if not unknown:
        return None
    listed = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
    return fail(name, "message format", f"its CrossFed is older, its jobs would refuse their settings: {listed}", fix)


def _packages(name: str, answer: ProbeAnswer) -> Row:
    """Whether the facility's environment has what CrossFed asks for, in the versions that it was tested with."""
    has = {package: version for package, version in answer.packages.items() if version is not None}
    if missing := sorted(answer.packages.keys() - has.keys()):
        return fail(name, "packages", f"the facility lacks {', '.join(missing)}", "run facility/setup.sh there again")
    if answer.unmet:
        return warning(
            name,
            "packages",
            f"Python {answer.python}; other packages than CrossFed asks for: {'; '.join(answer.unmet)}",
            "run facility/setup.sh there again, without --as-is; what a job does not need may stay as it is",
        )
    versions = ", ".join(f"{package} {has[package]}" for package in ("torch", "transformers"))
    pinned = _pinned()
    untested = [p for p in ("torch", "transformers") if pinned.get(p, has[p].split("+")[0]) != has[p].split("+")[0]]
    if untested:
        wanted = ", ".join(f"{p} {pinned[p]}" for p in untested)
        return warning(
            name,
            "packages",
            f"Python {answer.python}, {versions}; tested is {wanted}",
            "run facility/setup.sh there again, unless the site provides its own torch",
        )
    return ok(name, "packages", f"Python {answer.python}, {versions}")


def _pinned() -> dict[str, str]:
    try:
        lines = shipped_path("constraints.txt").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return dict(line.split("==", 1) for line in lines if "==" in line)
