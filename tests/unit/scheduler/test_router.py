"""LeastTokensRouter: the least loaded worker, by a total order."""

from manager import WorkerName
from scheduler.router import LeastTokensRouter, WorkerLoad
from tests.fakes.central_world import make_spec


def _load(name: str, num_attempts: int, num_tokens: int) -> WorkerLoad:
    return WorkerLoad(WorkerName(name), num_attempts, num_tokens)


def test_the_worker_with_the_fewest_tokens_is_chosen() -> None:
    loads = [_load("g0", 1, 50), _load("g1", 3, 20), _load("g2", 1, 21)]
    assert LeastTokensRouter().choose(make_spec("a"), loads) == "g1"


def test_equal_tokens_go_to_fewer_attempts_then_to_the_first_name() -> None:
    router = LeastTokensRouter()
    assert router.choose(make_spec("a"), [_load("g0", 2, 20), _load("g1", 1, 20)]) == "g1"
    assert router.choose(make_spec("a"), [_load("g1", 1, 20), _load("g0", 1, 20)]) == "g0"
