"""The front door: address and limits of one HTTP request."""

from pydantic import Field

from configs.base import FrozenModel


class ServerConfig(FrozenModel):
    """What the HTTP server listens on and accepts."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    served_model_name: str = Field("", description="Name in the API; empty means the model's own.")
    max_body_bytes: int = Field(4 << 20, gt=0)
    max_choices: int = Field(16, gt=0, description="Largest n.")
    max_prompts: int = Field(64, gt=0, description="Prompts in one completion request.")
    kept_timelines: int = Field(2048, gt=0, description="Finished requests that GET /requests/{id} remembers.")
