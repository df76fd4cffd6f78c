"""Reports from a run on a worker, and the latents in the last one."""

from wanstream.distributed.messages import StepReport
from wanstream.distributed.worker.worker import Worker

LIMIT_S = 120.0


class Reports(list[StepReport]):
    """A run's reports in order. Call it with each report."""

    def __call__(self, report):
        self.append(report)

    @property
    def latents(self):
        """Latents after the last step, as reported by the leader."""
        (*_, state) = [report.state for report in self if report.state is not None]
        return state.latents


def latents_of(worker, task):
    """Run a task, and return the latents after the last step."""
    reports = Reports()
    running = worker.run(task, reports)
    if not isinstance(worker, Worker):
        running.result(LIMIT_S)
    return reports.latents
