"""Estimated fraction of a job: by its steps or, without any, by the seconds of the previous job."""

from __future__ import annotations

from wanstream.cli.batch.progress import EtaEstimator


def test_the_first_job_is_as_far_as_the_steps_of_its_longest_node() -> None:
    eta = EtaEstimator()
    eta.begin("a", 0.0)
    assert eta.fraction(5.0) == 0.0
    eta.report(0, 1)
    eta.report(1, 1)
    assert eta.fraction(6.0) == 0.0, "a node without steps says nothing"
    eta.report(5, 20)
    assert eta.fraction(7.0) == 0.25
    eta.report(15, 20)
    assert eta.fraction(9.0) == 0.75
    eta.report(1, 3)
    assert eta.fraction(10.0) == 0.75, "never back"
    eta.report(20, 20)
    assert eta.fraction(11.0) == 0.99, "it has not ended"


def test_the_steps_of_the_next_job_count_and_not_the_time_of_the_last_one() -> None:
    eta = EtaEstimator()
    eta.begin("a", 0.0)
    eta.report(4, 4)
    eta.end(100.0)
    assert eta.fraction(101.0) == 0.0, "none runs"
    eta.begin("b", 200.0)
    eta.report(2, 4)
    assert eta.fraction(290.0) == 0.5
    eta.report(0, 4)
    assert eta.fraction(301.0) == 0.5, "a node that begins again takes nothing back"


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
    eta.report(3, 4)
    eta.begin("b", 2.0)
    assert eta.fraction(2.0) == 0.0
    eta.report(1, 4)
    assert eta.fraction(3.0) == 0.25
