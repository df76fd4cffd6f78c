"""How far a job is: by steps at first, by the seconds of the job before it from then on."""

from __future__ import annotations

import pytest

from wanstream.cli.batch.progress import EtaEstimator


def test_the_first_job_is_as_far_as_the_steps_of_its_longest_node() -> None:
    pace = EtaEstimator()
    pace.begin("a", 0.0)
    assert pace.share(5.0) == 0.0
    pace.report("text", 0, 1, 5.0)
    pace.report("text", 1, 1, 6.0)
    assert pace.share(6.0) == 0.0, "a node without steps says nothing"
    pace.report("sampler", 5, 20, 7.0)
    assert pace.share(7.0) == 0.25
    pace.report("sampler", 15, 20, 9.0)
    assert pace.share(9.0) == 0.75
    pace.report("frames", 1, 3, 10.0)
    assert pace.share(10.0) == 0.75, "never back"
    pace.report("sampler", 20, 20, 11.0)
    assert pace.share(11.0) == 0.99, "it has not ended"


def test_the_next_jobs_are_as_far_as_their_time_is_spent() -> None:
    pace = EtaEstimator()
    pace.begin("a", 0.0)
    pace.report("text", 0, 1, 0.0)
    pace.report("sampler", 1, 4, 10.0)
    pace.report("frames", 0, 1, 70.0)
    pace.end(100.0)
    assert pace.share(101.0) == 0.0, "none runs"
    pace.begin("b", 200.0)
    pace.report("text", 0, 1, 200.0)
    assert pace.share(205.0) == pytest.approx(0.05)
    assert pace.share(290.0) == pytest.approx(0.10), "text took 10 of 100 seconds: it is slower now"
    pace.report("sampler", 2, 4, 300.0)
    assert pace.share(300.0) == pytest.approx(0.10 + 0.30)
    pace.report("sampler", 0, 4, 301.0)
    assert pace.share(301.0) == pytest.approx(0.10 + 0.30), "a node that begins again takes nothing back"
    pace.report("frames", 0, 1, 400.0)
    assert pace.share(415.0) == pytest.approx(0.70 + 0.15)


def test_without_reports_the_last_job_is_the_measure() -> None:
    pace = EtaEstimator()
    pace.begin("a", 0.0)
    assert pace.share(30.0) == 0.0
    pace.end(40.0)
    pace.begin("b", 50.0)
    pace.begin("b", 55.0)
    assert pace.share(60.0) == 0.25
    assert pace.share(500.0) == 0.99


def test_a_job_that_was_given_up_is_no_measure() -> None:
    pace = EtaEstimator()
    pace.begin("a", 0.0)
    pace.report("sampler", 3, 4, 1.0)
    pace.begin("b", 2.0)
    assert pace.share(2.0) == 0.0
    pace.report("sampler", 1, 4, 3.0)
    assert pace.share(3.0) == 0.25
