"""V18: draft capacity is reserved when a transfer completes, past the budget; here at init, under one grant."""

from manager import Grant, PoolGroupId
from scheduler.messages import WorkerRole
from tests.divergence.faults import Scene, fault_at_every_call, make_scene, pass_of
from tests.fakes.attempts import make_spec
from tests.fakes.small_cache import EVERY_MEMBER

GROUP = PoolGroupId(0)


def build(num_drafts: int = 6, num_pages: int = 8) -> Scene:
    """An offer of seven tokens that wants drafts in its first decode step."""
    scene = make_scene(WorkerRole.GENERATION, num_pages=num_pages)
    request = scene.worker.offer(make_spec("offer", 7, max_tokens=8))
    request.num_draft_tokens = num_drafts
    return scene


def test_the_reservation_holds_the_first_drafts_and_activation_takes_nothing_new() -> None:
    scene = build()
    manager = scene.worker.manager
    [request] = scene.worker.step().reserved
    assert manager.availability().pages[GROUP] == 8 - 4
    held = manager.availability()
    scene.worker.receive(request)
    assert manager.availability() == held
    output = scene.worker.schedule()
    assert output.draft_lengths == (6,)
    assert manager.availability() == held


def test_the_grant_names_the_draft_pages() -> None:
    pages = []
    for num_drafts in (0, 1, 6):
        scene = build(num_drafts)
        plan = scene.worker.manager.begin_plan()
        grant = scene.worker.manager.prepare_disagg_gen_init(scene.worker.scheduler.waiting[0])
        assert isinstance(grant, Grant)
        pages.append(grant.num_pages())
        plan.rollback()
    assert pages == [2, 3, 4]


def test_an_offer_whose_drafts_do_not_fit_is_deferred_whole() -> None:
    scene = build(num_pages=4)
    scene.worker.scheduler.cancel(scene.worker.scheduler.waiting[0].attempt_id, 0.0)
    scene.worker.admit_generation(make_spec("running", 6, max_tokens=2))
    offer = scene.worker.offer(make_spec("drafted", 6, max_tokens=2))
    offer.num_draft_tokens = 6
    assert [deferral.reason for _, deferral in scene.worker.schedule().deferred] == ["out_of_pages"]
    assert not scene.worker.manager.has_cache(offer.request_id)


def test_a_fault_at_init_or_at_activation_leaves_nothing() -> None:
    assert "prepare_disagg_gen_init" in fault_at_every_call(build, pass_of)

    def build_reserved() -> Scene:
        scene = build()
        scene.worker.step()
        return scene

    def activate(scene: Scene) -> object:
        request = scene.worker.scheduler.running[0]
        return scene.worker.receive(request)

    assert fault_at_every_call(build_reserved, activate) == ["begin_complete", "activate_disagg_gen", "commit"]


def build_set(num_pages: int = 8, num_drafts: int = 6) -> Scene:
    """The same offer with a draft, an encoder input and an adapter."""
    scene = make_scene(WorkerRole.GENERATION, num_pages=num_pages, members=EVERY_MEMBER)
    spec = make_spec("offer", 7, max_tokens=8, adapter="a", encoder=(1, 2, 3, 4, 5))
    scene.worker.offer(spec).num_draft_tokens = num_drafts
    return scene


def test_a_reservation_of_a_set_holds_drafts_padding_encoder_output_and_adapter() -> None:
    scene = build_set()
    manager = scene.worker.manager
    before = manager.availability()
    [request] = scene.worker.step().reserved
    held = manager.availability()
    # 7 + 1 known tokens, 6 drafts and 1 of padding are 15 positions: four blocks; five encoder tokens are two.
    assert [before.pages[group] - held.pages[group] for group in held.pages] == [4 + 2, 4]
    assert (held.index_slots, held.adapter_pages) == (before.index_slots - 1, before.adapter_pages - 2)
    scene.worker.receive(request)
    output = scene.worker.schedule()
    assert output.draft_lengths == (6,)
    assert manager.availability() == held
    scene.worker.complete(output)
    scene.worker.settle()


def test_an_offer_that_is_too_large_only_with_its_drafts_is_taken_without_them() -> None:
    scene = build_set(num_pages=4, num_drafts=60)
    [request] = scene.worker.step().reserved
    scene.worker.receive(request)
    assert scene.worker.schedule().draft_lengths == (0,)
    assert request.num_draft_tokens == 60


def test_an_offer_without_room_for_its_adapter_is_deferred_whole() -> None:
    scene = make_scene(WorkerRole.GENERATION, num_pages=12, members=EVERY_MEMBER)
    scene.worker.admit_generation(make_spec("running", 6, max_tokens=4, adapter="b"))
    held = scene.worker.manager.snapshot()
    offer = scene.worker.offer(make_spec("offer", 6, max_tokens=2, adapter="a", encoder=(1, 2)))
    output = scene.worker.schedule()
    [(deferred, deferral)] = output.deferred
    assert deferred is offer
    assert (deferral.reason, deferral.needed, deferral.available) == ("out_of_adapter_pages", 2, 1)
    assert scene.worker.manager.snapshot() == held


def test_a_fault_at_init_or_at_activation_of_a_set_leaves_nothing() -> None:
    assert "prepare_disagg_gen_init" in fault_at_every_call(build_set, pass_of)

    def build_reserved() -> Scene:
        scene = build_set()
        scene.worker.step()
        return scene

    hit = fault_at_every_call(build_reserved, lambda scene: scene.worker.receive(scene.worker.scheduler.running[0]))
    assert hit == ["begin_complete", "activate_disagg_gen", "commit"]
