"""What counts as stranded, and as a disagreement."""

from configs import DeviceTierConfig, KVCacheConfig
from manager import CacheGeometry, Grant, LayerId, LayerSpec
from scheduler.output import ContextChunk, SchedulerOutput
from scheduler.policy import Ordering
from scheduler.request import Request
from scheduler.request_table import RequestTable
from scheduler.spec import AttemptId
from scheduler.states import AttemptState
from tests.baselines.pass_observer import PassObserver
from tests.baselines.watched_manager import WatchedManager
from tests.fakes.attempts import make_spec


def _world() -> tuple[WatchedManager, PassObserver, RequestTable, Request]:
    cache = KVCacheConfig(tokens_per_block=4, tiers=(DeviceTierConfig(quota_bytes=16 * 8),), max_sequences=4)
    geometry = CacheGeometry.from_layers([LayerSpec(LayerId(0), 1, 1)], cache, bytes_per_element=1)
    manager = WatchedManager(geometry, cache).watch()
    table = RequestTable(Ordering(64))
    request = Request(make_spec("one", 10), AttemptId("1.1"), AttemptState.CONTEXT_INIT, arrival=0, now_s=0.0)
    return manager, PassObserver(manager), table, request


def _grow(manager: WatchedManager, request: Request) -> None:
    plan = manager.begin_plan()
    assert isinstance(manager.prepare_context(request), Grant)
    assert isinstance(manager.resize_context(request, 10), Grant)
    plan.commit()


def _empty_pass(observer: PassObserver, table: RequestTable) -> None:
    observer.before()
    observer.after(SchedulerOutput(1), table)


def test_pages_gained_outside_the_batch_are_counted_each_pass_until_returned() -> None:
    manager, observer, table, request = _world()
    observer.before()
    _grow(manager, request)
    observer.after(SchedulerOutput(1), table)
    assert observer.stranded_page_iterations == 3
    _empty_pass(observer, table)
    assert observer.stranded_page_iterations == 6
    complete = manager.begin_complete()
    manager.free_resources(request)
    complete.commit()
    _empty_pass(observer, table)
    assert observer.stranded_page_iterations == 6
    assert observer.num_passes == 3


def test_pages_gained_in_the_batch_are_not_stranded_and_become_used_by_joining_it() -> None:
    manager, observer, table, request = _world()
    table.contexts[request.request_id] = request
    batch = SchedulerOutput(1, contexts=(ContextChunk(request, 0, 10, is_last=True),))
    observer.before()
    _grow(manager, request)
    observer.after(batch, table)
    assert observer.stranded_page_iterations == 0
    assert observer.num_violations == 0

    other = Request(make_spec("two", 10), AttemptId("1.2"), AttemptState.CONTEXT_INIT, arrival=1, now_s=0.0)
    observer.before()
    _grow(manager, other)
    observer.after(SchedulerOutput(2), table)
    assert observer.stranded_page_iterations == 3
    observer.before()
    observer.after(SchedulerOutput(3, contexts=(ContextChunk(other, 0, 10, is_last=True),)), table)
    assert observer.stranded_page_iterations == 3


def test_a_cache_of_a_request_that_holds_nothing_by_its_place_is_a_disagreement() -> None:
    manager, observer, table, request = _world()
    table.waiting.push(request)
    observer.before()
    _grow(manager, request)
    observer.after(SchedulerOutput(1), table)
    assert (observer.num_disagreements, observer.num_violations) == (1, 1)


def test_a_paused_generation_with_an_active_cache_is_a_disagreement() -> None:
    manager, observer, table, request = _world()
    request.state = AttemptState.GENERATION_PAUSED
    table.generations[request.request_id] = request
    observer.before()
    _grow(manager, request)
    observer.after(SchedulerOutput(1), table)
    assert observer.num_disagreements == 1
