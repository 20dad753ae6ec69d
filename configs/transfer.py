"""How pages move between workers, and how long either side holds them for the other (M7)."""

from pydantic import Field, model_validator

from configs.base import FrozenModel


class TransferConfig(FrozenModel):
    """Transport, window and deadlines."""

    transport: str = Field("auto", description="shared_memory, or auto for the best that both sides have.")
    max_inflight_bytes: int = Field(
        256 << 20, gt=0, description="Transfer window of a receiving worker; a larger request goes alone."
    )
    lease_duration_s: float = Field(10.0, gt=0)
    reservation_duration_s: float = Field(30.0, gt=0)
    heartbeat_s: float = Field(0.5, gt=0)
    agent_poll_s: float = Field(0.002, gt=0, description="Longest sleep of the agent thread while bytes move.")

    @model_validator(mode="after")
    def _reader_can_stop_early(self) -> "TransferConfig":
        if self.lease_duration_s <= 2 * self.heartbeat_s:
            msg = (
                f"lease_duration_s={self.lease_duration_s} must exceed two heartbeats "
                f"({2 * self.heartbeat_s} s): a reader stops one heartbeat before the lease ends"
            )
            raise ValueError(msg)
        return self
