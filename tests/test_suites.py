"""Every test is in exactly one suite in `scripts/test`."""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from wanstream.tests.support.accelerator import REAL_ONLY

TESTS = Path(__file__).parent
SCRIPT = TESTS.parent / "scripts" / "test"
IMPORT = re.compile(r"^ *from (wanstream[\w.]*) import (\w[\w, ]*)$", re.MULTILINE)
STRING = re.compile(r'"""(.*?)"""|"((?:[^"\\\n]|\\.)*)"', re.DOTALL)
IN_COMFYUI = ("wanstream.host.comfy", "wanstream.tests.integration.comfy.inside")
"""Packages that import ComfyUI."""


@pytest.fixture(scope="module")
def suites():
    """The `-m` expression for every suite."""
    text = SCRIPT.read_text(encoding="utf-8")
    found = re.findall(r'^(\w+)\) .*?pytest -m "([^"]+)"', text, re.MULTILINE | re.DOTALL)
    return {name: Expression.compile(expression) for name, expression in found}


@pytest.mark.integration
@pytest.mark.skipif(sys.platform == "win32", reason="a script of bash")
@pytest.mark.parametrize(
    ("arguments", "suite"),
    [
        (["-k", "cli"], "unit"),
        (["-p", "a/b.py"], "unit"),
        (["tests/unit/cli"], "all"),
        (["./cli"], "all"),
        (["test_a.py::test_b"], "all"),
        (["-m", "slow"], "all"),
        (["slow", "-k", "cli"], "slow"),
    ],
)
def test_suite_follows_from_files_among_the_arguments(tmp_path, arguments, suite):
    for folder in ("scripts", "cli", "tests/unit/cli", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "test_a.py").touch()
    (tmp_path / "scripts" / "setup").write_text('cd "$(dirname "${BASH_SOURCE[0]}")/.."\n')
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    script = shutil.copy(SCRIPT, tmp_path / "scripts" / "test")
    given = {"capture_output": True, "text": True, "check": True, "cwd": tmp_path}
    done = subprocess.run(["bash", str(script), *arguments], **given)
    unit = "-m not slow and not integration and not checked"
    marks = {"unit": unit, "slow": "-m slow", "all": ""}
    words = done.stdout.splitlines()[-1]
    assert words.startswith(f"-m pytest {marks[suite]}")
    if suite == "all":
        assert words == f"-m pytest {' '.join(arguments)}"


def test_processes_fit_into_free_ram(request, monkeypatch):
    conftest = request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "8")

    def processes(free: float) -> int:
        monkeypatch.setattr(conftest, "available_bytes", lambda: free)
        return request.config.hook.pytest_xdist_auto_num_workers(config=request.config)

    assert [processes(free) for free in (3.9e9, 4.1e9, 64e9)] == [1, 2, 8]
    with pytest.raises(pytest.UsageError, match=r"need 3 GB .* 2\.96 GB are free"):
        processes(2.96e9)


@pytest.mark.integration
@pytest.mark.parametrize(("place", "status"), [("collection", 3), ("test", 1)])
def test_a_run_with_a_crashed_process_ends_and_fails(tmp_path, place, status):
    """A run with `--dist loadfile` would wait for ever, or succeed without tests."""
    (tmp_path / "conftest.py").write_text(
        "import os\n"
        "from wanstream.tests.conftest import (\n"
        "    pytest_configure, pytest_sessionfinish, pytest_testnodedown)\n"
        "def pytest_collection_modifyitems():\n"
        f"    if os.getenv('PYTEST_XDIST_WORKER') == 'gw1' and {place == 'collection'}:\n"
        "        os._exit(9)\n"
    )
    crash = "n == 2 and os._exit(9)" if place == "test" else "pass"
    for number in range(6):
        (tmp_path / f"test_{number}.py").write_text(
            f"import os, pytest\n@pytest.mark.parametrize('n', range(4))\ndef test_a(n): {crash}\n"
        )
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", str(tmp_path)]
    assert subprocess.run(command, cwd=tmp_path, timeout=100).returncode == status


def test_every_test_is_in_exactly_one_suite(suites, collected):
    assert list(suites) == ["unit", "device", "integration", "slow"]
    assert collected
    for test, marks in collected.items():

        def has(mark: str, marks: frozenset[str] = marks, **_: object) -> bool:
            return mark in marks

        chosen = [name for name, suite in suites.items() if suite.evaluate(has)]
        assert len(chosen) == 1, f"{test} is in {chosen}"


def test_every_file_for_gpus_alone_has_a_reason():
    marked = {
        f"tests/{path.relative_to(TESTS).as_posix()}"
        for path in TESTS.rglob("test_*.py")
        if "mark.gpu" in (text := path.read_text(encoding="utf-8")) and "mark.checked" not in text
    }
    assert marked - {"tests/test_suites.py"} == set(REAL_ONLY)


def test_programs_in_strings_import_what_exists():
    """Only slow tests run them, in other processes, so a renamed module would stay unseen."""
    missing = set()
    for path in TESTS.rglob("*.py"):
        for parts in STRING.findall(path.read_text(encoding="utf-8")):
            for module, names in IMPORT.findall("".join(parts).replace("\\n", "\n")):
                if module.startswith(IN_COMFYUI):
                    continue
                found = importlib.import_module(module)
                for name in re.findall(r"\w+", re.sub(r" as \w+", "", names)):
                    if not hasattr(found, name):
                        missing.add(f"{path.relative_to(TESTS)}: {module}.{name}")
    assert not missing
