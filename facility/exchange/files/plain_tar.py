"""Headers of a tar stream from another institution's machine: ustar and GNU alone, without pax records.

`tarfile` searches a pax header by patterns whose time grows with the square of the digits in it (CVE-2024-6232, in
Python 3.11 until 3.11.10): one megabyte takes half an hour, in which the process does nothing else.
"""

from __future__ import annotations

import tarfile
from typing import Self

PAX = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)


class PlainHeader(tarfile.TarInfo):
    """A header for `tarfile.open(tarinfo=...)`: reading an archive with pax records raises `tarfile.ReadError`."""

    def _proc_member(self, archive: tarfile.TarFile) -> Self:
        """What follows the header of one block, refused by its type before anything of it is read.

        Every Python calls this; `frombuf`, which has no underscore, is passed over by newer ones (3.14.10).
        """
        if self.type in PAX:
            raise tarfile.ReadError("it has pax headers, expected those of `tar --format=gnu` alone")
        return super()._proc_member(archive)  # type: ignore[misc, no-any-return]
