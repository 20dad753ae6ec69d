"""What a chaos run believes of the server: by what it sees of workers, not by what errors say."""

import asyncio
from typing import Any

import httpx

from serving.chaos.killer import ServerView


def _state(*workers: tuple[str, str]) -> dict[str, Any]:
    return {
        "workers": [{"role": role, "state": state, "pid": 1} for role, state in workers],
        "central": {"term": 1, "losses": []},
        "counters": {"divergences": 0, "refused_terms": 0},
    }


def _look(view_of: list[dict[str, Any]]) -> ServerView:
    """A view that has looked once at each of these states."""

    async def look_at_each() -> ServerView:
        answers = iter(view_of)
        transport = httpx.MockTransport(lambda _: httpx.Response(200, json=next(answers)))
        async with httpx.AsyncClient(base_url="http://server", transport=transport) as client:
            view = ServerView(client)
            for _ in view_of:
                assert await view.look()
                await asyncio.sleep(0.05)
        return view

    return asyncio.run(look_at_each())


def test_a_role_is_dead_from_the_last_look_that_saw_a_worker_of_it() -> None:
    both, one = (("context", "running"), ("generation", "running")), (("context", "running"), ("generation", "lost"))
    assert _look([_state(*both), _state(*one)]).dead_s() >= 0.05
    assert _look([_state(*both), _state(*one), _state(*both)]).dead_s() == 0.0
