"""A real ComfyUI with the test model, and the frontend in a headless Chromium.

If one is missing on this machine, these tests are skipped and name it.
"""

import pytest

from wanstream.tools.frontend import (
    CLASSIC,
    NODES_2,
    NoBrowserError,
    SharedFrontends,
    opened_frontend,
    running_browser,
)

from .overlay_page import HEIGHT, Page, need_frontend_of_0_4, serve

RENDERERS = {"classic": CLASSIC, "nodes-2": NODES_2}


@pytest.fixture(scope="package")
def browser():
    try:
        with running_browser() as browser:
            yield browser
    except NoBrowserError as err:
        pytest.skip(str(err))


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    yield from serve(tmp_path_factory.mktemp("browser"))


@pytest.fixture(scope="package")
def frontends(browser, server):
    with SharedFrontends(browser, server) as frontends:
        yield frontends


@pytest.fixture
def frontend(frontends):
    """The frontend with first-start settings, and an empty graph."""
    return frontends.get()


@pytest.fixture(params=RENDERERS)
def renderer(request, server):
    """The renderer's name.

    `server` is requested first because it skips if a requirement is missing.
    """
    if request.param == "nodes-2":
        need_frontend_of_0_4("this Nodes 2.0 is a trial that shows no widgets of others")
    return request.param


@pytest.fixture
def page(frontends, server, renderer):
    """For behaviour that depends on the renderer. Other tests use `classic`."""
    return Page(frontends.get(height=HEIGHT, settings=RENDERERS[renderer]), server)


@pytest.fixture
def classic(frontends, server):
    return Page(frontends.get(height=HEIGHT, settings=CLASSIC), server)


@pytest.fixture
def unused(browser, server):
    """A separate page. No run in the table is ticked, and a test may change settings."""
    with opened_frontend(browser, server, height=HEIGHT) as frontend:
        yield Page(frontend, server)
