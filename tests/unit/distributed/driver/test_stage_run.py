"""Scheduling loop with a group whose messages wait."""

from concurrent.futures import Future

from wanstream.distributed.driver.stage_run import CallEnd, JobEnd, JobEvent, StageRun
from wanstream.distributed.messages import StepReport
from wanstream.distributed.plan.jobs import GroupId


class Waiting:
    """`StageGroup` and its `Job`: all messages of three steps are there from the start."""

    run_id = "this run"
    times = 0

    def start(self, assignment, inbox):
        inbox.put(StepReport(run_id="another", place=0, record=None))
        for number in assignment.steps:
            future: Future[int] = Future()
            future.set_result(number)
            inbox.put(CallEnd(run_id=self.run_id, future=future))
        return self

    def receive(self, message):
        step = message.future.result()
        return JobEvent(report=step, next_step=step + 1, end=JobEnd() if step == 2 else None)

    def check_time(self) -> None:
        self.times += 1


def test_time_limits_are_checked_after_all_waiting_messages():
    """Reports left waiting by a busy loop count as signs of life.

    Reports from an ended job must not reach the next one.
    """
    group = Waiting()
    checks = list[int]()
    run = StageRun([[range(3)]], {GroupId(0, 0): group})
    run.run(lambda item, step: checks.append(group.times))
    assert checks == [0, 0, 0]
