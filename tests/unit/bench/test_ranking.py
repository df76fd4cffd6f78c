"""Variant order in a report."""

from wanstream.bench import ranking
from wanstream.tests.support.bench_runs import make_report, make_timeline, make_variant


def test_variants_are_ranked_by_their_seconds_per_step():
    runs = [make_timeline(each, each, each, rss_bytes=each) for each in (4, 2, 3)]
    # Named by place. The first one's whole run is shorter, with fewer steps.
    broken = make_variant("1", make_timeline(1, 1), failed="out of memory")
    variants = [make_variant("0", make_timeline(5, 5)), broken, make_variant("2", *runs)]
    fast, slow, failed = ranking(make_report(*variants))
    assert [rank.name for rank in (fast, slow, failed)] == ["2", "0", "1"]
    assert [rank.place for rank in (fast, slow, failed)] == [2, 0, 1]
    assert (fast.step_s, slow.step_s) == (3, 5)
    assert (failed.step_s, failed.failed) == (None, "out of memory")
    assert fast.memory == ("RAM", 4)
