"""The metadata that the registry requires is complete, and the release checklist names only existing files."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from wanstream.schema.version import VERSION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
CHECKLIST = (ROOT / "docs" / "releasing.md").read_text(encoding="ascii")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
SYSTEMS = {"OS Independent", "Microsoft :: Windows", "POSIX :: Linux", "MacOS"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_registry_has_a_name_a_version_and_a_publisher(project: dict[str, Any]) -> None:
    found, comfy = project["project"], project["tool"]["comfy"]
    assert re.fullmatch(r"[a-z](?:[a-z0-9]|[-_.](?![-_.]))*", found["name"])
    assert "comfyui" not in found["name"].lower()
    assert re.fullmatch(r"\d+\.\d+\.\d+", found["version"])
    assert found["description"].endswith(".")
    assert comfy["PublisherId"]
    assert comfy["DisplayName"] == "WanStream"
    assert {"Icon", "requires-comfyui"} <= comfy.keys()


def test_it_knows_where_the_nodes_run(project: dict[str, Any]) -> None:
    classifiers = [line.split(" :: ", 1) for line in project["project"]["classifiers"]]
    assert {system for kind, system in classifiers if kind == "Operating System"} <= SYSTEMS
    assert ["Environment", "GPU :: NVIDIA CUDA"] in classifiers


def test_the_readme_names_the_comfyui_that_is_asked_for(project: dict[str, Any]) -> None:
    least = project["tool"]["comfy"]["requires-comfyui"].removeprefix(">=")
    assert f"ComfyUI {least} or later" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_icon_is_one_that_the_registry_takes() -> None:
    picture = ElementTree.parse(ROOT / "docs" / "images" / "icon.svg").getroot()
    assert picture.tag.endswith("svg")
    assert picture.get("width") == picture.get("height") == "400"
    assert "docs/images/icon.svg" in CHECKLIST


def test_the_archive_leaves_out_only_what_is_there_and_nothing_that_runs(project: dict[str, Any]) -> None:
    lines = (ROOT / ".comfyignore").read_text(encoding="ascii").splitlines()
    left_out = {line.rstrip("/") for line in lines if line and not line.startswith("#")}
    assert all((ROOT / name).is_dir() for name in left_out)
    rooms = {name.partition(".")[2] for name in project["tool"]["setuptools"]["packages"]}
    assert not left_out & {*rooms, "web", "workflows", "locales"}


def test_every_package_is_installed(project: dict[str, Any]) -> None:
    listed = project["tool"]["setuptools"]["packages"]
    tops = {name.split(".")[1] for name in listed if "." in name}
    folders = {path.parent.relative_to(ROOT) for top in tops for path in (ROOT / top).rglob("*.py")}
    assert sorted(listed) == sorted(["wanstream", *(".".join(("wanstream", *folder.parts)) for folder in folders)])


def test_the_changelog_has_what_is_to_come_and_every_release_once() -> None:
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", CHANGELOG, re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    releases = [version for version, _ in headings[1:]]
    assert all(date for _, date in headings[1:])
    assert len({*releases}) == len(releases)
    assert not releases or releases[0] == VERSION, "the newest release is this version"


def test_the_checklist_names_only_what_exists(project: dict[str, Any]) -> None:
    """A word in code with a slash or a known ending is a file or a folder of the checkout."""
    named = set(re.findall(r"`([\w./-]+)`", CHECKLIST))
    files = {name for name in named if "/" in name or name.endswith((".md", ".toml", ".py"))} - {"custom_nodes/"}
    assert {"pyproject.toml", "schema/version.py", ".ci/run", "scripts/demo"} <= files
    for name in files:
        assert (ROOT / name).exists(), name
    for script in re.findall(r"`(scripts/\w+)", CHECKLIST):
        assert (ROOT / script).is_file(), script
    for key in ("PublisherId", "Icon", "requires-comfyui"):
        assert f"`{key}`" in CHECKLIST
        assert key in project["tool"]["comfy"]
