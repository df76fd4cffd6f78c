"""Cluster list: its place, and unreadable lists."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wanstream.host.workers.clusters import VARIABLE, cluster, cluster_names, clusters_file
from wanstream.schema.refs.workers import WorkersError


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A list with one entry."""
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"lab": {"address": "127.0.0.1:6379"}}))
    monkeypatch.setenv(VARIABLE, str(file))
    return file


def test_names_are_those_of_this_machine_and_of_the_list(listed: Path) -> None:
    assert clusters_file() == listed
    assert cluster_names() == ["local", "in-process", "lab"]
    assert cluster("lab").address == "127.0.0.1:6379"
    listed.unlink()
    assert cluster_names() == ["local", "in-process"]


def test_without_the_variable_it_is_in_the_folder_of_the_users_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert clusters_file().parts[-2:] == ("wanstream", "clusters.json")


def test_a_token_file_is_found_from_the_folder_of_the_list(
    listed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers and commands do not share the start folder of this process."""
    home = listed.parent / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))
    monkeypatch.chdir(listed.parent.parent)
    monkeypatch.setenv(VARIABLE, str(listed.relative_to(listed.parent.parent)))
    elsewhere = listed.parent / "elsewhere" / "token"
    for given, found in {
        "tokens/lab": listed.parent / "tokens" / "lab",
        "~/lab": home / "lab",
        str(elsewhere): elsewhere,
        "~nobody-of-that-name/lab": listed.parent / "~nobody-of-that-name" / "lab",
        "": "",
    }.items():
        listed.write_text(json.dumps({"lab": {"address": "127.0.0.1:6379", "token_file": given}}))
        assert cluster("lab").token_file == str(found)


@pytest.mark.parametrize(
    "entry", [{"token_file": "~nobody\0"}, {"token_file": "a\0b"}, {"token_file": "\ud800"}]
)
def test_a_name_that_no_file_can_have_is_refused(listed: Path, entry: dict[str, str]) -> None:
    listed.write_text(json.dumps({"lab": {"address": "127.0.0.1:6379", **entry}}))
    assert cluster_names() == ["local", "in-process"]
    with pytest.raises(
        WorkersError, match=r"token_file is .* remove the characters that no file name can have"
    ):
        cluster("lab")


def test_a_list_with_a_byte_order_mark_is_read(listed: Path) -> None:
    listed.write_text(listed.read_text(), encoding="utf-8-sig")
    assert cluster_names() == ["local", "in-process", "lab"]


def test_a_list_that_cannot_be_read_leaves_this_machine(
    listed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listed.write_bytes(b"\xff{")
    assert cluster_names() == ["local", "in-process"]
    assert "cannot be read" in caplog.text
    assert cluster("local").address == "local"
    with pytest.raises(WorkersError, match=r"mine\.json cannot be read"):
        cluster("lab")
