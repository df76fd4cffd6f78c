"""Cluster list: entries, and remote addresses, which need permission and a token."""

import json
from functools import partial

import pytest

from wanstream.distributed.clusters import check_address, cluster_named, read_clusters
from wanstream.schema import is_loopback
from wanstream.schema.refs import PathMap, WorkersError, WorkersRef

one = partial(WorkersRef, count=1)

PLACE = {"address": "192.168.1.5:6379", "token_file": "~/lab"}
LAB = {**PLACE, "remote_machines": True, "path_map": ["/a -> /b"]}
OWN = ["127.0.0.1", "127.8.9.10", "localhost", "::1", "::ffff:127.0.0.1"]
OTHERS = [
    *("192.0.2.7", "rack.example", "localhost.evil.example", "127.evil.example"),
    *("127.0.0.1.evil.example", "127.1", "0x7f.1", "2130706433", "127.0.0.01", "LOCALHOST"),
    *("localhost.", "0.0.0.0", "::", "::ffff:192.0.2.7"),
]


def at(host: str) -> str:
    return f"[{host}]:6379" if ":" in host else f"{host}:6379"


@pytest.mark.parametrize("host", OWN)
def test_localhost_and_loopback_addresses_are_loopback(host):
    assert is_loopback(host)
    check_address(one(address=at(host)))


@pytest.mark.parametrize("host", OTHERS)
def test_lookalikes_of_loopback_need_permission_and_a_token(host):
    assert not is_loopback(host)
    with pytest.raises(WorkersError, match="is another machine: set remote_machines to true"):
        check_address(one(address=at(host), token_file="/token"))
    with pytest.raises(WorkersError, match="is another machine: name the file with the token"):
        check_address(one(address=at(host), beyond_loopback=True))
    check_address(one(address=at(host), beyond_loopback=True, token_file="/token"))


@pytest.mark.parametrize("address", ["local", "in-process"])
def test_workers_of_this_machine_take_no_token_and_no_leave(address):
    check_address(one(address=address))
    for given in ({"beyond_loopback": True}, {"token_file": "/token"}):
        with pytest.raises(WorkersError, match=f"workers at '{address}' listen on 127.0.0.1 only"):
            check_address(one(address=address, **given))


@pytest.mark.parametrize(
    "address",
    [
        *("", "here", ":6379", "host:", "host:port", "host:0", "host:65536", "host:²"),
        *("localhost:012345678", "host:006379", "host:1" + "0" * 5000, "ray://host:1", "a b:1"),
        *("me@host:1", "::1:6379", "[host]:6379", "[::1:6379", "[::1]6379", "[]:1", "[[::1]]:1"),
    ],
)
def test_invalid_addresses_are_refused(address):
    with pytest.raises(WorkersError, match="the address is"):
        check_address(one(address=address, beyond_loopback=True, token_file="/token"))


def test_an_entry_has_an_address_a_token_leave_and_paths():
    found = read_clusters(json.dumps({"lab": LAB, "here": {"address": "[::1]:1"}}), "clusters.json")
    assert list(found) == ["local", "in-process", "lab", "here"]
    paths = (PathMap(here="/a", there="/b"),)
    assert found["lab"] == one(**PLACE, beyond_loopback=True, paths=paths)
    assert cluster_named("here", found, "clusters.json") == one(address="[::1]:1")


@pytest.mark.parametrize("name", ["Lab", "", "192.168.1.5:6379", None, 7, ["lab"], {"lab": 1}])
def test_missing_entry_is_refused_with_known_ones(name):
    found = read_clusters(json.dumps({"lab": LAB}), "clusters.json")
    said = r"there are local, in-process, lab: choose one .* to clusters\.json"
    with pytest.raises(WorkersError, match=said):
        cluster_named(name, found, "clusters.json")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"remote_machines": False}, "another machine: set remote_machines"),
        ({"token_file": ""}, "name the file with the token"),
        ({"remote_machines": "yes"}, "remote_machines is 'yes', and must be a bool"),
        ({"address": 6379}, "address is 6379"),
        ({"address": "local"}, "the address is 'local'"),
        ({"path_map": "/a -> /b"}, "path_map is '/a -> /b', and must be a list"),
        ({"path_map": [7]}, "path_map is a list of lines"),
        ({"path_map": ["/a"]}, "line 1 of the path map"),
        ({"token": "abc"}, "must have address and may have token_file"),
    ],
)
def test_a_bad_entry_is_named(changes, said):
    with pytest.raises(WorkersError, match=r"the entry 'lab' of clusters\.json.*") as refused:
        read_clusters(json.dumps({"lab": {**LAB, **changes}}), "clusters.json")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", "[" * 100_000, '{"local": {"address": "h:1"}}', '{"": {}}', '{"a": 1}'],
)
def test_invalid_lists_of_clusters_are_refused(text):
    with pytest.raises(WorkersError, match=r"clusters\.json"):
        read_clusters(text, "clusters.json")
