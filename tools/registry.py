"""Check before a release goes to the Comfy Registry: addresses, pictures, version and changelog.

    python tools/registry.py [--tag vX.Y.Z] [--repository https://github.com/OWNER/NAME]

Prints the release notes, the first lines of the version's section in CHANGELOG.md. It imports only
the standard library, so that it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Python has `tomllib` from 3.11 on.
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PICTURES = {"Icon": "docs/images/icon.svg", "Banner": "docs/images/banner.svg"}


class ReleaseError(ValueError):
    """The release is incomplete."""


def faults(
    pyproject: Mapping[str, Any], changelog: str, *, tag: str | None, repository: str | None
) -> Iterator[str]:
    """Yield the reasons against publishing this release, each with a remedy.

    Args:
        pyproject: content of pyproject.toml.
        changelog: content of CHANGELOG.md.
        tag: pushed tag. None: not checked.
        repository: address of the publishing repository. None: not checked.
    """
    project = pyproject["project"]
    comfy = pyproject["tool"]["comfy"]
    version = project["version"]
    urls = project.get("urls", {})
    home = urls.get("Repository", "")
    if not re.fullmatch(r"https://[\w.-]+/[\w.-]+/[\w.-]+", home):
        yield f'[project.urls] Repository is "{home}": set the address of the public repository'
    # A fork must not publish under the address of another repository.
    elif repository is not None and repository != home:
        yield f"{repository} publishes, but [project.urls] Repository is {home}"
    for name in ("Documentation", "Issues"):
        if not (home and urls.get(name, "").startswith(f"{home}/")):
            yield f"[project.urls] {name}: set an address below that of the repository"
    for name, path in PICTURES.items():
        if not re.fullmatch(rf"https://\S+/{re.escape(path)}", comfy.get(name, "")):
            yield f"[tool.comfy] {name}: set the address of the raw file {path}"
    if tag is not None and tag != f"v{version}":
        yield f"the tag is {tag}, but the version is {version}"
    try:
        release_notes(changelog, version)
    except ReleaseError as err:
        yield str(err)


def release_notes(changelog: str, version: str) -> str:
    """Return a version's first lines in the changelog, up to the first subheading.

    Raises:
        ReleaseError: the version has no dated section, no notes, or is not the newest.
    """
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)
    # The first section is the page's head. Empty texts stand for missing sections.
    unreleased, newest = (*sections[1:], "", "")[:2]
    heading, _, body = newest.partition("\n")
    if not re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", heading):
        raise ReleaseError(f"CHANGELOG.md: the section behind Unreleased is not {version}, dated")
    if unreleased.partition("\n")[2].strip():
        raise ReleaseError(f"CHANGELOG.md: move the lines of Unreleased to {version}")
    notes = re.split(r"^### ", body, flags=re.MULTILINE)[0].strip()
    if not notes:
        raise ReleaseError(f"CHANGELOG.md: {version} has no lines before its first subheading")
    return notes


def main(arguments: list[str] | None = None) -> int:
    """Print the release notes and return 0, or print the faults to stderr and return 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", help="tag of the release")
    parser.add_argument("--repository", help="address of the repository that publishes")
    options = parser.parse_args(arguments)
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = [*faults(pyproject, changelog, tag=options.tag, repository=options.repository)]
    if found:
        print("Not published:", *found, sep="\n  ", file=sys.stderr)
        return 1
    print(release_notes(changelog, pyproject["project"]["version"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
