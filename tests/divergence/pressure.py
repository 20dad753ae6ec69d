"""The scene of several rows: an older and a newer decode, and a pass in which only one can go on."""

from scheduler.request import Request
from scheduler.states import AttemptState
from tests.divergence.faults import Scene, make_scene
from tests.fakes.attempts import make_spec
from tests.fakes.small_cache import EVERY_MEMBER


def two_decodes_before_the_shortage(host_pages: int = 0) -> Scene:
    """Both hold two full pages of five; each needs a third in the next pass."""
    scene = make_scene(num_pages=5, host_pages=host_pages)
    scene.worker.context(make_spec("older", 7, max_tokens=8))
    scene.worker.context(make_spec("newer", 7, max_tokens=8))
    scene.worker.step()
    scene.worker.step()
    assert all(len(request.token_ids) == 9 for request in requests(scene))
    return scene


def two_sets_before_the_shortage(host_pages: int = 0) -> Scene:
    """The same with every member: drafts, an encoder input and an adapter each, of 9 + 5 pages and 3 of adapters.

    The older one's next drafts open a block that only the newer one's pages can give.
    """
    scene = make_scene(num_pages=5, host_pages=host_pages, members=EVERY_MEMBER)
    older = scene.worker.context(make_spec("older", 7, max_tokens=9, adapter="a", encoder=(1, 2, 3, 4, 5)))
    newer = scene.worker.context(make_spec("newer", 7, max_tokens=9, adapter="c", encoder=(6, 7, 8)))
    older.num_draft_tokens = newer.num_draft_tokens = 2
    scene.worker.step()
    scene.worker.step()
    assert scene.worker.manager.availability().adapter_pages == 0
    return scene


def requests(scene: Scene) -> list[Request]:
    """Older and newer, wherever they are."""
    scheduler = scene.worker.scheduler
    return sorted([*scheduler.running, *scheduler.waiting], key=lambda request: request.arrival)


def is_pushed_out(request: Request) -> bool:
    """Whether it lost its pages: suspended, or paused for recompute."""
    return request.state in {AttemptState.GENERATION_PAUSED, AttemptState.CONTEXT_INIT}
