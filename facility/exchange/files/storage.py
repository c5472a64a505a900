"""What a file system refused, as a sentence: full, over quota, read-only, not permitted."""

from __future__ import annotations

import errno

WORDS = {
    errno.ENOSPC: "is full: free some room",
    errno.EDQUOT: "is over its quota: free some room",
    errno.EFBIG: "may not grow so large: raise the limit on file sizes (`ulimit -f`)",
    errno.EROFS: "is mounted read-only: choose another directory, or have it mounted for writing",
    errno.EACCES: "cannot be written to or read: correct its permissions, or choose another directory",
    errno.EPERM: "cannot be written to: correct its permissions, or choose another directory",
}


def is_storage(error: BaseException) -> bool:
    """True for an error that trying again at once does not cure."""
    return isinstance(error, OSError) and error.errno in WORDS


def sentence(error: OSError, place: object = "") -> str:
    """`PATH is full: free some room, then give the same command again`. `place`: where the error names no file."""
    where = error.filename2 or error.filename or place or "a file system"
    return f"{where} {WORDS.get(error.errno or 0, f'cannot be used: {error}')}, then give the same command again"
