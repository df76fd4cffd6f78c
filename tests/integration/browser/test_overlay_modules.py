"""Pure overlay functions, called in the page that loads them.

They are state changes by events, and layout.
"""

import csv
import io
import re
from functools import partial

import pytest

from wanstream.schema.records import Timeline, limit_share
from wanstream.schema.text.numbers import format_rate, format_seconds, format_share, format_size
from wanstream.tests.support.host.shipped import node
from wanstream.tools.comfyui import PACK

pytestmark = [pytest.mark.comfy, pytest.mark.browser]

# Imports a module of the overlay. State functions take the events received so far.
LOAD = f"""const load = name => import(`/extensions/{PACK}/overlay/${{name}}.mjs`)
    const {{ EMPTY, after }} = await load('store')
    const stateOf = events => events.reduce((state, each) => after(state, ...each), EMPTY)"""
CALL = f"""async ([module, name, values]) => {{ {LOAD}
    return (await load(module))[name](...values)
}}"""


class Modules:
    """The overlay's modules, called with plain values."""

    def __init__(self, frontend):
        self.frontend = frontend

    def evaluate(self, script, *values):
        return self.frontend.page.evaluate(script, *values)

    def call(self, module, name, *values):
        return self.evaluate(CALL, [module, name, list(values)])

    def with_events(self, code, *events):
        """Run code for these events."""
        return self.evaluate(f"async events => {{ {LOAD};\n{code} }}", events)

    def state(self, *events):
        return self.with_events("return stateOf(events)", *events)

    def run(self, *events):
        """Return the only run."""
        (found,) = self.state(*events)["runs"]
        return found

    def chart(self, run, chosen=None):
        options = {"run": run, "width": 400, "height": 150, "font": 11, "chosen": chosen, "id": "x"}
        return self.call("chart", "chart", options)


@pytest.fixture(scope="module")
def modules(frontends):
    return Modules(frontends.get())


def record(index=0, **fields):
    plain = {"wall_s": 2.0, "compute_s": 1.0, "stall_s": 0.5, "bytes_moved": 100, "read_bytes": 50}
    rest = {"copy_s": 4.0, "read_s": 2.0, "rss_bytes": 7}
    rest |= dict.fromkeys(("device_bytes", "device_used_bytes"))
    return {"index": index, "expert": "high", **plain, **rest, **fields}


def begin(run, **fields):
    plain = {"prompt_id": "p", "node": "7", "shown_at": "7", "steps": 2, "switch_step": 1, "at": 0}
    plain |= {"run": run, "experts": ["high", "low"], "predicted": None, "workflow": None}
    return "wanstream.begin", {**plain, **fields}


def step(run, done):
    return "wanstream.step", {"run": run, "done": done, "total": 2, "record": record(done - 1)}


def end(run):
    timeline = {"steps": [record(0), record(1)], "changes": []}
    return "wanstream.end", {"run": run, "timeline": timeline, "predicted": None, "error": None}


def snapshot_of(*runs, known=()):
    return "snapshot", {"runs": list(runs), "known": list(known)}


def test_words_are_those_of_reports(modules):
    sizes = [0, 999, 1000, 9996, 99_960, 999_600, 702_800_000, 57_123_456_789, 3.2e15]
    for name, python, values in (
        ("sizeText", format_size, sizes),
        ("rateText", format_rate, [0, 12_345_678_901]),
        ("shareText", format_share, [0, 0.1234, 1]),
        ("secondsText", lambda value: f"{format_seconds(value)} s", [0, 0.01234, 1.234, 123.4]),
    ):
        shown = [modules.call("figures", name, value) for value in values]
        assert shown == [python(value) for value in values]
    clocks = [modules.call("figures", "clockText", value) for value in (0, 59.6, 156, 3756)]
    assert clocks == ["0:00", "1:00", "2:36", "1:02:36"]


def test_sums_rates_and_peaks_are_those_of_a_timeline(modules):
    found = modules.call("figures", "totals", [record(), record(device_bytes=9, rss_bytes=3)])
    assert (found["wall_s"], found["stall_s"], found["bytes_moved"]) == (4.0, 1.0, 200)
    assert (found["copy_bytes_per_s"], found["read_bytes_per_s"]) == (25.0, 25.0)
    assert found["overlap"] == 1 - 1 / 8
    assert (found["device_bytes"], found["rss_bytes"]) == (9, 7)
    still = modules.call("figures", "totals", [record(copy_s=0, read_s=0)])
    assert (still["copy_bytes_per_s"], still["overlap"]) == (None, None)


def test_run_grows_step_by_step(modules):
    events = [begin("r"), step("r", 1)]
    run = modules.run(*events)
    assert ([each["index"] for each in run["records"]], run["ended"]) == ([0], False)
    ended = modules.run(*events, step("r", 2), end("r"))
    assert (ended["ended"], ended["error"], len(ended["timeline"]["steps"])) == (True, None, 2)
    state = modules.state(*events)
    for ignored in (step("r", 1), step("r", 3)):
        assert modules.state(*events, ignored) == state
    assert modules.call("store", "leavesGap", state, step("r", 3)[1])
    assert modules.call("store", "leavesGap", state, step("other", 1)[1])
    assert not modules.call("store", "leavesGap", state, step("r", 2)[1])
    runs = modules.state(*[begin(str(number)) for number in range(60)])["runs"]
    assert [run["run"] for run in runs] == [str(number) for number in range(10, 60)]


def test_progress_within_a_step_belongs_to_that_step(modules):
    def visits(step, done):
        return "wanstream.visits", {"run": "r", "step": step, "done": done, "total": 40}

    def shown(now, *events):
        return str(modules.call("figures", "runText", modules.run(*events), now))

    begun = (*begin("r"), 10.0)
    waits = "0:41 elapsed · first step reads the weights"
    assert shown(51.0, begun) == f"step 0/2 · {waits}"
    assert shown(51.0, begun, visits(0, 12)) == f"block 12/40 · {waits}"
    first = (*step("r", 1), 60.0)
    words = "step 1/2 · 2.00 s/step · 0:01 left · 0:51 elapsed · stall"
    assert shown(61.0, begun, first, visits(0, 40)).startswith(words)
    run = modules.run(begun, first, visits(0, 40), visits(1, 10))
    assert modules.call("figures", "shareOfStep", run) == 0.25
    late = {**begin("r")[1], "records": [], "age_s": 30.0, "visits": None}
    assert modules.run((*snapshot_of(late), 100.0))["since"] == 70.0


def notices(node, *found, workflow="here"):
    told = {"node": node, "workflow": workflow, "type": "A", "notices": found}
    return "wanstream.notices", told


def notice(text, level="wrong", **values):
    return {"text": text, "level": level, "values": values, "exchange": None}


BY_ID = """const { noticesById, ordered } = await load('notices')
    return [...noticesById(stateOf(events), 'here')]
        .map(([id, found]) => [id, ...ordered(found).map(each => each.text)])"""


def test_notices_are_those_of_the_last_time_that_a_node_ran(modules):
    by_id = partial(modules.with_events, BY_ID)
    told = [
        notices("7", notice("one", "note"), notice("two", "warning"), notice("three")),
        notices("8", notice("four")),
    ]
    assert by_id(*told) == [["7", "three", "two", "one"], ["8", "four"]]
    assert by_id(*told, notices("7"), notices("8", notice("five"))) == [["8", "five"]]
    assert by_id(*told, notices("8", workflow="there")) == by_id(*told)
    running = [*told, begin("r", changes=["chosen"], node="9")]
    assert by_id(*running) == [["7", "three", "two", "one", "chosen"], ["8", "four"]]
    ended = by_id(*running, end("r"))
    assert ended[0] == ["7", "three", "two", "one"], "the timeline has all of them"


def test_notice_applies_to_the_file_that_the_server_took(modules):
    def applies(value, widget, *files, linked=False):
        named = {"name": "file", "value": widget, "options": {"values": list(files)}}
        inputs = [{"widget": {"name": "file"}, "link": 7}] if linked else []
        node = {"widgets": [named], "inputs": inputs}
        return modules.call("notices", "applies", {"values": {"file": value}}, node)

    files = ["sub/a", "b"]
    assert applies("sub/a", "sub/a", *files)
    assert not applies("sub/a", "b", *files)
    assert applies("sub/a", "b", *files, linked=True)
    assert applies("sub/a", "sub\\a", *files)
    assert applies("sub/a", "link/a", *files), "by a link"
    assert not applies("c", "sub\\a", *files), "not listed"
    assert applies(4, 4)
    assert not applies(4, 1)


NODES_WITH_NOTICES = """const { NoticeStrips } = await load('notices')
    const nodes = [[{ comfyClass: 'A' }, ['7']], [{ comfyClass: 'B' }, ['8']]]
    const strips = new NoticeStrips({ nodes: () => nodes, workflow: () => 'here' })
    return [...strips.current(stateOf(events))]
        .map(([node, found]) => [node.comfyClass, ...found.map(each => each.text)])"""


def test_notice_of_another_client_is_for_nodes_of_its_class(modules):
    told = [notices(node, notice(node), workflow="") for node in ("7", "8")]
    assert modules.with_events(NODES_WITH_NOTICES, *told) == [["A", "7"]]
    assert modules.call("notices", "applies", {**notice("x"), "type": "A"}, {"comfyClass": "A"})


HEIGHT_WITHOUT_CHART = f"""async enlarged => {{ {LOAD}
    const {{ RunWidget }} = await load('run_widget')
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


def test_node_gives_back_the_room_of_its_chart_alone(modules):
    assert [modules.evaluate(HEIGHT_WITHOUT_CHART, more) for more in (0, 70)] == [100, 170]


PICTURE = "data:image/webp;base64,AAAA"


def preview(run, image=PICTURE, done=1):
    return "wanstream.preview", {"run": run, "image": image, "done": done}


def test_run_has_its_last_preview(modules):
    events = [begin("r"), step("r", 1), preview("r"), step("r", 2)]
    events += [preview("r", f"{PICTURE}BBBB", 2), end("r")]
    assert modules.run(*events)["preview"] == {"image": f"{PICTURE}BBBB", "done": 2}
    assert modules.run(*events, begin("r"))["preview"] is None, "a run that begins has none"
    without = modules.state(begin("r"))
    assert modules.state(begin("r"), preview("unknown")) == without
    for address in ("https://example.com/a.webp", "data:text/html,<script>", "javascript:a()", ""):
        assert modules.state(begin("r"), preview("r", address)) == without


def test_snapshot_fills_gaps_and_takes_nothing_back(modules):
    def snapshot(*, ended):
        more = {"records": [record(0)], "ended": ended, "timeline": None, "error": None}
        return snapshot_of({**begin("r")[1], **more}, known=["r"])

    one = step("r", 1)
    two = step("r", 2)
    for before, count in (([], 1), ([begin("r")], 1), ([begin("r"), one, two], 2)):
        assert len(modules.run(*before, snapshot(ended=False))["records"]) == count
    after_a_reload = modules.run(snapshot(ended=False), two)
    assert (len(after_a_reload["records"]), after_a_reload["ended"]) == (2, False)
    assert modules.run(begin("r"), end("r"), snapshot(ended=False))["ended"]
    run = modules.run(begin("r"), preview("r"), snapshot(ended=True))
    assert (run["ended"], run["preview"]["image"]) == (True, PICTURE)
    lost = modules.run(begin("r"), one, snapshot_of(known=["r"]))
    assert (lost["ended"], lost["error"]) == (True, "the server was restarted")
    # The run begins while an older answer is on its way.
    begun = [begin("old"), end("old"), begin("r"), one, snapshot_of(known=["old"])]
    runs = modules.state(*begun)["runs"]
    found = [(run["run"], run["ended"], run["error"], len(run["records"])) for run in runs]
    assert found == [("old", True, None, 0), ("r", False, None, 1)]


def item(event, now=0.0, **payload):
    """A ComfyUI event about the queue item "p"."""
    return event, {"prompt_id": "p", **payload}, now


def parts(now, **states):
    """The states of all begun parts of nodes.

    "a.1" is a part of "a", as if expanded from it.
    """
    names = {name.replace("_", "."): state for name, state in states.items()}
    nodes = {
        name: {"state": state, "display_node_id": name.split(".")[0]}
        for name, state in names.items()
    }
    return item("progress_state", now, nodes=nodes)


GRAPH_OF_P = item("graph", workflow="here", nodes={each.lower(): node(each) for each in "ABC"})
STARTED = (item("execution_start"), GRAPH_OF_P)


def figures_of(modules, events, now):
    """The figures for each node in the item "p"."""
    found = modules.call("store", "lastItem", modules.state(*events), "here")
    return {
        key: found and modules.call("graph_ids", "figuresAt", found, [key], key.upper(), now)
        for key in "abc"
    }


def test_node_takes_the_time_between_its_events(modules):
    events = [*STARTED, parts(1.0, a="running"), parts(2.5, a="running")]
    figures = figures_of(modules, events, 3.0)
    first = figures["a"]
    assert (first["seconds"], first["running"], first["ran"]) == (2.0, True, True)
    assert figures["b"] is None, "it may still run"
    for event in ("execution_error", "execution_interrupted"):
        figures = figures_of(modules, [*events, item(event, 3.0)], 99.0)
        assert (figures["a"]["seconds"], figures["a"]["running"]) == (2.0, False)
        assert not figures["b"]["ran"]
    # The error of a blocked node ends no item.
    blocked = [*events, item("execution_error", 2.7), parts(3.0, a="finished", b="running")]
    figures = figures_of(modules, blocked, 5.0)
    assert (figures["b"]["seconds"], figures["b"]["running"], figures["c"]) == (2.0, True, None)
    events += [parts(4.0, a="finished"), parts(5.0, a="finished", b="running")]
    figures = figures_of(modules, [*events, item("execution_success", 7.0)], 99.0)
    found = [(figures[key]["seconds"], figures[key]["running"]) for key in "ab"]
    assert found == [(3.0, False), (2.0, False)]
    assert (figures["c"]["ran"], figures["c"]["cached"]) == (False, False), "not run"


def test_phases_of_an_item_add_up_to_the_whole_time(modules):
    """Two samplers. The second one begins 0.5 s after the first one."""
    runs = [
        (*begin("x"), 3.0), (*step("x", 1), 4.0), (*step("x", 2), 6.0), (*end("x"), 6.1),
        (*begin("y"), 6.5), (*step("y", 1), 7.5), (*end("y"), 7.6),
    ]  # fmt: skip
    events = [item("execution_start", 1.0), *runs]
    over = item("execution_success", 9.0)
    for unknown in (events, [*runs, over]):
        assert modules.call("store", "itemPhases", modules.state(*unknown), "p") is None
    phases = modules.call("store", "itemPhases", modules.state(*events, over), "p")
    assert phases == {"total": 8.0, "before": 2.0, "steps": 4.0, "after": 2.0}
    words = "Queue to file 8.00 s: 2.00 s before the steps, 4.00 s in them, 2.00 s after"
    assert modules.call("figures", "phasesText", phases) == words


def test_node_runs_while_any_of_its_parts_does(modules):
    events = [*STARTED, parts(1.0, a="running"), parts(2.0, a="running", a_1="running")]
    events += [parts(3.0, a="running", a_1="finished"), parts(5.0, a="finished", a_1="finished")]
    assert figures_of(modules, events, 9.0)["a"]["seconds"] == 4.0
    events += [parts(6.0, a="finished", a_1="finished", a_2="running")]
    assert figures_of(modules, events, 7.0)["a"]["seconds"] == 5.0
    cached = [*STARTED, item("execution_cached", nodes=["a"]), parts(1.0, a="finished")]
    figures = figures_of(modules, cached, 2.0)
    assert (figures["a"]["cached"], figures["a"]["ran"]) == (True, False)


def test_only_measured_times_are_shown(modules):
    seen_from_the_middle = [parts(1.0, a="running"), parts(2.0, a="finished")]
    over = item("execution_success", 3.0)
    lost = ("reconnecting", {})
    assert modules.state(*seen_from_the_middle, over, GRAPH_OF_P)["items"] == []
    disconnected = [*STARTED, parts(1.0, a="running"), lost, parts(9.0, a="finished")]
    assert modules.state(*disconnected)["items"] == []
    assert len(modules.state(*STARTED, over, lost)["items"]) == 1
    # An item is of no graph before its own is known.
    begun = [item("execution_start"), parts(1.0, a="running")]
    assert modules.call("store", "lastItem", modules.state(*begun), "here") is None
    state = modules.state(*begun, GRAPH_OF_P)
    assert modules.call("store", "lastItem", state, "here")["times"]["a"]["since"] == 1.0
    assert modules.call("store", "lastItem", state, "elsewhere") is None


def test_progress_bar_event_changes_nothing(modules):
    same = """const before = stateOf(events.slice(0, -1))
        return after(before, ...events.at(-1)) === before"""
    events = [item("execution_start"), parts(1.0, a="running"), parts(2.0, a="running")]
    assert modules.with_events(same, *events)


def test_runs_are_found_by_node_and_graph(modules):
    events = [begin("a", workflow="here", node="5:2"), begin("b", workflow="there"), step("a", 1)]
    events += [begin("c", node="52", shown_at="8", workflow="here")]
    events += [begin("before", prompt_id="o", node="5:2", shown_at="3")]
    state = modules.state(*events)

    def last(workflow, node_id):
        found = modules.call("store", "lastRun", state, workflow, [node_id])
        return found and found["run"]

    assert [last("here", node_id) for node_id in ("7", "8", "52", "1")] == ["a", "c", "c", None]
    assert [last(workflow, "7") for workflow in ("there", "another")] == ["b", None]
    keys = ("5", "5:2", "52", "2")
    counts = [len(modules.call("store", "recordsAt", state, "p", [key])) for key in keys]
    assert counts == [1, 1, 0, 0]
    most = modules.call("figures", "mostMemory", [record(), record(rss_bytes=9)])
    assert most == {"kind": "RAM", "bytes": 9}
    assert modules.call("figures", "mostMemory", []) is None


def ranked(node, name):
    return {node: {"wanstream_ranking": [{"name": name}]}}


def test_rankings_belong_to_a_node_in_a_graph(modules):
    def last(*events, node="7", workflow="here"):
        found = modules.call("store", "lastRanking", modules.state(*events), workflow, [node])
        return found and found[0]["name"]

    def entry(workflow, outputs):
        extra = {"extra_pnginfo": {"workflow": {"id": workflow}}} if workflow else {}
        return {"prompt": [1, "id", {}, extra, []], "outputs": outputs}

    (output,) = ranked("7", "live").values()
    live = item("executed", node="7", output=output)
    assert last(live, STARTED[0]) is None, "of no graph until its own is known"
    for events in ((*STARTED, live), (STARTED[0], live, GRAPH_OF_P), (live, GRAPH_OF_P)):
        assert last(*events) == "live"
        assert [last(*events, node="8"), last(*events, workflow="there")] == [None, None]
    entries = {
        "o": entry("here", {**ranked("7", "old"), **ranked("8", "other")}),
        "api": entry(None, ranked("7", "posted")),
        "none": None,
        "empty": {"outputs": {"7": None}},
        "short": {**entry("here", ranked("7", "short")), "prompt": []},
    }
    past = "history", entries
    assert [last(past), last(past, node="8")] == ["old", "other"]
    assert last(*STARTED, live, past) == "live", "it still runs"
    entries["p"] = entry("here", ranked("7", "live"))
    entries["q"] = entry("here", ranked("7", "later"))
    assert last(live, past) == "later"


def test_figures_of_a_subgraph_are_those_of_its_nodes(modules):
    classes = {"1": "A", "5:1": "A", "5:2:1": "B", "5:3": "C", "51": "A"}
    times = {"5:1": {"seconds": 1.0, "since": None}, "5:2:1": {"seconds": 0.0, "since": 8.0}}
    times["51"] = {"seconds": 100.0, "since": None}
    found = {"classes": classes, "times": times, "cached": ["5:3"], "running": True}

    def figures(key, class_type="a subgraph's own type"):
        return modules.call("graph_ids", "figuresAt", found, [key], class_type, 10.0)

    assert figures("5") == {"seconds": 3.0, "running": True, "ran": True, "cached": False}
    assert figures("5:2:1", "B")["seconds"] == 2.0
    assert figures("51", "B") is None, "another graph's node"
    assert figures("1", "A") is None
    found |= {"cached": ["5:1", "5:2:1", "5:3"], "times": {}}
    assert figures("5")["cached"]
    found |= {"cached": ["5:1"], "running": False}
    assert figures("5") == {"seconds": 0, "running": False, "ran": False, "cached": False}


def run_of(count, measured):
    experts = ["high"] * (count // 2) + ["low"] * (count - count // 2)
    records = [record(number, expert=experts[number]) for number in range(measured)]
    begun = begin("r", steps=count, experts=experts, switch_step=count // 2)[1]
    return {**begun, "ended": False, "error": None, "records": records, "timeline": None}


def test_every_step_has_its_place_in_a_bar(modules):
    columns = modules.call("chart", "columnsOf", run_of(8, 3), 400)
    ends = [(column["first"], column["last"]) for column in columns]
    assert ends == [(step, step) for step in range(8)]
    assert [column["measured"] is not None for column in columns] == [True] * 3 + [False] * 5
    assert [column["expert"] for column in columns] == ["high"] * 4 + ["low"] * 4
    # Of many steps, a bar is the mean of some.
    columns = modules.call("chart", "columnsOf", run_of(1000, 1000), 300)
    assert len(columns) <= 100
    lasts = [column["last"] for column in columns]
    assert [column["first"] for column in columns] == [0, *(last + 1 for last in lasts[:-1])]
    assert lasts[-1] == 999
    assert columns[0]["measured"]["wall"] == 2.0
    nothing = {**run_of(2, 0), "steps": 0, "experts": [], "switch_step": None}
    for run in (run_of(2, 0), nothing):
        assert modules.chart(run)[0] == "svg"


def test_longest_bar_fills_the_plot(modules):
    run = run_of(4, 4)
    run["records"][1] |= {"skipped_visits": 39, "skipped_lanes": 2}
    run["records"][2] |= {"wall_s": 8.0, "compute_s": 6.0}
    run["predicted"] = {"steps": [record(wall_s=4.0)] * 4}
    parts = modules.chart(run, chosen=1)[2:]
    frame = modules.call("chart", "frameOf", 400, 150, 11, 4)
    plot = frame["bottom"] - frame["top"]
    bars = [[rect[1] for rect in part[2:]] for part in parts if "data-wall" in part[1]]
    heights = [sum(rect["height"] for rect in bar) for bar in bars]
    assert heights == pytest.approx([plot / 4, plot / 4, plot, plot / 4])
    compute, rest, stalled = bars[2]
    assert compute["y"] + compute["height"] == pytest.approx(frame["bottom"])
    assert rest["y"] + rest["height"] == pytest.approx(compute["y"])
    assert stalled["y"] + stalled["height"] == pytest.approx(rest["y"])
    assert stalled["y"] == pytest.approx(frame["top"])
    outlines = [part[1] for part in parts if part[1].get("class") == "wanstream-predicted"]
    assert [outline["height"] for outline in outlines] == pytest.approx([plot / 2] * 4)
    (mark,) = (part[1] for part in parts if part[1].get("class") == "wanstream-cached")
    assert mark["data-left-out"] == 39
    assert mark["x"] == pytest.approx(frame["left"] + frame["step"])
    message = modules.call("figures", "stepText", run["records"][1], None)
    assert "39 blocks skipped by a cache" in message
    assert "skipped" not in modules.call("figures", "stepText", run["records"][0], None)


def test_memory_samples_lie_where_their_steps_are(modules):
    run = run_of(4, 0)
    steps = [record(number, start_s=10.0 + 2 * number) for number in range(4)]
    at = {9.0: 1, 10.0: 5, 13.0: 6, 17.5: 900, 18.0: 1}
    memory = [{"at_s": at_s, "device_bytes": None, "rss_bytes": size} for at_s, size in at.items()]
    run |= {"ended": True, "timeline": {"steps": steps, "memory": memory, "changes": []}}
    columns = modules.call("chart", "columnsOf", run, 400)
    assert modules.call("chart", "samplesOf", run, columns) == [[0, 5], [1.5, 6], [3.75, 900]]
    live = modules.call("chart", "samplesOf", run_of(4, 4), columns)
    assert live == [], "a run that goes on has none yet"
    steps[1]["start_s"] = None  # as in old timelines
    assert len(modules.call("chart", "samplesOf", run, columns)) <= 3
    parts = modules.chart(run)[2:]
    (drawn,) = (part[2:] for part in parts if part[1].get("class") == "wanstream-memory")
    (line,) = (part[1] for part in drawn if "data-samples" in part[1])
    heights = [float(point.split(",")[1]) for point in line["points"].split()]
    assert min(heights) >= 11, "no sample lies above the plot"


TEXTS = f"() => import('/extensions/{PACK}/overlay/i18n.mjs').then(module => module.TEXTS)"


def test_both_languages_have_all_words_and_values(modules):
    english, chinese = (modules.evaluate(TEXTS)[language] for language in ("en", "zh"))
    assert english.keys() == chinese.keys()
    for key, words in english.items():
        places = [sorted(re.findall(r"\{\d\}", text)) for text in (words, chinese[key])]
        assert places[0] == places[1], key
        assert re.search(r"[\u4e00-\u9fff]", chinese[key]), key


def steps_of(*seconds, **fields):
    return [record(number, wall_s=wall, **fields) for number, wall in enumerate(seconds)]


SETTINGS = {"size": "832x480x81", "dtype": "bf16", "policy": "layerwise, 1 ahead", "lora": ""}
SETTINGS |= {"workers": None, "device_total": 25_300_000_000, "ram_total": 17_180_000_000}


def test_live_line_has_step_pace_and_time_left(modules):
    run = {**run_of(20, 0), "settings": SETTINGS, "since": 10.0, "stepAt": 100.0}
    run["records"] = steps_of(*[12.4] * 7, stall_s=0.0, rss_bytes=1_120_000_000)

    def text(now=100.0):
        return str(modules.call("figures", "runText", run, now))

    begun = "step 7/20 · 12.4 s/step · 2:41 left · 1:30 elapsed"
    assert text() == f"{begun} · 1.12 of 17.2 GB RAM"
    assert "· 2:36 left ·" in text(105.0), "it falls between two steps"
    assert "· 0:00 left ·" in text(600.0)
    run["records"] = steps_of(*[12.4] * 7, stall_s=1.5, device_bytes=6_930_000_000)
    assert text() == f"{begun} · stall 10.50 s · 6.93 of 25.3 GB VRAM"
    run["settings"] = None
    assert text().endswith(" · VRAM 6.93 GB"), "a machine that is not known"
    run |= {"ended": True, "records": steps_of(*[90.0] * 4, stall_s=0.4)}
    assert text() == "4 steps in 6:00 · 90.0 s/step · RAM 7 B"
    run["records"] = steps_of(0.5, 0.5, stall_s=0.1)
    assert text() == "2 steps in 1.00 s · 0.500 s/step · stall 0.200 s · RAM 7 B"


def test_share_of_the_limit_is_that_of_reports(modules):
    def timeline_of(records):
        steps = [{"sigma": None, **step} for step in records]
        return Timeline.from_dict({"kind": "simulated", "steps": steps})

    records = [record(0, skipped_lanes=1), record(1, compute_s=2.0), record(2, compute_s=1.0)]
    limits = [record(number, limit_s=limit_s) for number, limit_s in enumerate((0.9, 1.6, 0.5))]
    run = {**run_of(3, 0), "ended": True, "records": records, "predicted": {"steps": limits}}
    share = modules.call("figures", "limitShare", run)
    assert share == limit_share(timeline_of(records), timeline_of(limits)) == pytest.approx(0.7)
    assert "· 70.0 % of the device's limit ·" in modules.call("figures", "runText", run)
    figures = modules.call("figures", "figuresOf", run)
    (cell,) = (each for each in figures if each["name"] == "of limit")
    assert (cell["head"], cell["text"]) == ("of limit", "70.0 %")
    for predicted in (None, {"steps": [record(number) for number in range(3)]}):
        assert modules.call("figures", "limitShare", {**run, "predicted": predicted}) is None


def test_time_left_follows_last_steps_and_prediction(modules):
    def left(*seconds, **fields):
        run = {**run_of(10, 0), "records": steps_of(*seconds), **fields}
        return modules.call("figures", "secondsLeft", run)

    assert left() is None
    assert left(30.0) == pytest.approx(270), "the first step is all that is known"
    assert left(30.0, 2.0, 2.0) == pytest.approx(14), "in the first step, weights are read"
    switched = left(9.0, 9.0, 9.0, 2.0, 2.0, 2.0, 2.0, 2.0)
    assert switched == pytest.approx(4), "the low expert has its own pace"
    predicted = {"steps": steps_of(*[1.0] * 5, *[3.0] * 5)}
    assert left(predicted=predicted) == pytest.approx(20)
    slower = left(9.0, 2.0, 2.0, 2.0, predicted=predicted)
    assert slower == pytest.approx(2 * (1 + 15)), "twice as slow as predicted"
    assert left(*[1.0] * 10) is None
    assert left(1.0, ended=True) is None


VERDICT = f"""async records => {{ {LOAD}
    const {{ verdictText, waitOf }} = await load('figures')
    return records.map(([stall_s, stall_on_read_s, gain]) => {{
        const first = {{ wall_s: 90, stall_s: 80, stall_on_read_s: 80 }}
        const second = {{ wall_s: 10, stall_s, stall_on_read_s }}
        return verdictText(waitOf({{ records: [first, second] }}), gain && {{ gain }})
    }})
}}"""


def test_verdict_names_the_disk_the_bus_or_computing(modules):
    disk, bus, most, compute = modules.evaluate(VERDICT, [[6, 5], [2, 1], [10, 10], [0.3, 0]])
    assert disk.startswith("Waits 50 % for the disk. More blocks ")
    assert disk.endswith(" up to 2.0 × as fast.")
    assert bus.startswith("Waits 20 % for the bus. More blocks ")
    assert bus.endswith(" up to 1.3 × as fast.")
    assert most.endswith(" up to 100.0 × as fast."), "a finite number"
    assert compute == "Limited by computing: 3.0 % of the time waits for weights."
    # A simulated gain takes the place of the most possible one.
    disk, bus, best = modules.evaluate(VERDICT, [[6, 5, 1.52], [2, 1, 1.06], [2, 1, 1.04]])
    assert disk == "Waits 50 % for the disk. Auto policy: 1.5 × as fast, simulated."
    assert bus == "Waits 20 % for the bus. Auto policy: 1.1 × as fast, simulated."
    assert best == "Waits 20 % for the bus. In the free memory no policy is faster."


def cells_of(part, tag):
    """The texts in all elements with this tag, in depth."""
    if not isinstance(part, list):
        return []
    is_text = part[0] == tag and not isinstance(part[-1], list)
    own = (part[2:3] or [""]) if is_text else []
    return own + [text for child in part[2:] for text in cells_of(child, tag)]


TABLE = f"""async runs => {{ {LOAD}
    const {{ comparisonOf, csvOf, tableOf }} = await load('runs_table')
    return [tableOf(runs, {{ ticked: new Set(), onTick: null }}), comparisonOf(runs), csvOf(runs)]
}}"""


def test_rows_of_the_table_differ_by_their_settings(modules):
    one = {**run_of(2, 2), "title": "Sampler", "settings": SETTINGS}
    changes = {"size": "1280x720x81", "lora": "fast 1", "dtype": "fp16"}
    other = {**one, "settings": {**SETTINGS, **changes}}
    table, comparison, exported = modules.evaluate(TABLE, [one, other])
    heads = ["time", "node", "size", "dtype", "policy", "LoRA", "steps"]
    assert cells_of(table, "th")[1:8] == heads
    cells = cells_of(table, "td")
    assert {"832x480x81", "1280x720x81", "bf16", "fp16", "layerwise, 1 ahead", "fast 1"} <= {*cells}
    assert cells_of(comparison, "td")[:2] == ["832x480x81", "1280x720x81"]
    head, first, _, _ = exported.split("\n")
    assert head.startswith("run,prompt_id,at,node,size,dtype,policy,lora,workers,steps,")
    assert '"832x480x81","bf16","layerwise, 1 ahead","",""' in first
    table, _, _ = modules.evaluate(TABLE, [{**one, "settings": None}])
    assert "size" not in cells_of(table, "th"), "of runs from before, nothing is known"


def test_comparison_has_ratios_where_figures_differ(modules):
    one = {**run_of(2, 2), "title": "Sampler", "settings": SETTINGS}
    other = {**one, "records": steps_of(3.0, 3.0)}
    refused = {**one, "records": [], "ended": True, "error": "needs 9.3 GB"}
    table, comparison, exported = modules.evaluate(TABLE, [one, other, refused])
    compared = [row for row in comparison[3][2:] if "data-figure" in row[1]]
    rows = {row[1]["data-figure"]: cells_of(row, "td") for row in compared}
    assert rows["steps"] == ["2", "2", "-"]
    assert rows["wall"] == ["4.00 s", "6.00 s (1.50 x)", "-"]
    assert rows["moved"] == ["200 B", "200 B", "-"]
    found = modules.call("runs_table", "fastestText", [other, one, refused])
    assert found.startswith("Fastest: ")
    words = " Sampler, 2.00 s/step. The next one takes 1.50 × as long, with 1.00 × the memory."
    assert found.endswith(words)
    assert modules.call("runs_table", "fastestText", [one, refused]) == ""
    first, *_ = table[3][2:]
    figures = [cell[2] for cell in first[2:] if "data-figure" in cell[1]]
    assert {*figures} == {"-"}, "the last run was refused before its first step"
    assert not {"moved at", "read at"} & {*cells_of(table, "th")}
    assert exported.split("\n")[3].endswith(',,,,,,,,,,,,,"0 of 2 steps: needs 9.3 GB"')
    assert modules.call("figures", "runText", refused, 1.0) == "0 of 2 steps: needs 9.3 GB"


def test_exported_texts_are_never_formulas(modules):
    formulas = ["=HYPERLINK(1)", "+cmd", "-cmd", "@SUM(1)", "\t=1", "\r=1", " =1", "\ufeff@x"]
    formulas += ["\uff1d1", "\uff0bcmd", "\uff0dcmd", "\uff20cmd", "\u2212cmd", '=a"b']
    texts = [*formulas, "-12.5", "a=b"]
    run = {**run_of(2, 2), "settings": SETTINGS}
    runs = [{**run, "title": text, "prompt_id": text} for text in texts]
    rows = csv.DictReader(io.StringIO(modules.evaluate(TABLE, runs)[2], newline=""))
    found = [(row["node"], row["prompt_id"]) for row in rows]
    exported = [f"'{text}" for text in formulas] + ["-12.5", "a=b"]
    assert found == [(text, text) for text in exported]


def test_badge_has_time_and_memory_or_why_it_did_not_run(modules):
    known = {"seconds": 1.0, "ran": True, "cached": False, "memory": {"kind": "VRAM", "bytes": 7e9}}
    for figures, words in (
        ({"seconds": 0.0}, "< 0.1 s · 7.00 GB VRAM"),
        ({"seconds": 0.04, "memory": None}, "< 0.1 s"),
        ({"seconds": 0.12, "memory": {"kind": "RAM", "bytes": 8e6}}, "0.1 s · 8.00 MB RAM"),
        ({"ran": False, "cached": True}, "cached"),
        ({"ran": False, "cached": False}, "not run"),
    ):
        assert modules.call("badges", "badgeText", {**known, **figures}) == words


MADE = f"""async ([tag, attributes, child]) => {{ {LOAD}
    const {{ element, h }} = await load('dom')
    try {{ return element(h(tag, attributes, child)).outerHTML }}
    catch (error) {{ return `${{error}}` }}
}}"""


PLANTED = ["img", {"onerror": 1}]


@pytest.mark.parametrize(
    ("tag", "attributes", "child", "made"),
    [
        ("td", {}, PLANTED, '<td>["img",{"onerror":1}]</td>'),
        ("td", {}, [PLANTED], '<td>[["img",{"onerror":1}]]</td>'),
        ("td", {}, {"toString": PLANTED}, '<td>{"toString":["img",{"onerror":1}]}</td>'),
        ("td", {"title": ["b"], "hidden": True}, "", '<td title="[&quot;b&quot;]" hidden=""></td>'),
        ("p", {"class": "plain"}, "<b>", '<p class="plain">&lt;b&gt;</p>'),
        ("img", {"src": "x"}, "", "no element img"),
        ("script", {}, "", "no element script"),
        (["div"], {}, "", "no element"),
        ("div", {"onclick": "window.ran = true"}, "", "onclick would run"),
        ("rect", {"ONLOAD": "window.ran = true"}, "", "ONLOAD would run"),
    ],
)
def test_values_of_a_prompt_become_texts_and_never_elements_or_scripts(
    modules, tag, attributes, child, made
):
    assert made in modules.evaluate(MADE, [tag, attributes, child])
