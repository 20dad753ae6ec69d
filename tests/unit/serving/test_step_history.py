"""What a worker remembers of its steps, and how lives are remembered."""

from scheduler.output import SchedulerOutput
from scheduler.spec import AttemptId, RequestUid
from serving.actors.life_events import LifeEvents
from serving.tracing.history import StepHistory, Stretch


def _stretch(began_s: float, ended_s: float) -> Stretch:
    return Stretch("context", RequestUid("r"), AttemptId("1.1"), began_s, ended_s)


def test_the_oldest_steps_and_stretches_make_room() -> None:
    history = StepHistory(capacity=3)
    for number in range(5):
        history.on_step(SchedulerOutput(number, num_suspended=number), number, number + 0.5)
        history.on_stretch(_stretch(number, number + 0.25))
    steps, stretches = history.tell((), 10.0, 600.0)
    assert [(step.iteration, step.began_s_ago, step.lasted_s, step.num_suspended) for step in steps] == [
        (2, 8.0, 0.5, 2), (3, 7.0, 0.5, 3), (4, 6.0, 0.5, 4),
    ]  # fmt: skip
    assert [each.began_s_ago for each in stretches] == [8.0, 7.0, 6.0]


def test_only_what_ended_lately_is_told_and_what_goes_on() -> None:
    history = StepHistory()
    for number in range(5):
        history.on_step(SchedulerOutput(number), number, number + 0.5)
        history.on_stretch(_stretch(number, number + 0.5))
    steps, stretches = history.tell([_stretch(0.0, 5.0)], 5.0, 1.5)
    assert [step.iteration for step in steps] == [3, 4]
    assert [(each.began_s_ago, each.lasted_s) for each in stretches] == [(2.0, 0.5), (1.0, 0.5), (5.0, 5.0)]


def test_a_loss_is_told_once_a_life() -> None:
    now_s = [0.0]
    lives = LifeEvents(lambda: now_s[0])
    lives.note("context-0", "started")
    now_s[0] = 3.0
    for life in (7, 7, 8, 7):
        lives.note_loss("context-0", life, "killed")
    now_s[0] = 4.0
    assert lives.tell(2.0) == (("context-0", "lost: killed", 1.0),) * 2
    assert len(lives.tell(60.0)) == 3
