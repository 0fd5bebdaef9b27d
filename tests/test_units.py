import pytest

from xlcli.config import units


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("512", 512), ("10k", 10_000), ("1e6", 1_000_000), ("1.5k", 1500), ("2M", 2_000_000), ("64MiB", 64 * 2**20),
        ("1_000", 1000), ("-5", -5), ("0", 0), ("1Gi", 2**30), ("9007199254740993", 2**53 + 1), (" 7 ", 7),
        ("4.1M", 4_100_000), ("16.1k", 16_100),
    ],
)  # fmt: skip
def test_counts(text, value):
    assert units.count(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "abc", "1.5", "1.0000001M", "1e999999999", "9" * 40, "nan", "inf", "0x10", "1 2", "k", "1e", "5i", "--5"],
)
def test_invalid_counts(text):
    with pytest.raises(ValueError, match=r"whole|large"):
        units.count(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("30m", 1800), ("1h30m", 5400), ("2d", 172800), ("1.5h", 5400), ("250ms", 0.25)],
)
def test_durations(text, seconds):
    assert units.duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "m", "5 parsecs", "nan", "inf", "1h-5m"])
def test_invalid_durations(text):
    with pytest.raises(ValueError, match="not"):
        units.duration(text)


def test_an_interval_is_steps_or_time():
    assert units.interval("100") == 100
    assert isinstance(units.interval("100"), int)
    assert units.interval("1k") == 1000
    with pytest.raises(ValueError, match="5m"):
        units.interval("1M")
    assert units.interval("5m") == 300.0
    assert isinstance(units.interval("5m"), float)
    assert units.interval("30s") == 30.0


def test_shares_and_lengths():
    assert units.share("5%") == pytest.approx(0.05)
    assert units.share("0.1") == pytest.approx(0.1)
    assert units.share("held.txt") == "held.txt"
    assert units.fraction("1%") == pytest.approx(0.01)
    assert units.fraction("0.2") == pytest.approx(0.2)
    assert units.lengths("0,128,1k") == [0, 128, 1000]
