"""SmolLM2 between two worker processes, over each transport: the text that shared memory gives."""

import pytest

from kvtransfer.transports import nixl
from tests.ray.server_process import ServerProcess, running_server

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.timeout(600)]

needs_nixl = pytest.mark.skipif(bool(nixl.why_unavailable()), reason=nixl.why_unavailable() or "it is here")
REQUESTS: list[tuple[str, dict[str, object]]] = [
    ("Once upon a time there was a lamp. " * 12, {"temperature": 0}),
    ("The capital of France is", {"temperature": 0.8, "seed": 5}),
]


def texts(server: ServerProcess) -> list[str]:
    answers = [server.complete(prompt, max_tokens=8, **fields)["choices"][0]["text"] for prompt, fields in REQUESTS]
    server.wait_for_baseline()
    return answers


@pytest.mark.parametrize(
    "transport",
    [
        pytest.param("nixl", marks=needs_nixl),
        pytest.param("collective", marks=pytest.mark.slow),
        pytest.param("object_store", marks=pytest.mark.slow),
    ],
)
def test_the_text_does_not_depend_on_the_transport(transport: str, disaggregated: ServerProcess) -> None:
    reference = texts(disaggregated)
    with running_server("--config", "local-cpu", "--dtype", "float32", "--transport", transport) as server:
        assert texts(server) == reference
        (generation,) = (worker for worker in server.state()["workers"] if worker["role"] == "generation")
    assert generation["transports"] == {"context-0": f"{transport} (the first choice)"}
    assert generation["counters"]["transfer_bytes"] > 0
