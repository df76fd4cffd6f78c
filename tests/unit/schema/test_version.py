import re
from pathlib import Path

import wanstream
from wanstream.schema.version import VERSION

PROJECT = Path(wanstream.__file__).parent / "pyproject.toml"


def test_there_is_one_version():
    found = re.search(r'^version = "(.+)"$', PROJECT.read_text(encoding="utf-8"), re.MULTILINE)
    assert found
    assert found[1] == wanstream.__version__ == VERSION
