"""The primary, draft and cross caches of a request, and its adapter, move as one (M4, V4, V8, V9, V18 to V20)."""

from manager import AdapterId, KVCacheManagerV2, LayerGroupId, RefusalReason
from tests.fakes.cache_builders import compute_context, free, granted, refused
from tests.fakes.cache_request import FakeRequest
from tests.fakes.cache_sets import make_set_manager

PRIMARY, DRAFT, CROSS = (LayerGroupId(n) for n in range(3))


def available(manager: KVCacheManagerV2) -> tuple[int, int, int]:
    """Device pages, index slots, adapter pages."""
    there = manager.availability()
    (pages,) = there.pages.values()
    return pages, there.index_slots, there.adapter_pages


def full(name: str, first: int = 1, *, encoder: int = 50, adapter: str | None = "a") -> FakeRequest:
    """Ten tokens, an encoder input of six, an adapter."""
    return FakeRequest(
        name,
        list(range(first, first + 10)),
        encoder_token_ids=tuple(range(encoder, encoder + 6)),
        adapter_id=None if adapter is None else AdapterId(adapter),
    )


def test_a_context_takes_pages_of_every_member_and_the_adapter() -> None:
    manager = make_set_manager()
    compute_context(manager, full("r"))
    assert available(manager) == (24 - 3 - 3 - 2, 3, 4 - 2)
    assert [len(manager.block_table(full("r").request_id, group)) for group in (PRIMARY, DRAFT, CROSS)] == [3, 3, 2]
    assert not manager.needs_encoder(full("r").request_id)
    manager.audit()


def test_a_finished_set_gives_everything_back_and_caches_every_member() -> None:
    manager = make_set_manager()
    compute_context(manager, full("r"))
    free(manager, full("r"))
    assert available(manager) == (24, 4, 4)
    again = full("again")
    plan = manager.begin_plan()
    grant = granted(manager.prepare_context(again))
    assert grant.reused_tokens == 8
    assert not manager.needs_encoder(again.request_id)
    plan.commit()
    manager.audit()


def test_encoder_output_is_reused_whole_or_not_at_all() -> None:
    manager = make_set_manager()
    compute_context(manager, full("r"))
    free(manager, full("r"))
    shorter = full("shorter")
    shorter.encoder_token_ids = shorter.encoder_token_ids[:5]
    plan = manager.begin_plan()
    granted(manager.prepare_context(shorter))
    assert manager.needs_encoder(shorter.request_id)
    plan.rollback()
    manager.audit()


def test_encoder_output_of_another_adapter_is_not_reused() -> None:
    manager = make_set_manager()
    compute_context(manager, full("r", adapter="a"))
    free(manager, full("r"))
    plan = manager.begin_plan()
    granted(manager.prepare_context(full("other", adapter="b")))
    assert manager.needs_encoder(full("other").request_id)
    plan.rollback()
    manager.audit()


def test_a_refused_growth_of_one_member_leaves_the_others_alone() -> None:
    manager = make_set_manager(num_slots=9, max_sequences=3)
    compute_context(manager, full("r"))  # eight of nine pages
    before = manager.snapshot()
    second = full("second", first=100, encoder=70, adapter="b")
    plan = manager.begin_plan()
    granted(manager.prepare_context(second))
    refusal = refused(manager.resize_context(second, 10))
    assert refusal.reason is RefusalReason.OUT_OF_PAGES
    plan.rollback()
    assert manager.snapshot() == before


def test_suspension_releases_the_adapter_and_resume_takes_it_again() -> None:
    manager = make_set_manager(host_slots=24)
    compute_context(manager, full("r"))
    plan = manager.begin_plan()
    granted(manager.suspend_request(full("r")))
    plan.commit()
    assert available(manager) == (24, 4, 4)
    plan = manager.begin_plan()
    grant = granted(manager.prepare_context(full("r")))
    assert grant.adapter_pages == 2
    plan.commit()
    assert available(manager)[1:] == (3, 2)
    assert len(manager.block_table(full("r").request_id, CROSS)) == 2
    manager.audit()


def test_a_resume_without_room_for_the_adapter_changes_nothing() -> None:
    manager = make_set_manager(host_slots=24)
    compute_context(manager, full("r", adapter="a"))
    plan = manager.begin_plan()
    granted(manager.suspend_request(full("r")))
    plan.commit()
    compute_context(manager, full("x", first=100, encoder=70, adapter="b"))
    compute_context(manager, full("y", first=200, encoder=80, adapter="c"))
    before = manager.snapshot()
    plan = manager.begin_plan()
    refusal = refused(manager.prepare_context(full("r")))
    assert (refusal.reason, refusal.needed, refusal.available) == (RefusalReason.OUT_OF_ADAPTER_PAGES, 2, 1)
    plan.rollback()
    assert manager.snapshot() == before


def test_a_generation_step_gives_the_draft_layers_the_same_blocks() -> None:
    manager = make_set_manager()
    request = full("r")
    compute_context(manager, request)
    request.token_ids.append(99)
    request.num_draft_tokens = 5
    plan = manager.begin_plan()
    grant = granted(manager.try_allocate_generation(request))
    assert (
        sum(cost.pages for cost in grant.pages) == 2
    )  # position 16 opens a block: one page of the model, one of the draft
    plan.commit()
    tables = [manager.block_table(request.request_id, group) for group in (PRIMARY, DRAFT)]
    assert [len(table) for table in tables] == [4, 4]
    manager.audit()


def test_a_reserved_handoff_fills_every_member() -> None:
    manager = make_set_manager()
    request = full("r")
    plan = manager.begin_plan()
    granted(manager.prepare_disagg_gen_init(request))
    plan.commit()
    assert len(manager.pages_to_fill(request.request_id)) == 3 + 3 + 2
    manager.audit()
