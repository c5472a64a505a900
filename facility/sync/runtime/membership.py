"""Which replicas are alive, by heartbeat: pure, time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Membership:
    """Each replica has several ranks; it is present while every one of them is heard.

    A rank that was never heard is not missed: a replica becomes present when all of its ranks have come.
    """

    positions: int
    """Ranks of one replica."""
    missing_seconds: float
    """Silence after which a rank counts as gone."""
    present: set[int] = field(default_factory=set)
    """Replicas that are here."""
    _heard: dict[tuple[int, int], float] = field(default_factory=dict)

    def heard(self, replica: int, position: int, now: float) -> bool:
        """A sign of life; True when with it the replica comes, or comes back."""
        self._heard[replica, position] = now
        if replica in self.present:
            return False
        fresh = [p for p in range(self.positions) if now - self._heard.get((replica, p), -1e18) <= self.missing_seconds]
        if len(fresh) < self.positions:
            return False
        self.present.add(replica)
        return True

    def gone(self, replica: int, position: int) -> bool:
        """The rank's connection closed; True when its replica leaves by this."""
        self._heard.pop((replica, position), None)
        was = replica in self.present
        self.present.discard(replica)
        return was

    def silent(self, now: float) -> list[int]:
        """Replicas that leave because one of their ranks has not been heard for too long."""
        lost = sorted(
            {r for (r, _), at in self._heard.items() if r in self.present and now - at > self.missing_seconds}
        )
        self.present.difference_update(lost)
        return lost

    def overslept(self, now: float, since: float) -> None:
        """The observer itself was suspended from `since` to `now`: silence in that time is discounted."""
        for key in self._heard:
            self._heard[key] += now - since
