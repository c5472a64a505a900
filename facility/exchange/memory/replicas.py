"""What a rank holds to exchange with other replicas of its facility, which have weights of their own."""

from __future__ import annotations

from facility.exchange.messages.sync import SyncSettings


def exchanged_vectors(sync: SyncSettings, device: str) -> float:
    """Float32 vectors over the rank's trained weights, at most; the last exchange of a round needs one.

    `device`: cpu or cuda, which does not count what a policy keeps in the host's memory.
    """
    policy = sync.declaration
    if (policy.on_host and device != "cpu") or (policy.common_steps and not sync.rules().relay):
        return 1.0
    return max(1.0, policy.vectors)


def exchanges_state(sync: SyncSettings) -> bool:
    """Whether the optimizer's state is exchanged in the same vector as the weights."""
    policy = sync.declaration
    return "optimizer_state" in policy.parameters and not sync.common_step and sync.state_policy == "average"
