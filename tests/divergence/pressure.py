"""The scene of several rows: an older and a newer decode, and a pass in which only one can go on."""

from scheduler.request import Request
from scheduler.states import AttemptState
from tests.divergence.faults import Scene, make_scene
from tests.fakes.attempts import make_spec


def two_decodes_before_the_shortage(host_pages: int = 0) -> Scene:
    """Both hold two full pages of five; each needs a third in the next pass."""
    scene = make_scene(num_pages=5, host_pages=host_pages)
    scene.worker.context(make_spec("older", 7, max_tokens=8))
    scene.worker.context(make_spec("newer", 7, max_tokens=8))
    scene.worker.step()
    scene.worker.step()
    assert all(len(request.token_ids) == 9 for request in requests(scene))
    return scene


def requests(scene: Scene) -> list[Request]:
    """Older and newer, wherever they are."""
    scheduler = scene.worker.scheduler
    return sorted([*scheduler.running, *scheduler.waiting], key=lambda request: request.arrival)


def is_pushed_out(request: Request) -> bool:
    """Whether it lost its pages: suspended, or paused for recompute."""
    return request.state in {AttemptState.GENERATION_PAUSED, AttemptState.CONTEXT_INIT}
