from wanstream.schema.text import numbers


def test_sizes_have_three_digits():
    sizes = {
        0: "0 B",
        999: "999 B",
        1_000: "1.00 KB",
        9_994: "9.99 KB",
        9_996: "10.0 KB",
        99_960: "100 KB",
        999_499: "999 KB",
        999_500: "1.00 MB",
        702_800_000: "703 MB",
        28_600_000_000: "28.6 GB",
        5 * 10**15: "5000 TB",
    }
    assert {nbytes: numbers.format_size(nbytes) for nbytes in sizes} == sizes
    rates = {nbytes: f"{size}/s" for nbytes, size in sizes.items()}
    assert {nbytes: numbers.format_rate(nbytes) for nbytes in rates} == rates


def test_need_and_almost_enough_room_differ():
    needs = [numbers.format_need(nbytes) for nbytes in (24_420_000_000, 24_380_000_000)]
    assert needs == ["24.42 GB", "24.38 GB"]


def test_short_times_have_more_digits():
    long = {662.21: "662.2", 100: "100.0", 23: "23.00", 1: "1.00", -3: "-3.00"}
    times = {**long, 0.5: "0.500", 0.0123: "0.0123", -0.00001: "0.0000"}
    assert {value: numbers.format_seconds(value) for value in times} == times


def test_column_has_the_digits_of_its_longest_time():
    assert numbers.second_digits([0.01, -662.2, 3]) == 1
    assert numbers.second_digits([0.01, 0.02]) == 4
    assert numbers.second_digits([]) == 4
    assert numbers.format_seconds(0.0123, 1) == "0.0"


def test_shares_are_in_percent():
    shares = {0: "0.0 %", 0.1254: "12.5 %", 1: "100.0 %"}
    assert {share: numbers.format_share(share) for share in shares} == shares


def test_one_thing_is_singular():
    counts = {0: "0 rows", 1: "1 row", 2: "2 rows"}
    assert {count: numbers.format_count(count, "row") for count in counts} == counts
