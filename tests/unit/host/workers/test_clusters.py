"""Cluster list: its place, and unreadable lists."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from wanstream.host.workers.clusters import VARIABLE, cluster, cluster_names, clusters_file
from wanstream.schema.refs.workers import WorkersError

HERE = ["local", "in-process"]


@pytest.fixture
def listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`listed(**more)` writes a list with one entry and returns the path."""
    file = tmp_path / "mine.json"
    monkeypatch.setenv(VARIABLE, str(file))

    def write(encoding: str = "utf-8", **more: str) -> Path:
        entry = {"address": "127.0.0.1:6379", **more}
        file.write_text(json.dumps({"lab": entry}), encoding=encoding)
        return file

    return write


def test_names_are_local_ones_and_the_list(listed, monkeypatch):
    for encoding in ("utf-8", "utf-8-sig"):
        file = listed(encoding)
        assert clusters_file() == file
        assert cluster_names() == [*HERE, "lab"]
    assert cluster("lab").address == "127.0.0.1:6379"
    file.unlink()
    assert cluster_names() == HERE
    monkeypatch.delenv(VARIABLE)
    assert clusters_file().parts[-2:] == ("wanstream", "clusters.json")


def test_token_file_is_found_from_the_folder_of_the_list(listed, tmp_path, monkeypatch):
    """Workers and commands do not share the start folder of this process."""
    home = tmp_path / "home"
    elsewhere = tmp_path / "elsewhere" / "token"
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(home))
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv(VARIABLE, str(Path(tmp_path.name, "mine.json")))
    for given, found in {
        "tokens/lab": tmp_path / "tokens" / "lab",
        "~/lab": home / "lab",
        str(elsewhere): elsewhere,
        "~nobody-of-that-name/lab": tmp_path / "~nobody-of-that-name" / "lab",
        "": "",
    }.items():
        listed(token_file=given)
        assert cluster("lab").token_file == str(found)


def test_unreadable_list_leaves_this_machine(listed, caplog):
    message = r"token_file is .* remove the characters that no file name can have"
    for name in ("~nobody\0", "a\0b", "\ud800"):
        listed(token_file=name)
        assert cluster_names() == HERE
        with pytest.raises(WorkersError, match=message):
            cluster("lab")
    listed().write_bytes(b"\xff{")
    assert cluster_names() == HERE
    assert "cannot be read" in caplog.text
    assert cluster("local").address == "local"
    with pytest.raises(WorkersError, match=r"mine\.json cannot be read"):
        cluster("lab")
