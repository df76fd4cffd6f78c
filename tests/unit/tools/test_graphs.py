"""Graphs in API format are compared whatever their ids."""

import pytest

from wanstream.tools.graphs import by_name, links_of, numbered


def node(title, **inputs):
    return {"class_type": "Node", "_meta": {"title": title}, "inputs": inputs}


GRAPH = {"a": node("A", size=3), "c": node("C", one=["a", 1], two=["b", 0]), "b": node("B", size=3)}


def test_numbers_follow_the_file_and_links_follow_the_numbers():
    renamed = numbered(GRAPH)
    assert list(renamed) == ["1", "2", "3"]
    assert renamed["2"]["inputs"] == {"one": ["1", 1], "two": ["3", 0]}
    assert renamed["1"]["inputs"] == {"size": 3}
    assert GRAPH["c"]["inputs"]["one"] == ["a", 1]


def test_graph_under_other_ids_is_the_same():
    assert by_name({key: numbered(GRAPH)[key] for key in ("3", "1", "2")}) == by_name(GRAPH)


@pytest.mark.parametrize(
    "other",
    [
        {**GRAPH, "a": node("A", size=4)},
        {**GRAPH, "a": {**node("A", size=3), "class_type": "Other"}},
        {**GRAPH, "c": node("C", one=["b", 1], two=["a", 0])},
        {**GRAPH, "c": node("C", one=["a", 0], two=["b", 0])},
        {**GRAPH, "c": node("C", one=["a", 1])},
        {**GRAPH, "d": node("D")},
    ],
    ids=["value", "class", "links crossed", "output", "link missing", "one node more"],
)
def test_another_graph_is_not(other):
    assert by_name(other) != by_name(GRAPH)


def test_titles_must_tell_nodes_apart():
    # The class is enough for one node of it.
    assert by_name({"a": node("A")}) == by_name({"a": node("B")})
    with pytest.raises(ValueError, match="share a title"):
        by_name({"a": node("A"), "b": node("A")})


def test_links_are_told_from_constants():
    assert links_of(node("A", one=["b", 0], text="b", size=1)) == {"one": "b"}
