"""Complete metadata for the registry, and existing files in the release checklist."""

import ast
import re
import sys
import textwrap
from pathlib import Path, PurePath
from xml.etree import ElementTree

import pytest
import yaml

import wanstream
from wanstream.schema.version import VERSION
from wanstream.tests.support.archive import archived_files
from wanstream.tools.code_counts import SourceTree
from wanstream.tools.registry import PICTURES, ReleaseError, faults, main, release_notes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
CHECKLIST = (ROOT / "docs" / "releasing.md").read_text(encoding="ascii")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
RELEASED = re.sub(r"(?s)(## \[Unreleased\]\n).*?(?=\n## |$)", r"\1", CHANGELOG, count=1)
"""The changelog without changes after the last release."""
REVIEWED = {
    *("subprocess", "socket", "ctypes", "sqlite3", "os.environ", "os.system", "os.popen"),
    *("multiprocessing", "aiohttp", "httpx", "requests", "urllib.request", "http.client"),
}
SYSTEMS = {"OS Independent", "Microsoft :: Windows", "POSIX :: Linux", "MacOS"}


ENDS = {name.rpartition(".")[2] for name in REVIEWED}


@pytest.fixture(scope="module")
def source():
    return SourceTree(ROOT)


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_registry_has_a_name_a_version_and_a_publisher(project):
    found = project["project"]
    comfy = project["tool"]["comfy"]
    assert re.fullmatch(r"[a-z](?:[a-z0-9]|[-_.](?![-_.]))*", found["name"])
    assert "comfyui" not in found["name"].lower()
    assert re.fullmatch(r"\d+\.\d+\.\d+", VERSION)
    assert found["version"] == wanstream.__version__ == VERSION
    assert found["description"].endswith(".")
    assert comfy["PublisherId"]
    assert comfy["DisplayName"] == "WanStream"
    assert "native model" in found["description"]
    assert {"Icon", "Banner", "requires-comfyui"} <= comfy.keys()
    frontend = [name for name in found["dependencies"] if name.startswith("comfyui-frontend-")]
    assert re.fullmatch(r"comfyui-frontend-package>=\d+\.\d+\.\d+", *frontend)
    needs = (ROOT / "requirements.txt").read_text(encoding="ascii").splitlines()
    assert [*needs[1:], *frontend] == found["dependencies"]


def test_it_knows_where_the_nodes_run(project):
    classifiers = [line.split(" :: ", 1) for line in project["project"]["classifiers"]]
    assert {system for kind, system in classifiers if kind == "Operating System"} <= SYSTEMS
    assert ["Environment", "GPU :: NVIDIA CUDA"] in classifiers


def test_readme_names_the_comfyui_that_is_asked_for(project):
    least = project["tool"]["comfy"]["requires-comfyui"].removeprefix(">=")
    assert f"ComfyUI {least} or later" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_pictures_are_ones_that_the_registry_takes():
    for name, sides in (("Icon", (400, 400)), ("Banner", (1680, 720))):
        picture = ElementTree.parse(ROOT / PICTURES[name]).getroot()
        assert picture.tag.endswith("svg")
        assert (int(picture.attrib["width"]), int(picture.attrib["height"])) == sides


def test_archive_has_what_runs_in_comfyui_and_nothing_else(source):
    archive = archived_files()
    imported = source.edges(through_init=False)
    reached: set[str] = set()
    # `__init__.py` imports the first two, and Ray the last one by name.
    waiting = ["host", "nodes", "distributed.ray.worker"]
    while waiting:
        module = waiting.pop()
        if module and module not in reached:
            reached.add(module)
            waiting += [*imported[module], module.rpartition(".")[0]]
    runs = {source.modules[module].relative_to(ROOT).as_posix() for module in reached}
    assert {name for name in archive if name.endswith(".py")} == {"__init__.py", *runs}
    other = {name for name in archive if not name.endswith(".py")}
    served = {name for name in other if re.match(r"web/|workflows/[^/]+\.|locales/\w+/", name)}
    workflow = "workflows/Wan2.2 text to video.json"
    assert served >= {"web/wanstream.js", workflow, "locales/zh/nodeDefs.json"}
    endings = {PurePath(name).suffix for name in served}
    assert endings == {".js", ".mjs", ".css", ".md", ".json", ".jpg"}
    assert other - served == {"LICENSE", "README.md", "pyproject.toml", "requirements.txt"}


def used_modules(path: Path) -> set[str]:
    """Return the modules used in a file that the Registry's reviewers ask about."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute) and node.attr in ENDS:
            found.add(ast.unparse(node))
    return found & REVIEWED


def test_security_names_each_use_of_reviewed_modules(source):
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w[\w/]+\.py)` \| (.+?) \| .+ \|$", text, re.MULTILINE)
    named = {file: {*re.findall("`(.+?)`", uses)} for file, uses in rows}
    files = {path.relative_to(ROOT).as_posix(): path for path in source.files}
    assert named == {name: used for name, path in files.items() if (used := used_modules(path))}
    outside = text.partition("not in the archive:")[2]
    assert {name for name in named if f"`{name}`" in outside} == {*named} - archived_files()


def test_every_package_is_installed(project):
    listed = project["tool"]["setuptools"]["packages"]
    tops = {name.split(".")[1] for name in listed if "." in name}
    folders = {path.parent.relative_to(ROOT) for top in tops for path in (ROOT / top).rglob("*.py")}
    names = [".".join(("wanstream", *folder.parts)) for folder in folders]
    assert sorted(listed) == sorted(["wanstream", *names])


def test_changelog_has_every_release_once():
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", CHANGELOG, re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    releases = [version for version, _ in headings[1:]]
    assert all(date for _, date in headings[1:])
    assert len({*releases}) == len(releases)
    assert not releases or releases[0] == VERSION, "the newest release is this version"


def test_checklist_names_only_what_exists(project):
    """A word in code with a slash or a known ending is a file or folder in the checkout."""
    named = set(re.findall(r"`([\w./-]+)`", CHECKLIST))
    files = {name for name in named if "/" in name or name.endswith((".md", ".toml", ".py"))}
    files.remove("custom_nodes/")
    assert {"pyproject.toml", "schema/version.py", ".ci/run", "scripts/demo"} <= files
    for name in files:
        assert (ROOT / name).exists(), name
    for script in re.findall(r"`(scripts/\w+)", CHECKLIST):
        assert (ROOT / script).is_file(), script
    for key in ("PublisherId", "Icon", "requires-comfyui"):
        assert f"`{key}`" in CHECKLIST
        assert key in project["tool"]["comfy"]


def released(checkout):
    """Return pyproject.toml's content with the checklist's lines for it."""
    lines = textwrap.dedent(re.findall(r" *```toml\n(.*?)```", CHECKLIST, re.DOTALL)[0])
    filled = tomllib.loads(lines.replace("OWNER/NAME", "someone/pack"))
    comfy = {**checkout["tool"]["comfy"], **filled["tool"]["comfy"]}
    return {"project": {**checkout["project"], **filled["project"]}, "tool": {"comfy": comfy}}


def test_release_with_the_lines_of_the_checklist_is_complete(project):
    given = {"tag": f"v{VERSION}", "repository": "https://github.com/someone/pack"}
    assert not [*faults(released(project), RELEASED, **given)]
    assert len([line for line in release_notes(RELEASED, VERSION).splitlines() if line]) <= 10


@pytest.mark.parametrize(
    ("place", "value", "fault"),
    [
        ("Repository", "", "Repository is"),
        ("Repository", "https://github.com/OWNER", "Repository is"),
        ("Issues", "https://example.org/issues", "Issues"),
        ("Documentation", "", "Documentation"),
        ("Icon", "", "Icon"),
        ("Banner", "https://example.org/docs/images/other.svg", "Banner"),
        ("tag", "v9.9.9", "the tag is"),
        ("repository", "https://github.com/fork/pack", "publishes, but"),
    ],
)
def test_incomplete_release_is_refused(project, place, value, fault):
    content = released(project)
    given: dict[str, str | None] = {"tag": None, "repository": None}
    for table in (content["project"]["urls"], content["tool"]["comfy"], given):
        if place in table:
            table[place] = value
    assert fault in " ".join(faults(content, RELEASED, **given))


@pytest.mark.parametrize(
    "changelog",
    [
        "",
        "## [Unreleased]\n\nnotes\n",
        "## [Unreleased]\n\n## [1.0.0]\n\nnotes\n",
        "## [Unreleased]\n\n- a line\n\n## [1.0.0] - 2026-01-01\n\nnotes\n",
        "## [Unreleased]\n\n## [1.0.0] - 2026-01-01\n\n### Added\n",
        "## [Unreleased]\n\n## [2.0.0] - 2026-01-01\n\nnotes\n## [1.0.0] - 2026-01-01\n\nnotes\n",
    ],
)
def test_changelog_without_notes_of_this_version_is_refused(changelog):
    with pytest.raises(ReleaseError):
        release_notes(changelog, "1.0.0")


def test_release_without_addresses_is_refused(project):
    """Invented addresses would be worse than none."""
    complete = "urls" in project["project"]
    assert complete == all(project["tool"]["comfy"][name] for name in PICTURES)
    assert complete != any(faults(project, RELEASED, tag=None, repository=None))
    assert main(["--tag", "v9.9.9"]) == 1


def test_workflows_run_files_that_exist():
    """Commands in a workflow name files in this checkout, and all local actions exist."""
    named = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        jobs = yaml.safe_load(path.read_text(encoding="ascii"))["jobs"].values()
        steps = [step for job in jobs for step in job.get("steps", [])]
        named |= {job["uses"] for job in jobs if "uses" in job}
        for step in steps:
            named |= {*re.findall(r"(?:\.ci|scripts|tests|tools)/[\w./]+", step.get("run", ""))}
    assert {"./.github/workflows/ci.yml", "tools/registry.py", ".ci/run"} <= named
    assert not [name for name in named if not (ROOT / name).is_file()]
