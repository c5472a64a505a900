"""The build hook: a wheel carries the files that stand beside the packages in a checkout, below `facility/_data`.

Everything else about the package is in pyproject.toml. `facility.exchange.files.paths.shipped_path` finds the
files in both.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = (
    "cwl/**/*.cwl",
    "templates/*.sh",
    "workflow/federation.schema.json",
    "workflow/federation.yml",
    "constraints.txt",
    "pyproject.toml",
    "LICENSE",
)


def shipped() -> list[str]:
    """Paths of those files, relative to this one."""
    here = Path(__file__).parent
    return sorted(str(path.relative_to(here)) for pattern in SHIPPED for path in here.glob(pattern))


class BuildWithData(build_py):
    """Copies the files into the wheel; an editable installation reads them where they are."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in shipped():
            target = Path(self.build_lib, "facility", "_data", name)
            self.mkpath(str(target.parent))
            self.copy_file(name, str(target))

    def get_source_files(self) -> list[str]:
        """A source distribution needs them too."""
        return [*super().get_source_files(), *shipped()]


setup(cmdclass={"build_py": BuildWithData})
