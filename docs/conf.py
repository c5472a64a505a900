"""Sphinx configuration. `make docs` builds with warnings as errors; reference/generated is made from the code."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from docs.generate import generate  # noqa: E402
from facility import __version__  # noqa: E402

generate(HERE / "reference" / "generated")

project = "CrossFed"
author = "The CrossFed authors"
project_copyright = "The CrossFed authors"
release = __version__
extensions = ["myst_parser"]
myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "CrossFed"
exclude_patterns = ["_build", "reference/generated"]
