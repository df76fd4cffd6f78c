"""Seconds and memory of nodes from looks at them."""

from __future__ import annotations

from typing import Literal

from wanstream.host.node_times import ItemTimes, MemoryNow, NodeSeen

State = Literal["running", "finished"]


def seen(node_id: str, state: State, part: str | None = None) -> NodeSeen:
    return NodeSeen(node_id=node_id, part=part or node_id, class_type="Class", state=state)


def memory(used: int | None, *, rss: int = 1) -> MemoryNow:
    return MemoryNow(device_used=used, device_total=100, torch_allocated=None, rss=rss)


def test_a_node_took_the_time_between_the_looks_that_saw_it() -> None:
    times = ItemTimes()
    assert times.look(1.0, [seen("a", "running")])
    assert not times.look(2.0, [seen("a", "running")])
    assert times.changes(2.0)["a"]["seconds"] == 1.0
    assert times.look(4.0, [seen("a", "finished"), seen("b", "running")])
    told = times.changes(5.0)
    assert (told["a"]["seconds"], told["a"]["running"], told["a"]["class_type"]) == (3.0, False, "Class")
    assert (told["b"]["seconds"], told["b"]["running"]) == (1.0, True)


def test_only_what_has_changed_is_told() -> None:
    times = ItemTimes()
    times.look(1.0, [seen("a", "finished"), seen("b", "running")])
    assert set(times.changes(1.0)) == {"a", "b"}
    assert times.changes(1.0) == {}
    times.look(2.0, [seen("a", "finished"), seen("b", "finished")])
    assert set(times.changes(2.0)) == {"b"}


def test_a_node_that_nobody_saw_running_took_no_time() -> None:
    times = ItemTimes()
    assert not times.look(1.0, [seen("cached", "finished")])
    assert times.changes(1.0)["cached"]["seconds"] == 0.0


def test_the_parts_of_a_node_add_up() -> None:
    times = ItemTimes()
    times.look(1.0, [seen("a", "running", "a.0.1")])
    times.look(2.0, [seen("a", "finished", "a.0.1"), seen("a", "running", "a.0.2")])
    assert times.changes(2.0)["a"]["running"]
    times.look(4.0, [seen("a", "finished", "a.0.1"), seen("a", "finished", "a.0.2")])
    told = times.changes(9.0)["a"]
    assert (told["seconds"], told["running"]) == (3.0, False)


def test_memory_belongs_to_the_nodes_that_run() -> None:
    times = ItemTimes()
    times.look(1.0, [seen("a", "running")])
    times.memory(memory(10))
    times.memory(memory(30))
    times.memory(memory(20, rss=5))
    times.look(2.0, [seen("a", "finished"), seen("b", "running")])
    times.memory(memory(50, rss=2))
    told = times.changes(2.0)
    assert (told["a"]["device_used_peak"], told["a"]["rss_peak"]) == (30, 5)
    assert told["b"]["device_used_peak"] == 50


def test_a_device_without_counter_has_no_peak() -> None:
    times = ItemTimes()
    times.look(1.0, [seen("a", "running")])
    times.memory(memory(None))
    told = times.changes(1.0)["a"]
    assert (told["device_used_peak"], told["torch_allocated_peak"], told["rss_peak"]) == (None, None, 1)


def test_what_was_interrupted_ends_with_its_item() -> None:
    times = ItemTimes()
    times.look(1.0, [seen("a", "finished"), seen("b", "running")])
    times.changes(1.0)
    times.close(3.0, {"a": "Class", "b": "Class"}, ())
    told = times.changes(8.0)
    assert (told["b"]["seconds"], told["b"]["running"]) == (2.0, False)
    assert set(told) == {"b"}


def test_a_node_that_was_never_seen_did_not_run() -> None:
    times = ItemTimes()
    times.look(1.0, [seen("a", "finished")])
    times.close(2.0, {"a": "Class", "cached": "Loader"}, ())
    told = times.changes(2.0)
    assert (told["a"]["ran"], told["cached"]["ran"]) == (True, False)
    assert not told["cached"]["cached"], "it may have been needed by nobody"
    assert (told["cached"]["class_type"], told["cached"]["seconds"]) == ("Loader", 0)


def test_what_was_cached_did_not_run_though_it_seemed_to() -> None:
    times = ItemTimes()
    times.look(1.0, [seen("a", "finished"), seen("b", "finished")])
    assert times.changes(1.0)["b"]["ran"]
    times.close(2.0, {"a": "Class", "b": "Class"}, {"b"})
    told = times.changes(2.0)
    assert set(told) == {"b"}
    assert (told["b"]["ran"], told["b"]["running"], told["b"]["cached"]) == (False, False, True)


def test_who_comes_late_says_nothing_of_what_has_ended_and_of_what_runs_only_what_was_seen() -> None:
    times = ItemTimes(late=True)
    assert times.look(10.0, [seen("a", "finished"), seen("b", "running")])
    assert set(times.changes(10.0)) == {"b"}, "seconds of `a` are not known: none are better than 0.0"
    times.look(12.0, [seen("a", "finished"), seen("b", "finished"), seen("c", "running")])
    times.look(15.0, [seen("a", "finished"), seen("b", "finished"), seen("c", "finished")])
    times.close(15.0, {"a": "Class", "b": "Class", "c": "Class", "d": "Class"}, ())
    told = times.changes(15.0)
    assert {name: (node["seconds"], node["partly"], node["ran"]) for name, node in told.items()} == {
        "b": (2.0, True, True),
        "c": (3.0, False, True),
        "d": (0, False, False),
    }


def test_who_goes_early_does_not_say_that_the_rest_did_not_run() -> None:
    times = ItemTimes()
    times.look(1.0, [seen("a", "finished"), seen("b", "running")])
    times.leave(3.0)
    told = times.changes(9.0)
    assert set(told) == {"a", "b"}
    assert (told["a"]["partly"], told["b"]["partly"]) == (False, True)
    assert (told["b"]["seconds"], told["b"]["running"]) == (2.0, False)
