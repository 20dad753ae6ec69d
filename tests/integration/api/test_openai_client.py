"""OpenAI's own client drives every feature over HTTP against both deployments: it parses the answers, all equal."""

import openai

from tests.fakes.door import run_async
from tests.fakes.listening import listening
from tests.fakes.served_cluster import MODEL, Serve
from tests.integration.api.client_features import drive


@run_async
async def test_both_deployments_answer_the_client_alike(served: Serve) -> None:
    answers = []
    for mixed in (False, True):
        async with (
            served(mixed=mixed) as cluster,
            listening(cluster.app) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            answers.append(await drive(client, MODEL))
    assert answers[0] == answers[1]
    reasons = [choice["finish_reason"] for choice in answers[0]]
    assert reasons.count("tool_calls") == 2
