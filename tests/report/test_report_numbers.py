from __future__ import annotations

import math

import pytest

from fedgist.report import numbers
from fedgist.report.words import Banner, banners, lead, sharing, trust, unprotected


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (numbers.percent, 0.8128, "81.3\u00a0%"),
        (numbers.percent, None, "–"),
        (numbers.percent, math.nan, "–"),
        (numbers.percent, 0, "0.0\u00a0%"),
        (numbers.points, -0.0183, "−1.8"),
        (numbers.points, 0.01, "+1.0"),
        (numbers.amount, 82_560, "82,560"),
        (numbers.amount, 0.625, "0.625"),
        (numbers.amount, 1234.56, "1,235"),
        (numbers.amount, math.inf, "∞"),
        (numbers.amount, 0, "0"),
        (numbers.amount, 1e-5, "10⁻⁵"),
        (numbers.power, 2.5e-6, "2.5 × 10⁻⁶"),
        (numbers.power, 1e-5, "10⁻⁵"),
        (numbers.size, 20, "20\u00a0B"),
        (numbers.size, 323_782, "316\u00a0KiB"),
        (numbers.size, 5 * 2**30, "5.0\u00a0GiB"),
        (numbers.size, None, "–"),
        (numbers.seconds, 0.0123, "12.3\u00a0ms"),
        (numbers.seconds, 31, "31.0\u00a0s"),
        (numbers.seconds, 600, "10.0\u00a0min"),
        (numbers.seconds, 7200, "2.0\u00a0h"),
        (numbers.epsilon, math.inf, "∞"),
        (numbers.epsilon, 11.9412, "11.94"),
        (numbers.odds, 1.0, "2.72\u00a0:\u00a01"),
        (numbers.odds, 10.0, "22,000\u00a0:\u00a01"),
        (numbers.odds, 100.0, "more than 10⁴³\u00a0:\u00a01"),
        (numbers.odds, math.inf, "no bound"),
        (numbers.middle, [3, 1, 2, 10], 2.5),
        (numbers.middle, [], None),
    ],
)
def test_numbers_read_well(function, value, text):
    assert function(value) == text


def titles(found: list[Banner]) -> list[tuple[str, str]]:
    return [(b.level, b.title) for b in found]


def test_words_hold_for_the_claim_they_stand_with():
    import sample_report as s

    seeded = s.report()
    assert titles(banners(seeded)) == [("amber", "A simulation, not fit for release")]
    assert "Do not pass them on" in sharing(seeded)

    real = s.report(claim_record=s.claim(trust="local", noise="system"), simulation=False)
    assert banners(real) == []
    assert "does not cover this report" in sharing(real)
    assert "The server" not in dict(unprotected(real))
    assert "the server included" in trust(real["claim"])

    none = s.report(claim_record=s.claim(math.inf))
    assert titles(banners(none))[0] == ("red", "No privacy guarantee holds")
    assert "Nothing was noised" in banners(none)[0].text
    assert "exact sums" in trust(none["claim"])
    assert "where the original images may be kept" in sharing(none)

    paper = s.report(claim_record=s.claim(parity=True))
    assert "Noise was added, but part of what left has none" in banners(paper)[0].text
    assert "the same run promises" not in banners(paper)[1].text


def test_the_lead_counts_correctly():
    import sample_report as s

    one = s.report(clients=1, heads={"qda": {"accuracy": 0.5}})
    one["clients"][0]["images"] = 1
    assert lead(one, None).startswith("One client holds 1 image of 10 classes. It sent sums")
    assert lead(one, None).endswith("From that the server made one classifier.")
    other = s.report(
        left=[
            {
                "round": 1,
                "view": "",
                "block": "pixels",
                "shape": [1],
                "numbers": 1,
                "bits": 8,
                "bytes": 1,
            }
        ]
    )
    assert "never an image" not in lead(other, 5)


def test_rounds_in_which_the_same_leaves_are_named_together():
    block = {"block": "rows", "bytes": 8}
    other = {"block": "counts", "bytes": 2}

    def named(*rounds):
        return [(b["block"], b["rounds"]) for b in numbers.alike_rounds(rounds)]

    assert named(*[block | {"round": r} for r in (1, 2, 3)]) == [("rows", "1 to 3")]
    pairs = [(block if r % 2 else other) | {"round": r} for r in range(1, 9)]
    assert named(*pairs) == [("rows", "1, 3 … 7"), ("counts", "2, 4 … 8")]
    assert named(block | {"round": 1}, other | {"round": 1}) == [("rows", "1"), ("counts", "1")]
    larger = block | {"round": 2, "bytes": 9}
    assert named(block | {"round": 1}, larger, block | {"round": 3}) == [
        ("rows", "1, 3"),
        ("rows", "2"),
    ]
