"""Forward passes predicted from the passes before."""

from __future__ import annotations

from wanstream.plan.programs import PassOrders, Visit, predict_visits


def test_unknown_passes_are_expected_in_the_order_of_the_stack() -> None:
    orders = PassOrders(blocks=4)
    assert orders.expected == (0, 1, 2, 3)
    assert orders.rest_of([0, 2]) == (1, 3)  # lists in turns
    assert orders.rest_of([2]) == (3, 0, 1)
    assert orders.rest_of([2, 3, 0]) == (1,)


def test_an_order_is_learnt_and_recognised_by_its_start() -> None:
    interleaved, short = (0, 3, 1, 4, 2), (0, 1)
    orders = PassOrders(blocks=5).learn(interleaved).learn(short)
    assert orders.expected == interleaved
    assert orders.rest_of([]) == short  # the latest
    assert orders.rest_of([0, 3]) == (1, 4, 2)
    assert orders.rest_of([0, 1]) == ()
    assert orders.rest_of([4]) == (0, 1, 2, 3)


def test_a_skipped_pass_teaches_nothing_and_few_orders_are_kept() -> None:
    orders = PassOrders(blocks=9)
    assert orders.learn(()) == orders
    for last in range(9):
        orders = orders.learn(tuple(range(last)))
    assert [len(order) for order in orders.seen] == [8, 7, 6, 5]


def test_visits_of_the_pass_and_of_those_after_it() -> None:
    orders = PassOrders(blocks=2).learn((1, 0))
    assert predict_visits(orders, "m", [1], passes_after=1, number=3) == (
        Visit(3, "m", 0),
        Visit(4, "m", 1),
        Visit(4, "m", 0),
    )


def test_a_run_is_expected_to_go_like_the_one_before() -> None:
    alternating = ((0, 1, 2), (0,), (), (0, 1, 2))
    orders = PassOrders(blocks=3, seen=((0,),), course=alternating)
    assert [orders.order_of(number) for number in range(5)] == [*alternating, (0,)]
    assert orders.rest_of([0], 0) == (1, 2)
    assert orders.rest_of([0], 1) == ()
    assert orders.rest_of([2], 1) == (0, 1), "another way than the run before"
    visits = predict_visits(orders, "m", [0], passes_after=3, number=0)
    assert [(visit.step, visit.block) for visit in visits] == [
        (0, 1),
        (0, 2),
        (1, 0),
        (3, 0),
        (3, 1),
        (3, 2),
    ]


def test_lists_that_a_pass_has_passed_over_come_last() -> None:
    """Lists 0, 1 to 2, 3 to 4 and 5: the second runs outside the pass, or its blocks come later."""
    orders = PassOrders(blocks=6, lists=(0, 1, 3, 5))
    assert orders.rest_of([0, 3]) == (4, 5, 1, 2)
    assert orders.rest_of([0, 1, 3]) == (2, 4, 5), "lists in turns"
    assert orders.rest_of([0, 5, 1]) == (2, 3, 4)


def test_passes_after_the_first_of_all_are_expected_to_go_like_it() -> None:
    visits = predict_visits(PassOrders(blocks=3), "m", [2, 0], passes_after=1, number=0)
    assert [(visit.step, visit.block) for visit in visits] == [(0, 1), (1, 2), (1, 0), (1, 1)]
