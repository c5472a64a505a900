"""A server optimizer's step, held to its contract: it changes no argument, and returns what can be written."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.aggregation.server_optimizers.contract import A, Step
from facility.exchange.errors import InputError


def with_kept_arguments(name: str, step: Step) -> Step:
    """The step of the optimizer `name`, for numpy arrays that the caller made views of for each call: read-only here.

    Where it changes one in place, or returns anything but a master and as many slots of the same shape, calling it
    raises `InputError` that names the optimizer.
    """

    def called(master: A, combined: A, slots: Sequence[A]) -> tuple[A, list[A]]:
        for array in (master, combined, *slots):
            array.flags.writeable = False
        try:
            returned = step(master, combined, slots)
        except ValueError as error:
            if "read-only" not in str(error):
                raise
            raise InputError(
                f"the server optimizer {name} changes its arguments in place ({error}); expected new arrays: they are "
                "read-only, for the master and its slots are still being read (master + step, not master += step)"
            ) from None
        _check(name, returned, master, len(slots))
        return returned

    return called


def _check(name: str, returned: object, master: A, slots: int) -> None:
    """Raise `InputError` unless `returned` is a next master and next slots."""
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], list | tuple):
        arrays = [returned[0], *returned[1]]
        if len(arrays) == 1 + slots and all(getattr(one, "shape", None) == master.shape for one in arrays):
            return
    raise InputError(
        f"the server optimizer {name} returns {_kind(returned)}, expected (next master, list of its {slots} slots), "
        f"each an array of the arguments' shape {master.shape}"
    )


def _kind(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(_kind(one) for one in value)})"
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
