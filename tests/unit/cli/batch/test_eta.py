"""Estimated fraction of a job: by steps in the first job, then by the seconds of the previous job."""

from __future__ import annotations

import pytest

from wanstream.cli.batch.progress import EtaEstimator


def test_the_first_job_is_as_far_as_the_steps_of_its_longest_node() -> None:
    eta = EtaEstimator()
    eta.begin("a", 0.0)
    assert eta.fraction(5.0) == 0.0
    eta.report("text", 0, 1, 5.0)
    eta.report("text", 1, 1, 6.0)
    assert eta.fraction(6.0) == 0.0, "a node without steps says nothing"
    eta.report("sampler", 5, 20, 7.0)
    assert eta.fraction(7.0) == 0.25
    eta.report("sampler", 15, 20, 9.0)
    assert eta.fraction(9.0) == 0.75
    eta.report("frames", 1, 3, 10.0)
    assert eta.fraction(10.0) == 0.75, "never back"
    eta.report("sampler", 20, 20, 11.0)
    assert eta.fraction(11.0) == 0.99, "it has not ended"


def test_the_next_jobs_are_as_far_as_their_time_is_spent() -> None:
    eta = EtaEstimator()
    eta.begin("a", 0.0)
    eta.report("text", 0, 1, 0.0)
    eta.report("sampler", 1, 4, 10.0)
    eta.report("frames", 0, 1, 70.0)
    eta.end(100.0)
    assert eta.fraction(101.0) == 0.0, "none runs"
    eta.begin("b", 200.0)
    eta.report("text", 0, 1, 200.0)
    assert eta.fraction(205.0) == pytest.approx(0.05)
    assert eta.fraction(290.0) == pytest.approx(0.10), "text took 10 of 100 seconds: it is slower now"
    eta.report("sampler", 2, 4, 300.0)
    assert eta.fraction(300.0) == pytest.approx(0.10 + 0.30)
    eta.report("sampler", 0, 4, 301.0)
    assert eta.fraction(301.0) == pytest.approx(0.10 + 0.30), "a node that begins again takes nothing back"
    eta.report("frames", 0, 1, 400.0)
    assert eta.fraction(415.0) == pytest.approx(0.70 + 0.15)


def test_without_reports_the_last_job_is_the_measure() -> None:
    eta = EtaEstimator()
    eta.begin("a", 0.0)
    assert eta.fraction(30.0) == 0.0
    eta.end(40.0)
    eta.begin("b", 50.0)
    eta.begin("b", 55.0)
    assert eta.fraction(60.0) == 0.25
    assert eta.fraction(500.0) == 0.99


def test_a_job_that_was_given_up_is_no_measure() -> None:
    eta = EtaEstimator()
    eta.begin("a", 0.0)
    eta.report("sampler", 3, 4, 1.0)
    eta.begin("b", 2.0)
    assert eta.fraction(2.0) == 0.0
    eta.report("sampler", 1, 4, 3.0)
    assert eta.fraction(3.0) == 0.25
