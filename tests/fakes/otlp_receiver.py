"""`OtlpReceiver`: a real HTTP server that takes OTLP traces and decodes their protobuf."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class OtlpReceiver:
    """Spans by arrival. Attributes: `paths` that were posted to."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.spans: list[dict[str, Any]] = []
        self.url = ""

    def take(self, path: str, body: bytes) -> None:
        """One export."""
        self.paths.add(path)
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        for resource in request.resource_spans:
            service = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
                    self.spans.append(
                        {
                            "name": span.name,
                            "trace_id": span.trace_id.hex(),
                            "span_id": span.span_id.hex(),
                            "parent_id": span.parent_span_id.hex(),
                            "began_ns": span.start_time_unix_nano,
                            "ended_ns": span.end_time_unix_nano,
                            "status": span.status.code,
                            "events": [event.name for event in span.events],
                            "service": service,
                            **attributes,
                        }
                    )

    def named(self, name: str) -> list[dict[str, Any]]:
        """Spans of this name."""
        return [span for span in self.spans if span["name"] == name]


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    """Listens on a free port of this host."""
    receiver = OtlpReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.take(self.path, gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
