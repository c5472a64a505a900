"""Hand work to several threads in its order, and take the results in the same order.

Threads stay close to each other, so that hashing a file in its order waits only for the few items that other threads
have under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Turns(Generic[Item, Result]):
    """Hands out items in their order, at most `ahead` beyond the first whose result has not been taken."""

    def __init__(self, items: Iterable[Item], take: Callable[[Result], None], *, ahead: int) -> None:
        """`take`: called with each result in the order of the items, by one thread at a time."""
        self._items, self._take, self._ahead = iter(items), take, ahead
        self._handed = self._taken = 0
        self._early: dict[int, Result] = {}
        self._failures: dict[int, BaseException] = {}
        self._changed = threading.Condition()

    def run(self, threads: int, worker: Callable[[], Callable[[Item], Result]]) -> None:
        """Do all items; `worker` gives each thread what it does them with. Raises what the first that failed raised."""
        if threads == 1:
            self._work(worker())
        else:
            with ThreadPoolExecutor(threads) as pool:
                done = [pool.submit(lambda: self._work(worker())) for _ in range(threads)]
                wait(done)
            for one in done:
                one.result()
        if self._failures:
            raise self._failures[min(self._failures)]

    def _work(self, do: Callable[[Item], Result]) -> None:
        for number, item in self._handed_out():
            try:
                result = do(item)
            except BaseException as failure:
                with self._changed:
                    self._failures[number] = failure
                    self._changed.notify_all()
                return
            self._finish(number, result)

    def _handed_out(self) -> Iterator[tuple[int, Item]]:
        while True:
            with self._changed:
                while not self._failures and self._handed - self._taken >= self._ahead:
                    self._changed.wait()
                if self._failures:
                    return
                try:
                    item = next(self._items)
                except StopIteration:
                    return
                number = self._handed
                self._handed += 1
            yield number, item

    def _finish(self, number: int, result: Result) -> None:
        with self._changed:
            self._early[number] = result
            while self._taken in self._early:
                self._take(self._early.pop(self._taken))
                self._taken += 1
            self._changed.notify_all()
