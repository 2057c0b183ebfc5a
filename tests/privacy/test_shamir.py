"""Shares join to the secret from any threshold of them, and from nothing less."""

import os
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgist.errors import ProtocolError
from fedgist.privacy.secure_sum.shamir import PRIME, SHARE, join, split


@settings(deadline=None, max_examples=50)
@given(st.binary(min_size=32, max_size=32), st.integers(1, 6), st.data())
def test_any_threshold_of_shares_joins(secret: bytes, t: int, data: st.DataObject) -> None:
    points = data.draw(st.lists(st.integers(1, 70_000), min_size=t, max_size=9, unique=True))
    shares = dict(zip(points, split(secret, t, points), strict=True))
    chosen = data.draw(st.permutations(points))[:t]
    assert join({x: shares[x] for x in chosen}) == secret


def test_every_subset_gives_the_same_secret() -> None:
    secret = b"\xff" * 32  # the largest
    shares = dict(enumerate(split(secret, 3, range(1, 7)), 1))
    assert {join({x: shares[x] for x in c}) for c in combinations(shares, 3)} == {secret}


def test_fewer_shares_fit_any_secret() -> None:
    """For every guess there is a missing share that leads to it: two of three say nothing."""
    a, b, _ = split(os.urandom(32), 3, (1, 2, 3))
    for guess in (0, 1, 2**256 - 1):
        y1, y2 = (int.from_bytes(s, "big") for s in (a, b))
        # y(0) = 3 y1 - 3 y2 + y3, solved for y3
        third = ((guess - 3 * y1 + 3 * y2) % PRIME).to_bytes(SHARE, "big")
        assert join({1: a, 2: b, 3: third}) == guess.to_bytes(32, "big")


def test_one_share_alone_is_spread_over_the_field() -> None:
    """A polynomial whose upper coefficients were short would leave the top bits empty."""
    tops = [split(bytes(32), 2, (1,))[0][1] >> 7 for _ in range(300)]  # top but eight bits
    assert 100 < sum(tops) < 200


def test_shares_that_do_not_belong_together_are_refused() -> None:
    one, other = split(bytes(32), 2, (1, 2)), split(b"\1" * 32, 2, (1, 2))
    with pytest.raises(ProtocolError, match="belong together"):
        join({1: one[0], 2: other[1]})


@pytest.mark.parametrize("share", [PRIME.to_bytes(SHARE, "big"), b"\xff" * SHARE, b"", bytes(65)])
def test_a_share_outside_the_field_is_refused(share: bytes) -> None:
    with pytest.raises(ProtocolError, match="a share must be"):
        join({1: split(bytes(32), 2, (1,))[0], 2: share})
