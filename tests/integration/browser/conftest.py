"""A real ComfyUI with the test model, and the frontend in a headless Chromium.

If one is missing on this machine, these tests are skipped and name it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from wanstream.tools.comfyui import NoComfyUIError, Server, find_comfyui, populate, running_server
from wanstream.tools.frontend import Frontend, NoBrowserError, SharedFrontends, running_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    try:
        with running_browser() as browser:
            yield browser
    except NoBrowserError as err:
        pytest.skip(str(err))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    try:
        comfyui = find_comfyui()
    except NoComfyUIError as err:
        pytest.skip(str(err))
    base = tmp_path_factory.mktemp("browser")
    populate(base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(base / "cache"))  # not the user's machine profiles
        with running_server(comfyui, base) as server:
            yield server


@pytest.fixture(scope="package")
def frontends(browser: Browser, server: Server) -> Iterator[SharedFrontends]:
    with SharedFrontends(browser, server) as frontends:
        yield frontends


@pytest.fixture
def frontend(frontends: SharedFrontends) -> Frontend:
    """The frontend with first-start settings, and an empty graph."""
    return frontends.get()
