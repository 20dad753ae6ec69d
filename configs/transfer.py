"""How pages move between workers, and how long either side holds them for the other (M7)."""

from dataclasses import dataclass

from configs.base import Section

TRANSPORTS = ("auto", "shared_memory", "nixl", "collective", "object_store")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferConfig(Section):
    """Transport, window and deadlines.

    Attributes:
        transport: shared_memory, nixl, collective (torch.distributed), object_store (Ray), or auto for the best that
            both sides have.
        overlap: a context's full blocks are read while the rest is computed, where their reader has a place already
            (generation-first dispatch).
        max_inflight_bytes: transfer window of a receiving worker; a larger request goes alone.
        agent_poll_s: longest sleep of the agent thread while bytes move.
    """

    transport: str = "auto"
    overlap: bool = True
    max_inflight_bytes: int = 256 << 20
    lease_duration_s: float = 10.0
    reservation_duration_s: float = 30.0
    heartbeat_s: float = 0.5
    agent_poll_s: float = 0.002

    def __post_init__(self) -> None:
        """Refuse bad values, and a lease that ends before its reader could stop."""
        if self.transport not in TRANSPORTS:
            msg = f"transport={self.transport!r} is none of {', '.join(TRANSPORTS)}"
            raise ValueError(msg)
        self.require_positive("max_inflight_bytes", "lease_duration_s", "reservation_duration_s")
        self.require_positive("heartbeat_s", "agent_poll_s")
        if self.lease_duration_s <= 2 * self.heartbeat_s:
            msg = (
                f"lease_duration_s={self.lease_duration_s} must exceed two heartbeats "
                f"({2 * self.heartbeat_s} s): a reader stops one heartbeat before the lease ends"
            )
            raise ValueError(msg)
