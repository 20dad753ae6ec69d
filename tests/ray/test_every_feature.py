"""OpenAI's own client drives every feature of two real servers, disaggregated and mixed: all answers equal."""

from typing import Any

import openai
import pytest

from tests.fakes.door import run_async
from tests.integration.api.client_features import drive
from tests.ray.server_process import running_server

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(900)]

_DEPLOYMENTS = (["--config", "local-cpu", "--local-prefill", "0"], ["--config", "local-mixed"])


async def _answers(arguments: list[str]) -> list[dict[str, Any]]:
    with running_server("--dtype", "float32", *arguments) as server:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            found = await drive(client, server.model)
        server.wait_for_baseline()
    return found


@run_async
async def test_two_real_deployments_answer_the_client_alike() -> None:
    disaggregated, mixed = [await _answers(arguments) for arguments in _DEPLOYMENTS]
    assert disaggregated == mixed
    assert [choice["finish_reason"] for choice in mixed].count("tool_calls") >= 2
