"""The front door: address and limits of one HTTP request."""

from dataclasses import dataclass

from configs.base import Section

_MAX_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(Section):
    """What the HTTP server listens on and accepts.

    Attributes:
        port: 0 takes any free one.
        doors: processes that answer on it; more than one where text keeps one busy, or its loss would be too much.
        served_model_name: name in the API; empty means the model's own.
        max_choices: largest n.
        max_prompts: prompts in one completion request.
        kept_timelines: finished requests that GET /requests/{id} remembers.
        api_keys: one of them must come with every request but those for health and metrics; none: open to all.
        cors_origins: web pages of these origins may call the API from a browser; `*` is every one.
        otlp_endpoint: URL of an OpenTelemetry collector (OTLP over HTTP) that is sent the trace of every request;
            empty sends none. Needs the extra `tracing`.
        drain_timeout_s: how long open requests may go on when the server is told to end.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    doors: int = 1
    served_model_name: str = ""
    max_body_bytes: int = 4 << 20
    max_choices: int = 16
    max_prompts: int = 64
    kept_timelines: int = 2048
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    otlp_endpoint: str = ""
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse bad values."""
        self.require_positive("doors", "max_body_bytes", "max_choices", "max_prompts", "kept_timelines")
        self.require_not_negative("drain_timeout_s")
        if not all(self.api_keys):
            msg = "api_keys has an empty key"
            raise ValueError(msg)
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            msg = f"otlp_endpoint={self.otlp_endpoint!r} is not an http or https URL"
            raise ValueError(msg)
        if not 0 <= self.port <= _MAX_PORT:
            msg = f"port={self.port} is not between 0 and {_MAX_PORT}"
            raise ValueError(msg)
