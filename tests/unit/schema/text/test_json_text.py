"""Documents read by Python without a message, or refused without a remedy."""

import json

import pytest

from wanstream.cli.arguments import ArgumentError, read_json
from wanstream.schema.text.json_text import JsonTextError, parse_json

TEXT = '{"text": {"inputs": {"positive": "ein Käfer, 甲虫", "seed": 7}}}'
LATE = b"{%s}" % b", ".join(b'"%d": 1' % (each % 30000) for each in range(30001))
REFUSED = {
    "UTF-16": (TEXT.encode("utf-16"), "UTF-16 or UTF-32: save it as UTF-8"),
    "UTF-16, little, no mark": (TEXT.encode("utf-16-le"), "save it as UTF-8"),
    "UTF-16, big, no mark": (TEXT.encode("utf-16-be"), "save it as UTF-8"),
    "UTF-32": (TEXT.encode("utf-32"), "save it as UTF-8"),
    "UTF-32, no mark": (TEXT.encode("utf-32-le"), "save it as UTF-8"),
    "Latin-1": ('{\n"a": "ü"}'.encode("latin-1"), r"byte 0xFC in line 2\): save it as UTF-8"),
    "GBK": ('{"a": "甲虫"}'.encode("gbk"), "save it as UTF-8"),
    "empty": (b"", "it is empty"),
    "mark alone": (b"\xef\xbb\xbf\n", "it is empty"),
    "a comma too much": (b'{"a": 1,}', "this is not JSON: "),
    "a node twice": (b'{"1": {}, "2": {}, "1": {}}', "'1' is given twice"),
    "a late one": (LATE, "'0' is given twice"),
    "equal nodes": (b'{"1": {}, "1": {}}', "'1' is given twice"),
    "an input twice": (b'{"1": {"inputs": {"s": 1, "s": 2}}}', "'1.inputs.s' is given twice"),
    "in a list": (b'[{"a": [{"b": 1, "b": 1}]}]', "'0.a.0.b' is given twice"),
    "NaN": (b'{"s": {"cfg": NaN}}', "'s.cfg': NaN is not a JSON value: give a finite"),
    "infinity": (b'{"a": [1, -Infinity]}', "'a.1': Infinity is not"),
    "overflow": (b'{"a": 1e999}', "'a': Infinity is not"),
    "alone": (b"NaN", "NaN is not"),
}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_utf8_is_read_with_and_without_a_mark(encoding):
    assert parse_json(TEXT.encode(encoding)) == json.loads(TEXT)


@pytest.mark.parametrize(("content", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_meant_is_refused_with_place_and_remedy(tmp_path, content, reason):
    with pytest.raises(JsonTextError, match=reason):
        parse_json(content)
    (tmp_path / "workflow.json").write_bytes(content)
    with pytest.raises(ArgumentError, match=reason):
        read_json(tmp_path / "workflow.json")
