"""Pure overlay functions, called in the page that loads them.

They are state changes by events, and layout.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Any

import pytest

from wanstream.schema.records import Timeline, limit_share
from wanstream.schema.text.numbers import format_rate, format_seconds, format_share, format_size
from wanstream.tools.comfyui import PACK
from wanstream.tools.frontend import Frontend, SharedFrontends

pytestmark = [pytest.mark.comfy, pytest.mark.browser]

# Calls an export of an overlay module. State functions take the events received so far.
CALL = f"""async ([module, name, values]) => {{
    const exports = await import(`/extensions/{PACK}/overlay/${{module}}.mjs`)
    return exports[name](...values)
}}"""
STATE = f"""async events => {{
    const {{ EMPTY, after }} = await import('/extensions/{PACK}/overlay/store.mjs')
    return events.reduce((state, [event, payload, now]) => after(state, event, payload, now), EMPTY)
}}"""

Event = tuple[str, dict[str, Any]] | tuple[str, dict[str, Any], float]


class Modules:
    """The overlay's modules, called with plain values."""

    def __init__(self, frontend: Frontend) -> None:
        self.frontend = frontend

    def call(self, module: str, name: str, *values: Any) -> Any:
        return self.frontend.page.evaluate(CALL, [module, name, list(values)])

    def state(self, events: Sequence[Event]) -> dict[str, Any]:
        found: dict[str, Any] = self.frontend.page.evaluate(
            STATE, [list(event) for event in events]
        )
        return found


@pytest.fixture(scope="module")
def modules(frontends: SharedFrontends) -> Modules:
    return Modules(frontends.get())


def record(index: int = 0, **fields: Any) -> dict[str, Any]:
    plain = {"wall_s": 2.0, "compute_s": 1.0, "stall_s": 0.5, "bytes_moved": 100, "read_bytes": 50}
    rest = {
        "copy_s": 4.0,
        "read_s": 2.0,
        "device_bytes": None,
        "rss_bytes": 7,
        "device_used_bytes": None,
    }
    return {"index": index, "expert": "high", **plain, **rest, **fields}


def begin(run: str, **fields: Any) -> Event:
    plain = {
        "prompt_id": "p",
        "node": "7",
        "shown_at": "7",
        "steps": 2,
        "experts": ["high", "low"],
        "switch_step": 1,
    }
    return "wanstream.begin", {
        "run": run,
        **plain,
        "predicted": None,
        "at": 0,
        "workflow": None,
        **fields,
    }


def step(run: str, done: int) -> Event:
    return "wanstream.step", {"run": run, "done": done, "total": 2, "record": record(done - 1)}


def end(run: str, error: str | None = None, **timeline: Any) -> Event:
    events = {"steps": [record(0), record(1)], "changes": []} if error is None else None
    return "wanstream.end", {"run": run, "timeline": events, "predicted": None, "error": error}


def snapshot_of(*runs: dict[str, Any], known: Sequence[str] = ()) -> Event:
    return "snapshot", {"runs": list(runs), "known": list(known)}


@pytest.mark.parametrize(
    ("name", "python", "values"),
    [
        (
            "sizeText",
            format_size,
            [0, 1, 999, 1000, 9996, 99_960, 999_600, 702_800_000, 57_123_456_789, 3.2e15],
        ),
        ("rateText", format_rate, [0, 12_345_678_901]),
        ("shareText", format_share, [0, 0.1234, 1]),
        (
            "secondsText",
            lambda value: f"{format_seconds(value)} s",
            [0, 0.01234, 0.1234, 1.234, 12.34, 123.4],
        ),
    ],
)
def test_words_are_those_of_reports(
    modules: Modules, name: str, python: Any, values: list[float]
) -> None:
    assert [modules.call("figures", name, value) for value in values] == [
        python(value) for value in values
    ]


def test_sums_rates_and_peaks_are_those_of_a_timeline(modules: Modules) -> None:
    found = modules.call("figures", "totals", [record(), record(device_bytes=9, rss_bytes=3)])
    assert (found["wall_s"], found["stall_s"], found["bytes_moved"]) == (4.0, 1.0, 200)
    assert (found["copy_bytes_per_s"], found["read_bytes_per_s"]) == (25.0, 25.0)
    assert found["overlap"] == 1 - 1 / 8
    assert (found["device_bytes"], found["rss_bytes"]) == (9, 7)
    still = modules.call("figures", "totals", [record(copy_s=0, read_s=0)])
    assert (still["copy_bytes_per_s"], still["overlap"]) == (None, None)


def test_a_run_grows_step_by_step(modules: Modules) -> None:
    (run,) = modules.state([begin("r"), step("r", 1)])["runs"]
    assert ([each["index"] for each in run["records"]], run["ended"]) == ([0], False)
    (run,) = modules.state([begin("r"), step("r", 1), step("r", 2), end("r")])["runs"]
    assert (run["ended"], run["error"], len(run["timeline"]["steps"])) == (True, None, 2)


def test_progress_within_a_step_belongs_to_that_step(modules: Modules) -> None:
    def visits(step: int, done: int) -> Event:
        return "wanstream.visits", {"run": "r", "step": step, "done": done, "total": 40}

    def shown(events: Sequence[Event], now: float) -> str:
        (run,) = modules.state(events)["runs"]
        return str(modules.call("figures", "runText", run, now))

    begun = (*begin("r"), 10.0)
    assert shown([begun], 51.0) == "step 0/2 · 0:41 elapsed · first step reads the weights"
    assert (
        shown([begun, visits(0, 12)], 51.0)
        == "block 12/40 · 0:41 elapsed · first step reads the weights"
    )
    first = (*step("r", 1), 60.0)
    assert shown([begun, first, visits(0, 40)], 61.0).startswith(
        "step 1/2 · 2.00 s/step · 0:01 left · 0:51 elapsed · stall"
    )
    (run,) = modules.state([begun, first, visits(0, 40), visits(1, 10)])["runs"]
    assert modules.call("figures", "shareOfStep", run) == 0.25
    (late,) = modules.state(
        [(*snapshot_of({**begin("r")[1], "records": [], "age_s": 30.0, "visits": None}), 100.0)]
    )["runs"]
    assert late["since"] == 70.0


def notices(node: str, *found: dict[str, Any], workflow: str = "here") -> Event:
    return "wanstream.notices", {
        "node": node,
        "workflow": workflow,
        "type": "A",
        "notices": list(found),
    }


def notice(text: str, level: str = "wrong", **values: str) -> dict[str, Any]:
    return {"text": text, "level": level, "values": values, "exchange": None}


BY_ID = f"""async events => {{
    const {{ EMPTY, after }} = await import('/extensions/{PACK}/overlay/store.mjs')
    const {{ noticesById, ordered }} = await import('/extensions/{PACK}/overlay/notices.mjs')
    const state =
        events.reduce((state, [event, payload, now]) => after(state, event, payload, now), EMPTY)
    return [...noticesById(state, 'here')]
        .map(([id, found]) => [id, ...ordered(found).map(each => each.text)])
}}"""


def test_notices_are_those_of_the_last_time_that_a_node_ran(modules: Modules) -> None:
    def by_id(*events: Event) -> Any:
        return modules.frontend.page.evaluate(BY_ID, [list(event) for event in events])

    told = [
        notices("7", notice("one", "note"), notice("two", "warning"), notice("three")),
        notices("8", notice("four")),
    ]
    assert by_id(*told) == [["7", "three", "two", "one"], ["8", "four"]]
    assert by_id(*told, notices("7"), notices("8", notice("five"))) == [["8", "five"]]
    assert by_id(*told, notices("8", workflow="there")) == by_id(*told)
    running = [*told, begin("r", changes=["chosen"], node="9")]
    assert by_id(*running) == [["7", "three", "two", "one", "chosen"], ["8", "four"]]
    assert by_id(*running, end("r"))[0] == ["7", "three", "two", "one"], (
        "the timeline has all of them"
    )


FILES = ["sub/a", "b"]


@pytest.mark.parametrize(
    ("value", "widget", "applies"),
    [
        ("sub/a", {"value": "sub/a", "options": {"values": FILES}}, True),
        ("sub/a", {"value": "b", "options": {"values": FILES}}, False),
        ("sub/a", {"value": "sub\\a", "options": {"values": FILES}}, True),
        ("sub/a", {"value": "link/a", "options": {"values": FILES}}, True),
        ("c", {"value": "sub\\a", "options": {"values": FILES}}, False),
        (4, {"value": 4}, True),
        (4, {"value": 1, "options": {}}, False),
    ],
    ids=["same", "other", "backslash", "link", "unlisted", "number", "other number"],
)
def test_a_notice_applies_to_the_file_that_the_server_took(
    modules: Modules, value: Any, widget: dict[str, Any], applies: bool
) -> None:
    about = {"values": {"file": value}}
    named = {"name": "file", **widget}
    assert modules.call("notices", "applies", about, {"widgets": [named]}) == applies
    linked = [{"widget": {"name": "file"}, "link": 7}]
    assert modules.call("notices", "applies", about, {"widgets": [named], "inputs": linked})


NODES_WITH_NOTICES = f"""async events => {{
    const {{ EMPTY, after }} = await import('/extensions/{PACK}/overlay/store.mjs')
    const {{ NoticeStrips }} = await import('/extensions/{PACK}/overlay/notices.mjs')
    const state = events.reduce((state, [event, payload]) => after(state, event, payload, 0), EMPTY)
    const nodes = [[{{ comfyClass: 'A' }}, ['7']], [{{ comfyClass: 'B' }}, ['8']]]
    const strips = new NoticeStrips({{ nodes: () => nodes, workflow: () => 'here' }})
    return [...strips.current(state)]
        .map(([node, found]) => [node.comfyClass, ...found.map(each => each.text)])
}}"""


def test_a_notice_of_another_client_is_for_nodes_of_its_class(modules: Modules) -> None:
    told = [notices(node, notice(node), workflow="") for node in ("7", "8")]
    assert modules.frontend.page.evaluate(NODES_WITH_NOTICES, [list(event) for event in told]) == [
        ["A", "7"]
    ]
    assert modules.call("notices", "applies", {**notice("x"), "type": "A"}, {"comfyClass": "A"})


HEIGHT_WITHOUT_CHART = f"""async enlarged => {{
    const {{ RunWidget }} = await import('/extensions/{PACK}/overlay/run_widget.mjs')
    const node = {{ size: [300, 100], properties: {{}} }}
    const page = {{
        resize: () => (node.size[1] = 280), shrink: (node, height) => (node.size[1] -= height)
    }}
    const widget = Object.assign(Object.create(RunWidget.prototype), {{ node, page, run: {{}} }})
    widget.takeRoom()
    node.size[1] += enlarged
    widget.returnRoom()
    widget.returnRoom()
    return node.size[1]
}}"""


@pytest.mark.parametrize("enlarged", [0, 70])
def test_a_node_gives_back_the_room_of_its_chart_alone(modules: Modules, enlarged: int) -> None:
    assert modules.frontend.page.evaluate(HEIGHT_WITHOUT_CHART, enlarged) == 100 + enlarged


PICTURE = "data:image/webp;base64,AAAA"


def preview(run: str, image: str = PICTURE, done: int = 1) -> Event:
    return "wanstream.preview", {"run": run, "image": image, "done": done}


def test_a_run_has_its_last_preview(modules: Modules) -> None:
    events = [
        begin("r"),
        step("r", 1),
        preview("r"),
        step("r", 2),
        preview("r", f"{PICTURE}BBBB", 2),
        end("r"),
    ]
    (run,) = modules.state(events)["runs"]
    assert run["preview"] == {"image": f"{PICTURE}BBBB", "done": 2}
    (run,) = modules.state([*events, begin("r")])["runs"]
    assert run["preview"] is None, "a run that begins has none"
    assert modules.state([begin("r"), preview("unknown")]) == modules.state([begin("r")])


def test_a_snapshot_keeps_the_preview_of_a_page(modules: Modules) -> None:
    theirs = {
        **begin("r")[1],
        "records": [record(0)],
        "ended": True,
        "timeline": None,
        "error": None,
    }
    (run,) = modules.state([begin("r"), preview("r"), snapshot_of(theirs)])["runs"]
    assert (run["ended"], run["preview"]["image"]) == (True, PICTURE)


@pytest.mark.parametrize(
    "image", ["https://example.com/a.webp", "data:text/html,<script>", "javascript:alert(1)", ""]
)
def test_a_preview_is_a_picture_and_no_address(modules: Modules, image: str) -> None:
    assert modules.state([begin("r"), preview("r", image)]) == modules.state([begin("r")])


def test_a_step_that_comes_twice_or_after_a_gap_changes_nothing(modules: Modules) -> None:
    events = [begin("r"), step("r", 1)]
    assert modules.state([*events, step("r", 1)]) == modules.state(events)
    assert modules.state([*events, step("r", 3)]) == modules.state(events)
    state = modules.state(events)
    assert modules.call("store", "leavesGap", state, step("r", 3)[1])
    assert modules.call("store", "leavesGap", state, step("other", 1)[1])
    assert not modules.call("store", "leavesGap", state, step("r", 2)[1])


def test_a_snapshot_fills_what_was_missed_and_takes_nothing_back(modules: Modules) -> None:
    theirs = {
        **begin("r")[1],
        "records": [record(0)],
        "ended": False,
        "timeline": None,
        "error": None,
    }
    snapshot = snapshot_of(theirs)
    assert len(modules.state([snapshot])["runs"][0]["records"]) == 1
    assert len(modules.state([begin("r"), snapshot])["runs"][0]["records"]) == 1
    assert (
        len(modules.state([begin("r"), step("r", 1), step("r", 2), snapshot])["runs"][0]["records"])
        == 2
    )
    assert modules.state([begin("r"), end("r"), snapshot])["runs"][0]["ended"]


def test_a_run_of_a_server_that_is_gone_has_ended(modules: Modules) -> None:
    (run,) = modules.state([begin("r"), step("r", 1), snapshot_of(known=["r"])])["runs"]
    assert (run["ended"], run["error"]) == (True, "the server was restarted")


def test_a_run_that_begins_while_the_answer_is_under_way_goes_on(modules: Modules) -> None:
    events = [begin("old"), end("old"), begin("r"), step("r", 1), snapshot_of(known=["old"])]
    runs = modules.state(events)["runs"]
    assert [(run["run"], run["ended"], run["error"]) for run in runs] == [
        ("old", True, None),
        ("r", False, None),
    ]
    assert len(runs[1]["records"]) == 1


def item(event: str, now: float = 0.0, **payload: Any) -> Event:
    """A ComfyUI event about the queue item "p"."""
    return event, {"prompt_id": "p", **payload}, now


def parts(now: float, **states: str) -> Event:
    """The states of all begun parts of nodes.

    "a.1" is a part of "a", as if expanded from it.
    """
    names = {name.replace("_", "."): state for name, state in states.items()}
    nodes = {
        name: {"state": state, "display_node_id": name.split(".")[0]}
        for name, state in names.items()
    }
    return item("progress_state", now, nodes=nodes)


GRAPH_OF_P = item(
    "graph",
    workflow="here",
    nodes={each.lower(): {"class_type": each, "inputs": {}} for each in "ABC"},
)


def figures_of(modules: Modules, events: Sequence[Event], now: float) -> dict[str, Any]:
    """The figures for each node in the item "p"."""
    found = modules.call("store", "lastItem", modules.state(events), "here")
    nodes = {"a": "A", "b": "B", "c": "C"}
    return {
        key: found and modules.call("graph_ids", "figuresAt", found, [key], nodes[key], now)
        for key in nodes
    }


def test_a_node_takes_the_time_between_its_events(modules: Modules) -> None:
    events = [item("execution_start"), GRAPH_OF_P, parts(1.0, a="running"), parts(2.5, a="running")]
    figures = figures_of(modules, events, 3.0)
    assert (figures["a"]["seconds"], figures["a"]["running"], figures["a"]["ran"]) == (
        2.0,
        True,
        True,
    )
    assert figures["b"] is None, "it may still run"
    events += [
        parts(4.0, a="finished"),
        parts(5.0, a="finished", b="running"),
        item("execution_success", 7.0),
    ]
    figures = figures_of(modules, events, 99.0)
    assert [(figures[key]["seconds"], figures[key]["running"]) for key in "ab"] == [
        (3.0, False),
        (2.0, False),
    ]
    assert (figures["c"]["ran"], figures["c"]["cached"]) == (False, False), "not run"


def test_phases_of_an_item_add_up_to_the_time_from_queue_to_file(modules: Modules) -> None:
    """Two samplers. The second one begins 0.5 s after the first one."""

    def at(event: Event, now: float) -> Event:
        return event[0], event[1], now

    runs = [
        at(begin("x"), 3.0), at(step("x", 1), 4.0), at(step("x", 2), 6.0), at(end("x"), 6.1),
        at(begin("y"), 6.5), at(step("y", 1), 7.5), at(end("y"), 7.6),
    ]  # fmt: skip
    events = [item("execution_start", 1.0), *runs]
    assert modules.call("store", "itemPhases", modules.state(events), "p") is None
    ended = modules.state([*events, item("execution_success", 9.0)])
    phases = modules.call("store", "itemPhases", ended, "p")
    assert phases == {"total": 8.0, "before": 2.0, "steps": 4.0, "after": 2.0}
    assert modules.call("figures", "phasesText", phases) == (
        "Queue to file 8.00 s: 2.00 s before the steps, 4.00 s in them, 2.00 s after"
    )
    unseen = modules.state([*runs, item("execution_success", 9.0)])
    assert modules.call("store", "itemPhases", unseen, "p") is None


@pytest.mark.parametrize("event", ["execution_error", "execution_interrupted"])
def test_a_node_that_fails_or_is_interrupted_ends_with_its_item(
    modules: Modules, event: str
) -> None:
    events = [item("execution_start"), GRAPH_OF_P, parts(1.0, a="running"), item(event, 3.0)]
    figures = figures_of(modules, events, 99.0)
    assert (figures["a"]["seconds"], figures["a"]["running"], figures["b"]["ran"]) == (
        2.0,
        False,
        False,
    )


def test_the_error_of_a_blocked_node_ends_no_item(modules: Modules) -> None:
    events = [
        item("execution_start"),
        GRAPH_OF_P,
        parts(1.0, a="running"),
        item("execution_error", 2.0),
    ]
    figures = figures_of(modules, [*events, parts(3.0, a="finished", b="running")], 5.0)
    assert (figures["b"]["seconds"], figures["b"]["running"], figures["c"]) == (2.0, True, None)


def test_a_node_runs_while_any_of_its_parts_does(modules: Modules) -> None:
    events = [
        item("execution_start"),
        GRAPH_OF_P,
        parts(1.0, a="running"),
        parts(2.0, a="running", a_1="running"),
    ]
    events += [parts(3.0, a="running", a_1="finished"), parts(5.0, a="finished", a_1="finished")]
    assert figures_of(modules, events, 9.0)["a"]["seconds"] == 4.0
    events += [parts(6.0, a="finished", a_1="finished", a_2="running")]
    assert figures_of(modules, events, 7.0)["a"]["seconds"] == 5.0


def test_a_cached_node_seems_finished_and_took_no_time(modules: Modules) -> None:
    events = [
        item("execution_start"),
        item("execution_cached", nodes=["a"]),
        parts(1.0, a="finished"),
        GRAPH_OF_P,
    ]
    figures = figures_of(modules, events, 2.0)
    assert (figures["a"]["cached"], figures["a"]["ran"]) == (True, False)


def test_no_time_is_shown_that_nobody_measured(modules: Modules) -> None:
    opened_in_the_middle = [
        parts(1.0, a="running"),
        parts(2.0, a="finished"),
        item("execution_success", 3.0),
    ]
    assert modules.state([*opened_in_the_middle, GRAPH_OF_P])["items"] == []
    events = [item("execution_start"), GRAPH_OF_P, parts(1.0, a="running"), ("reconnecting", {})]
    assert modules.state([*events, parts(9.0, a="finished")])["items"] == []
    over = [item("execution_start"), GRAPH_OF_P, item("execution_success"), ("reconnecting", {})]
    assert len(modules.state(over)["items"]) == 1


def test_an_item_is_of_no_graph_before_its_own_is_known(modules: Modules) -> None:
    state = modules.state([item("execution_start"), parts(1.0, a="running")])
    assert modules.call("store", "lastItem", state, "here") is None
    state = modules.state([item("execution_start"), parts(1.0, a="running"), GRAPH_OF_P])
    assert modules.call("store", "lastItem", state, "here")["times"]["a"]["since"] == 1.0
    assert modules.call("store", "lastItem", state, "elsewhere") is None


def test_an_event_that_moves_a_progress_bar_alone_changes_nothing(modules: Modules) -> None:
    same = f"""async events => {{
        const {{ EMPTY, after }} = await import('/extensions/{PACK}/overlay/store.mjs')
        const before = events.slice(0, -1).reduce((state, each) => after(state, ...each), EMPTY)
        return after(before, ...events.at(-1)) === before
    }}"""
    events = [item("execution_start"), parts(1.0, a="running"), parts(2.0, a="running")]
    assert modules.frontend.page.evaluate(same, [list(each) for each in events])


def test_the_memory_of_a_badge_is_that_of_the_runs_of_its_node(modules: Modules) -> None:
    events = [
        begin("r", node="5:2"),
        step("r", 1),
        begin("other", node="52"),
        begin("before", prompt_id="o", node="5:2"),
    ]
    state = modules.state(events)
    counts = [
        len(modules.call("store", "recordsAt", state, "p", [key]))
        for key in ("5", "5:2", "52", "2")
    ]
    assert counts == [1, 1, 0, 0]
    assert modules.call("figures", "mostMemory", [record(), record(rss_bytes=9)]) == {
        "kind": "RAM",
        "bytes": 9,
    }
    assert modules.call("figures", "mostMemory", []) is None


def test_only_the_last_runs_are_kept(modules: Modules) -> None:
    runs = modules.state([begin(str(number)) for number in range(60)])["runs"]
    assert [run["run"] for run in runs] == [str(number) for number in range(10, 60)]


def test_the_last_run_of_a_node_is_that_of_its_graph(modules: Modules) -> None:
    here, there = "c6ee4ad1", "99999999"
    events = [
        begin("a", workflow=here),
        begin("b", workflow=there),
        begin("c", node="9", shown_at="8", workflow=here),
    ]
    state = modules.state(events)

    def last(workflow: str, *ids: str) -> Any:
        found = modules.call("store", "lastRun", state, workflow, list(ids))
        return found and found["run"]

    assert (last(here, "7"), last(there, "7"), last(here, "8"), last(here, "9")) == (
        "a",
        "b",
        "c",
        "c",
    )
    assert (last(here, "1"), last("another", "7")) == (None, None)


def test_figures_of_a_subgraph_are_those_of_its_nodes(modules: Modules) -> None:
    classes = {"1": "A", "5:1": "A", "5:2:1": "B", "5:3": "C", "51": "A"}
    times = {"5:1": {"seconds": 1.0, "since": None}, "5:2:1": {"seconds": 0.0, "since": 8.0}}
    times["51"] = {"seconds": 100.0, "since": None}
    found = {"classes": classes, "times": times, "cached": ["5:3"], "running": True}

    def figures(key: str, class_type: str) -> Any:
        return modules.call("graph_ids", "figuresAt", found, [key], class_type, 10.0)

    assert figures("5", "a subgraph's own type") == {
        "seconds": 3.0,
        "running": True,
        "ran": True,
        "cached": False,
    }
    assert figures("5:2:1", "B")["seconds"] == 2.0
    assert figures("51", "B") is None, "another graph's node"
    assert figures("1", "A") is None
    found |= {"cached": ["5:1", "5:2:1", "5:3"], "times": {}}
    assert figures("5", "a subgraph's own type")["cached"]
    found |= {"cached": ["5:1"], "running": False}
    assert figures("5", "a subgraph's own type") == {
        "seconds": 0,
        "running": False,
        "ran": False,
        "cached": False,
    }


def run_of(count: int, measured: int) -> dict[str, Any]:
    experts = ["high"] * (count // 2) + ["low"] * (count - count // 2)
    records = [record(number, expert=experts[number]) for number in range(measured)]
    events = {
        **begin("r", steps=count, experts=experts, switch_step=count // 2)[1],
        "ended": False,
        "error": None,
    }
    return {**events, "records": records, "timeline": None}


def test_every_step_has_a_bar_and_the_next_ones_their_place(modules: Modules) -> None:
    columns = modules.call("chart", "columnsOf", run_of(8, 3), 400)
    assert [(column["first"], column["last"]) for column in columns] == [
        (step, step) for step in range(8)
    ]
    assert [column["measured"] is not None for column in columns] == [True] * 3 + [False] * 5
    assert [column["expert"] for column in columns] == ["high"] * 4 + ["low"] * 4


def test_of_many_steps_a_bar_is_the_mean_of_some(modules: Modules) -> None:
    columns = modules.call("chart", "columnsOf", run_of(1000, 1000), 300)
    assert len(columns) <= 100
    assert [column["first"] for column in columns[1:]] == [
        column["last"] + 1 for column in columns[:-1]
    ]
    assert (columns[0]["first"], columns[-1]["last"]) == (0, 999)
    assert columns[0]["measured"]["wall"] == 2.0


def test_no_bar_is_higher_than_the_plot_and_the_longest_fills_it(modules: Modules) -> None:
    run = run_of(4, 4)
    run["records"][2] |= {"wall_s": 8.0, "compute_s": 6.0}
    run["predicted"] = {"steps": [record(wall_s=4.0)] * 4}
    options = {"run": run, "width": 400, "height": 150, "font": 11, "chosen": 1, "id": "x"}
    chart = modules.call("chart", "chart", options)
    frame = modules.call("chart", "frameOf", 400, 150, 11, 4)
    plot = frame["bottom"] - frame["top"]

    def heights(kind: str) -> list[float]:
        found: list[float] = []

        def look(part: Any) -> None:
            if isinstance(part, list) and part:
                if isinstance(part[1], dict) and str(part[1].get("class", "")).startswith(kind):
                    rects = [part, *part[2:]] if part[0] == "rect" else part[2:]
                    found.append(sum(rect[1]["height"] for rect in rects if rect[0] == "rect"))
                for child in part[2:]:
                    look(child)

        look(chart)
        return found

    assert heights("wanstream-bar") == pytest.approx([plot / 4, plot / 4, plot, plot / 4])
    assert heights("wanstream-predicted") == pytest.approx([plot / 2] * 4)


def test_steps_in_which_a_cache_left_blocks_out_are_marked(modules: Modules) -> None:
    run = run_of(4, 4)
    run["records"][1] |= {"skipped_visits": 39, "skipped_lanes": 2}
    options = {"run": run, "width": 400, "height": 150, "font": 11, "chosen": None, "id": "x"}
    chart = modules.call("chart", "chart", options)
    frame = modules.call("chart", "frameOf", 400, 150, 11, 4)
    (mark,) = (part for part in chart[2:] if part[1].get("class") == "wanstream-cached")
    assert mark[1]["data-left-out"] == 39
    assert mark[1]["x"] == pytest.approx(frame["left"] + frame["step"])
    message = modules.call("figures", "stepText", run["records"][1], None)
    assert "39 blocks skipped by a cache" in message
    assert "left out" not in modules.call("figures", "stepText", run["records"][0], None)


def test_the_parts_of_a_bar_stand_on_each_other(modules: Modules) -> None:
    options = {
        "run": run_of(1, 1),
        "width": 400,
        "height": 150,
        "font": 11,
        "chosen": None,
        "id": "x",
    }
    chart = modules.call("chart", "chart", options)
    frame = modules.call("chart", "frameOf", 400, 150, 11, 1)
    (bar,) = (part for part in chart[2:] if "data-wall" in part[1])
    compute, rest, stalled = (part[1] for part in bar[2:])
    assert compute["y"] + compute["height"] == pytest.approx(frame["bottom"])
    assert rest["y"] + rest["height"] == pytest.approx(compute["y"])
    assert stalled["y"] + stalled["height"] == pytest.approx(rest["y"])
    assert stalled["y"] == pytest.approx(frame["top"])


def test_a_run_without_a_step_can_be_drawn(modules: Modules) -> None:
    options = {
        "run": run_of(2, 0),
        "width": 400,
        "height": 150,
        "font": 11,
        "chosen": None,
        "id": "x",
    }
    assert modules.call("chart", "chart", options)[0] == "svg"
    nothing = {**run_of(2, 0), "steps": 0, "experts": [], "switch_step": None}
    assert modules.call("chart", "chart", {**options, "run": nothing})[0] == "svg"


def test_samples_of_memory_lie_where_their_steps_are(modules: Modules) -> None:
    run = run_of(4, 0)
    steps = [record(number, start_s=10.0 + 2 * number) for number in range(4)]
    at = {9.0: 1, 10.0: 5, 13.0: 6, 17.5: 900, 18.0: 1}
    memory = [
        {"at_s": each, "device_bytes": None, "rss_bytes": nbytes} for each, nbytes in at.items()
    ]
    run |= {"ended": True, "timeline": {"steps": steps, "memory": memory, "changes": []}}
    columns = modules.call("chart", "columnsOf", run, 400)
    assert modules.call("chart", "samplesOf", run, columns) == [[0, 5], [1.5, 6], [3.75, 900]]
    assert modules.call("chart", "samplesOf", run_of(4, 4), columns) == [], (
        "a run that goes on has none yet"
    )
    steps[1]["start_s"] = None  # as in old timelines
    assert len(modules.call("chart", "samplesOf", run, columns)) <= 3
    (line,) = (part for part in memory_parts(modules, run) if "data-samples" in part[1])
    assert min(float(point.split(",")[1]) for point in line[1]["points"].split()) >= 11, (
        "no sample lies above the plot"
    )


def memory_parts(modules: Modules, run: dict[str, Any]) -> list[Any]:
    options = {"run": run, "width": 400, "height": 150, "font": 11, "chosen": None, "id": "x"}
    parts = modules.call("chart", "chart", options)[2:]
    (memory,) = (part for part in parts if part[1].get("class") == "wanstream-memory")
    return list(memory[2:])


TEXTS = f"() => import('/extensions/{PACK}/overlay/i18n.mjs').then(module => module.TEXTS)"


def test_every_word_is_there_in_both_languages_with_the_same_values(modules: Modules) -> None:
    english, chinese = (
        modules.frontend.page.evaluate(TEXTS)[language] for language in ("en", "zh")
    )
    assert english.keys() == chinese.keys()
    for key, words in english.items():
        places = [sorted(re.findall(r"\{\d\}", text)) for text in (words, chinese[key])]
        assert places[0] == places[1], key
        assert re.search(r"[\u4e00-\u9fff]", chinese[key]), key


def steps_of(*seconds: float, **fields: Any) -> list[dict[str, Any]]:
    return [record(number, wall_s=wall, **fields) for number, wall in enumerate(seconds)]


SETTINGS = {
    "size": "832x480x81",
    "dtype": "bf16",
    "policy": "layerwise, 1 ahead",
    "lora": "",
    "workers": None,
}
TOTALS = {"device_total": 25_300_000_000, "ram_total": 17_180_000_000}


def test_a_run_that_goes_on_leads_with_its_step_its_pace_and_the_time_left(
    modules: Modules,
) -> None:
    run = {**run_of(20, 0), "records": steps_of(*[12.4] * 7, stall_s=0.0, rss_bytes=1_120_000_000)}
    run |= {"settings": {**SETTINGS, **TOTALS}, "since": 10.0, "stepAt": 100.0}
    line = "step 7/20 · 12.4 s/step · 2:41 left · 1:30 elapsed · 1.12 of 17.2 GB RAM"
    assert modules.call("figures", "runText", run, 100.0) == line
    assert "· 2:36 left ·" in modules.call("figures", "runText", run, 105.0), (
        "it falls between two steps"
    )
    assert "· 0:00 left ·" in modules.call("figures", "runText", run, 600.0)
    run["records"] = steps_of(*[12.4] * 7, stall_s=1.5, device_bytes=6_930_000_000)
    line = (
        "step 7/20 · 12.4 s/step · 2:41 left · 1:30 elapsed · stall 10.50 s · 6.93 of 25.3 GB VRAM"
    )
    assert modules.call("figures", "runText", run, 100.0) == line
    run["settings"] = None
    text = modules.call("figures", "runText", run, 100.0)
    assert text.endswith(" · VRAM 6.93 GB"), "a machine that is not known"


def test_a_run_that_has_ended_says_how_long_it_took(modules: Modules) -> None:
    run = {**run_of(4, 0), "ended": True, "records": steps_of(*[90.0] * 4, stall_s=0.4)}
    assert modules.call("figures", "runText", run) == "4 steps in 6:00 · 90.0 s/step · RAM 7 B"
    run["records"] = steps_of(0.5, 0.5, stall_s=0.1)
    assert (
        modules.call("figures", "runText", run)
        == "2 steps in 1.00 s · 0.500 s/step · stall 0.200 s · RAM 7 B"
    )


def test_the_share_of_the_limit_is_that_of_reports(modules: Modules) -> None:
    records = [record(0, skipped_lanes=1), record(1, compute_s=2.0), record(2, compute_s=1.0)]
    limits = {
        "steps": [record(number, limit_s=limit_s) for number, limit_s in enumerate((0.9, 1.6, 0.5))]
    }
    run = {**run_of(3, 0), "ended": True, "records": records, "predicted": limits}
    measured, simulated = (timeline_of(steps) for steps in (records, limits["steps"]))
    assert (
        modules.call("figures", "limitShare", run)
        == limit_share(measured, simulated)
        == pytest.approx(0.7)
    )
    assert "· 70.0 % of the device's limit ·" in modules.call("figures", "runText", run)
    (cell,) = (
        each for each in modules.call("figures", "figuresOf", run) if each["name"] == "of limit"
    )
    assert (cell["head"], cell["text"]) == ("of limit", "70.0 %")
    for predicted in (None, {"steps": [record(number) for number in range(3)]}):
        assert modules.call("figures", "limitShare", {**run, "predicted": predicted}) is None


def timeline_of(records: Sequence[dict[str, Any]]) -> Timeline:
    return Timeline.from_dict(
        {"kind": "simulated", "steps": [{"sigma": None, **step} for step in records]}
    )


def test_the_time_left_follows_the_last_steps_and_the_prediction(modules: Modules) -> None:
    def left(*seconds: float, **fields: Any) -> Any:
        return modules.call(
            "figures", "secondsLeft", {**run_of(10, 0), "records": steps_of(*seconds), **fields}
        )

    assert left() is None
    assert left(30.0) == pytest.approx(270), "the first step is all that is known"
    assert left(30.0, 2.0, 2.0) == pytest.approx(14), "in the first step, weights are read"
    assert left(9.0, 9.0, 9.0, 2.0, 2.0, 2.0, 2.0, 2.0) == pytest.approx(4), (
        "the low expert has its own pace"
    )
    predicted = {"steps": steps_of(*[1.0] * 5, *[3.0] * 5)}
    assert left(predicted=predicted) == pytest.approx(20)
    assert left(9.0, 2.0, 2.0, 2.0, predicted=predicted) == pytest.approx(2 * (1 + 15)), (
        "twice as slow as predicted"
    )
    assert left(*[1.0] * 10) is None
    assert left(1.0, ended=True) is None


def test_hours_are_told_from_minutes(modules: Modules) -> None:
    assert [modules.call("figures", "clockText", value) for value in (0, 59.6, 156, 3756)] == [
        *("0:00", "1:00", "2:36", "1:02:36"),
    ]


def cells_of(part: Any, tag: str) -> list[str]:
    """The texts in all elements with this tag, in depth."""
    if not isinstance(part, list):
        return []
    own = (
        [part[2] if len(part) > 2 else ""]
        if part[0] == tag and not isinstance(part[-1], list)
        else []
    )
    return own + [text for child in part[2:] for text in cells_of(child, tag)]


TABLE = f"""async runs => {{
    const {{ comparisonOf, csvOf, tableOf }} =
        await import('/extensions/{PACK}/overlay/runs_table.mjs')
    return [tableOf(runs, {{ ticked: new Set(), onTick: null }}), comparisonOf(runs), csvOf(runs)]
}}"""


def test_rows_of_the_table_differ_by_their_settings(modules: Modules) -> None:
    one = {**run_of(2, 2), "title": "Sampler", "settings": {**SETTINGS, **TOTALS}}
    other = {
        **one,
        "settings": {**one["settings"], "size": "1280x720x81", "lora": "fast 1", "dtype": "fp16"},
    }
    table, comparison, exported = modules.frontend.page.evaluate(TABLE, [one, other])
    assert cells_of(table, "th")[1:8] == [
        "time",
        "node",
        "size",
        "dtype",
        "policy",
        "LoRA",
        "steps",
    ]
    cells = cells_of(table, "td")
    assert {"832x480x81", "1280x720x81", "bf16", "fp16", "layerwise, 1 ahead", "fast 1"} <= {*cells}
    assert cells_of(comparison, "td")[:2] == ["832x480x81", "1280x720x81"]
    head, first, _, _ = exported.split("\n")
    assert head.startswith("run,prompt_id,at,node,size,dtype,policy,lora,workers,steps,")
    assert '"832x480x81","bf16","layerwise, 1 ahead","",""' in first
    table, _, _ = modules.frontend.page.evaluate(TABLE, [{**one, "settings": None}])
    assert "size" not in cells_of(table, "th"), "of runs from before, nothing is known"


def test_a_comparison_has_ratios_where_figures_differ(modules: Modules) -> None:
    one = {**run_of(2, 2), "title": "Sampler", "settings": {**SETTINGS, **TOTALS}}
    other = {**one, "records": steps_of(3.0, 3.0)}
    refused = {**one, "records": [], "ended": True, "error": "needs 9.3 GB"}
    table, comparison, exported = modules.frontend.page.evaluate(TABLE, [one, other, refused])
    rows = {
        row[1]["data-figure"]: cells_of(row, "td")
        for row in comparison[3][2:]
        if "data-figure" in row[1]
    }
    assert rows["steps"] == ["2", "2", "-"]
    assert rows["wall"] == ["4.00 s", "6.00 s (1.50 x)", "-"]
    assert rows["moved"] == ["200 B", "200 B", "-"]
    words = modules.call("runs_table", "fastestText", [other, one, refused])
    assert words.startswith("Fastest: ")
    assert words.endswith(
        " Sampler, 2.00 s/step. The next one takes 1.50 × as long, with 1.00 × the memory."
    )
    assert modules.call("runs_table", "fastestText", [one, refused]) == ""
    first, *_ = table[3][2:]
    figures = [cell[2] for cell in first[2:] if "data-figure" in cell[1]]
    assert {*figures} == {"-"}, "the last run was refused before its first step"
    assert not {"moved at", "read at"} & {*cells_of(table, "th")}
    assert exported.split("\n")[3].endswith(',,,,,,,,,,,,,"0 of 2 steps: needs 9.3 GB"')
    assert modules.call("figures", "runText", refused, 1.0) == "0 of 2 steps: needs 9.3 GB"


@pytest.mark.parametrize(
    ("text", "exported"),
    [
        ("=HYPERLINK(1)", "'=HYPERLINK(1)"),
        ("+cmd", "'+cmd"),
        ("-cmd", "'-cmd"),
        ("@SUM(1)", "'@SUM(1)"),
        ("\t=1", "'\t=1"),
        ("\r=1", "'\r=1"),
        (" =1", "' =1"),
        ("\ufeff@x", "'\ufeff@x"),
        ("\uff1d1", "'\uff1d1"),
        ("\uff0bcmd", "'\uff0bcmd"),
        ("\uff0dcmd", "'\uff0dcmd"),
        ("\uff20cmd", "'\uff20cmd"),
        ("\u2212cmd", "'\u2212cmd"),
        ("-12.5", "-12.5"),
        ("a=b", "a=b"),
        ('=a"b', "'=a\"b"),
    ],
)
def test_no_text_of_an_exported_table_is_a_formula(
    modules: Modules, text: str, exported: str
) -> None:
    run = {**run_of(2, 2), "title": text, "prompt_id": text, "settings": {**SETTINGS, **TOTALS}}
    _, _, table = modules.frontend.page.evaluate(TABLE, [run])
    (row,) = csv.DictReader(io.StringIO(table, newline=""))
    assert (row["node"], row["prompt_id"]) == (exported, exported)


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"seconds": 0.0}, "< 0.1 s · 7.00 GB VRAM"),
        ({"seconds": 0.04, "memory": None}, "< 0.1 s"),
        ({"seconds": 0.12, "memory": {"kind": "RAM", "bytes": 8e6}}, "0.1 s · 8.00 MB RAM"),
        ({"ran": False, "cached": True}, "cached"),
        ({"ran": False, "cached": False}, "not run"),
    ],
)
def test_a_badge_says_what_a_node_took_or_why_it_did_not_run(
    modules: Modules, figures: dict[str, Any], words: str
) -> None:
    known = {"seconds": 1.0, "ran": True, "cached": False, "memory": {"kind": "VRAM", "bytes": 7e9}}
    assert modules.call("badges", "badgeText", {**known, **figures}) == words


PLANTED = ["img", {"src": "x", "onerror": "window.ran = true", "onclick": "window.ran = true"}]
"""Values that would run a script if one in a prompt became an element."""

# Adds all elements that the overlay renders for a run to the page, and gives planted scripts a
# moment to run.
SHOW_ALL = f"""async ([runs, chosen]) => {{
    const load = name => import(`/extensions/{PACK}/overlay/${{name}}.mjs`)
    const [dom, table, chart, figures, badges] =
        await Promise.all(['dom', 'runs_table', 'chart', 'figures', 'badges'].map(load))
    window.ran = false
    const shown = document.createElement('div')
    const add = make => {{
        try {{ shown.append(make()) }} catch (error) {{ shown.append(`refused: ${{error}}`) }}
    }}
    const options = {{ ticked: new Set(), onTick: () => {{}} }}
    add(() => dom.element(table.tableOf(runs, options)))
    add(() => dom.element(table.comparisonOf(runs)))
    for (const run of runs) {{
        const size = {{ width: 400, height: 150, font: 11 }}
        add(() => dom.element(chart.chart({{ run, ...size, chosen: null, id: 'x' }})))
        add(() => dom.element(figures.runText(run)))
        add(() => dom.element(figures.stepText(figures.recordsOf(run)[0])))
    }}
    for (const value of chosen) add(() => dom.element(value))
    document.body.append(shown)
    await new Promise(done => setTimeout(done, 300))
    const found = {{
        ran: window.ran, text: shown.textContent,
        foreign: shown
            .querySelectorAll('img, script, iframe, a, [onerror], [onclick], [onload]').length
    }}
    shown.remove()
    return found
}}"""


@pytest.mark.parametrize("field", ["title", "error", "node", "shown_at", "prompt_id", "workflow"])
def test_a_value_of_a_prompt_never_becomes_an_element(modules: Modules, field: str) -> None:
    run = {**run_of(2, 2), "title": None, field: PLANTED}
    shown = modules.frontend.page.evaluate(
        SHOW_ALL, [[run, run], [PLANTED, [PLANTED], {"toString": PLANTED}, None]]
    )
    assert (shown["ran"], shown["foreign"]) == (False, 0)
    assert "onerror" in shown["text"], "it is shown as text"


def test_the_name_of_an_expert_never_becomes_an_element(modules: Modules) -> None:
    run = run_of(2, 2)
    run["experts"] = [PLANTED, PLANTED]
    run["records"] = [{**each, "expert": PLANTED} for each in run["records"]]
    shown = modules.frontend.page.evaluate(SHOW_ALL, [[run], []])
    assert (shown["ran"], shown["foreign"]) == (False, 0)


REFUSED = f"""async ([tag, attributes]) => {{
    const {{ element, h }} = await import('/extensions/{PACK}/overlay/dom.mjs')
    try {{ element(h(tag, attributes)) }} catch (error) {{ return `${{error}}` }}
    return null
}}"""


@pytest.mark.parametrize(
    ("tag", "attributes", "message"),
    [
        ("img", {"src": "x"}, "no element img"),
        ("script", {}, "no element script"),
        (["div"], {}, "no element"),
        ("div", {"onclick": "window.ran = true"}, "onclick would run"),
        ("rect", {"ONLOAD": "window.ran = true"}, "ONLOAD would run"),
    ],
)
def test_other_elements_and_scripts_in_attributes_are_refused(
    modules: Modules, tag: Any, attributes: dict[str, str], message: str
) -> None:
    assert message in (modules.frontend.page.evaluate(REFUSED, [tag, attributes]) or "made")
    assert (
        modules.frontend.page.evaluate(REFUSED, ["div", {"class": "plain", "hidden": True}]) is None
    )
