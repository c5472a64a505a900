"""The bill of materials counts packages, and not what an installation that broke off leaves of one."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from coordinator.publishing.sbom import bill_of_materials


@pytest.mark.parametrize("left", ["", "Name: half\n", "Version: 2\n"])
def test_a_package_that_lacks_name_or_version_is_left_out(left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for title, text in {"half": left, "whole": "Name: Whole_One\nVersion: 1+a\n"}.items():
        (tmp_path / f"{title}-1.dist-info").mkdir()
        (tmp_path / f"{title}-1.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\n{text}")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        bill = bill_of_materials({"alpha": {"whole-one": "2"}}, "f")
    assert [(one["name"], one["version"]) for one in bill["components"]] == [("whole-one", "1+a"), ("whole-one", "2")]
