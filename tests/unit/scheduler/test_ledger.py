"""The ledger: load counters are sums over holdings, at all times (C11)."""

import pytest

from manager import Epoch, LogicError, WorkerName
from scheduler.introductions import HoldingKind
from scheduler.ledger import Holding, Ledger
from scheduler.messages import WorkerRegistration, WorkerRole
from scheduler.spec import AttemptId

WORKER = WorkerName("c0")
A, B = AttemptId("1.1"), AttemptId("1.2")


def _ledger(*roles: WorkerRole) -> Ledger:
    ledger = Ledger()
    for number, role in enumerate(roles or (WorkerRole.CONTEXT,)):
        ledger.add_worker(WorkerRegistration(WorkerName(f"c{number}"), role, Epoch(1), 7, 100), 0.0)
    return ledger


def _holding(kind: HoldingKind = HoldingKind.CONTEXT, num_tokens: int = 10) -> Holding:
    return Holding(kind, num_tokens, sequence=1, since_s=0.0)


def _load(ledger: Ledger) -> tuple[int, int]:
    record = ledger.record(WORKER)
    assert record is not None
    ledger.audit()
    return record.num_attempts, record.num_tokens


def test_load_is_the_sum_of_holdings_and_returns_to_zero() -> None:
    ledger = _ledger()
    ledger.add(WORKER, A, _holding())
    ledger.add(WORKER, B, _holding(num_tokens=5))
    assert _load(ledger) == (2, 15)
    ledger.release(WORKER, A)
    ledger.release(WORKER, B)
    assert _load(ledger) == (0, 0)


def test_releasing_twice_counts_once() -> None:
    ledger = _ledger()
    ledger.add(WORKER, A, _holding())
    assert ledger.release(WORKER, A) is not None
    assert ledger.release(WORKER, A) is None
    assert ledger.release(WorkerName("nobody"), A) is None
    assert _load(ledger) == (0, 0)


def test_a_lease_is_no_load() -> None:
    ledger = _ledger()
    ledger.add(WORKER, A, _holding())
    ledger.change(WORKER, A, HoldingKind.LEASE)
    assert _load(ledger) == (0, 0)
    ledger.release(WORKER, A)
    assert _load(ledger) == (0, 0)


def test_one_attempt_cannot_be_held_twice_by_one_worker() -> None:
    ledger = _ledger()
    ledger.add(WORKER, A, _holding())
    with pytest.raises(LogicError, match=r"holds 1\.1 already"):
        ledger.add(WORKER, A, _holding())
    assert _load(ledger) == (1, 10)


def test_a_lost_worker_holds_nothing_and_starts_empty_when_it_comes_back() -> None:
    ledger = _ledger()
    ledger.add(WORKER, A, _holding())
    ledger.lose_worker(WORKER, "killed", 1.0)
    assert _load(ledger) == (0, 0)
    assert ledger.live(WORKER, Epoch(1)) is None
    ledger.add_worker(WorkerRegistration(WORKER, WorkerRole.CONTEXT, Epoch(2), 8, 100), 2.0)
    assert ledger.live(WORKER, Epoch(2)) is not None
    assert ledger.live(WORKER, Epoch(1)) is None
    assert _load(ledger) == (0, 0)


def test_a_second_life_cannot_begin_while_the_first_is_live() -> None:
    ledger = _ledger()
    with pytest.raises(LogicError, match="still live"):
        ledger.add_worker(WorkerRegistration(WORKER, WorkerRole.CONTEXT, Epoch(2), 8, 100), 2.0)


def test_audit_finds_a_drifted_counter() -> None:
    ledger = _ledger()
    ledger.add(WORKER, A, _holding())
    record = ledger.record(WORKER)
    assert record is not None
    record.num_tokens += 1
    with pytest.raises(LogicError, match="holdings sum to"):
        ledger.audit()


@pytest.mark.parametrize(
    ("roles", "missing"),
    [
        ((WorkerRole.CONTEXT,), (WorkerRole.GENERATION,)),
        ((WorkerRole.GENERATION,), (WorkerRole.CONTEXT,)),
        ((WorkerRole.CONTEXT, WorkerRole.GENERATION), ()),
        ((WorkerRole.MIXED,), ()),
    ],
)
def test_missing_roles_are_those_without_which_nothing_finishes(
    roles: tuple[WorkerRole, ...], missing: tuple[WorkerRole, ...]
) -> None:
    assert _ledger(*roles).missing_roles() == missing


def test_a_mixed_deployment_whose_worker_died_misses_a_mixed_worker() -> None:
    ledger = _ledger(WorkerRole.MIXED)
    ledger.lose_worker(WORKER, "killed", 1.0)
    assert ledger.missing_roles() == (WorkerRole.MIXED,)
