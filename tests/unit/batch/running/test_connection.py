"""States of a runner's connection: the usual order, and any other one refused."""

import pytest

from wanstream.batch.running.connection import FIRST_RETRY, Connection, Contact
from wanstream.schema import StateError


def test_rows_are_noted_as_given_once_in_a_silence():
    connection = Connection()
    connection.unanswered(10.0)
    assert not connection.gave_rows
    for _ in range(2):
        connection.give_rows()
        connection.check_passed()
        connection.unanswered(5.0)
    assert connection.gave_rows
    assert (connection.contact, connection.silence_s) == (Contact.silent, 20.0)
    connection.answered()
    assert connection == Connection()


def test_an_unanswered_post_continues_the_silence():
    connection = Connection(contact=Contact.away, silence_s=FIRST_RETRY)
    connection.check_passed()
    connection.post_unanswered = True
    connection.answered()
    assert (connection.contact, connection.silence_s) == (Contact.partial, FIRST_RETRY)


def test_a_backend_without_the_files_of_a_row_may_take_rows():
    connection = Connection()
    connection.unsent()
    assert connection.may_take
    connection.unanswered(1.0)
    connection.unsent()
    assert not connection.may_take


def test_another_order_is_refused():
    with pytest.raises(StateError, match="checked that is responding"):
        Connection().check_passed()
    with pytest.raises(StateError, match="answered by a backend that is away"):
        Connection(contact=Contact.away).answered()
    with pytest.raises(StateError, match="rows of a backend that responds"):
        Connection().give_rows()
