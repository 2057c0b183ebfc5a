"""The wire format: what is written is read, and nothing else gets in."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedgist.errors import ProtocolError
from fedgist.exchange.letter import (
    FIXED,
    MAGIC,
    fits,
    is_whole,
    read_letter,
    sender_key,
    write_letter,
)
from fedgist.privacy.identity import Identity

ANNA = Identity.new("anna")
EVE = Identity.new("eve")
TASK = "ab" * 32
TENSORS = {
    "count": torch.arange(5),
    "codes": torch.linspace(-1, 1, 12).reshape(3, 4),
    "image": torch.arange(6, dtype=torch.uint8).reshape(1, 2, 3),
    "none": torch.empty(0, dtype=torch.float64),
}
SPECS = {k: (v.dtype, tuple(v.shape)) for k, v in TENSORS.items()}
GOOD = write_letter(ANNA, TASK, "0.gist", "bert", "reply", TENSORS, claim="ε = 3")


def read(data, **options):
    return read_letter(data, [ANNA.public], TASK, **({"to": "bert"} | options))


def test_round_trip():
    letter = read(GOOD)
    assert letter.kind == "reply" and letter.step == "0.gist" and letter.sender == ANNA.public
    assert letter.header["claim"] == "ε = 3"
    got = letter.tensors(SPECS)
    assert all(torch.equal(got[k], v) for k, v in TENSORS.items())
    assert sender_key(GOOD) == ANNA.public.sign
    assert is_whole(GOOD)
    assert write_letter(ANNA, TASK, "0.gist", "bert", "reply", TENSORS, claim="ε = 3") == GOOD


def test_limits_are_looked_at_before_numbers():
    letter = read(GOOD)
    wrong = [
        {k: v for k, v in SPECS.items() if k != "codes"},
        SPECS | {"more": (torch.int64, (1,))},
        SPECS | {"codes": (torch.float32, (4, 3))},
        SPECS | {"codes": (torch.float64, (3, 4))},
    ]
    for specs in wrong:
        with pytest.raises(ProtocolError, match=r"anna: letter '0\.gist' must hold what"):
            letter.tensors(specs)
    with pytest.raises(ProtocolError, match="at most 10 bytes"):
        read(GOOD, most=10)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_are_finite(bad):
    data = write_letter(ANNA, TASK, "0.gist", "bert", "reply", {"x": torch.tensor([1.0, bad])})
    with pytest.raises(ProtocolError, match=r"anna: .* must be finite\. Got NaN or Inf in 'x'"):
        read(data).tensors()


def test_somebody_else_s_signature_and_key():
    forged = MAGIC + ANNA.public.sign + GOOD[40:]
    assert forged == GOOD
    by_eve = write_letter(EVE, TASK, "0.gist", "bert", "reply", TENSORS)
    with pytest.raises(ProtocolError, match="must come from a key in the task's roster"):
        read(by_eve)
    swapped = by_eve[:8] + ANNA.public.sign + by_eve[40:]
    with pytest.raises(ProtocolError, match="anna: a letter must carry a valid signature"):
        read(swapped)


def test_a_name_does_not_make_a_sender():
    other = Identity("anna", EVE.sign_key, EVE.seal_key)
    data = write_letter(other, TASK, "0.gist", "bert", "reply", {})
    with pytest.raises(ProtocolError, match="roster"):
        read(data)


def test_a_signature_for_something_else_is_no_letter():
    text = GOOD[FIXED : FIXED + struct.unpack("<I", GOOD[FIXED - 4 : FIXED])[0]]
    start = MAGIC + ANNA.public.sign
    data = start + ANNA.sign(start + text, b"mask key") + GOOD[FIXED - 4 :]
    with pytest.raises(ProtocolError, match="valid signature"):
        read(data)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_change_is_found(data):
    i = data.draw(st.integers(0, len(GOOD) - 1))
    bit = 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ProtocolError):
        read(GOOD[:i] + bytes([GOOD[i] ^ bit]) + GOOD[i + 1 :])


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(GOOD) - 1))
def test_any_cut_is_found_and_is_not_whole(n):
    assert not is_whole(GOOD[:n])
    with pytest.raises(ProtocolError):
        read(GOOD[:n])
    blank = GOOD[:n] + bytes(len(GOOD) - n)
    if blank != GOOD:
        with pytest.raises(ProtocolError):
            read(blank)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
@example(MAGIC + bytes(500))
@example(MAGIC + bytes(96) + struct.pack("<I", 2**32 - 1) + b"{}")
def test_junk_is_refused_in_one_way(data):
    assert not is_whole(data)
    with pytest.raises(ProtocolError):
        read(data)


TABLES = [
    b"",
    b"\xff" * 8,
    struct.pack("<Q", 2**63) + b"{}",
    b"[]",
    b'{"a": 1}',
    b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": [1e9], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": [99999999999, 99999999999], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
    b'{"a": {"dtype": "F32", "shape": [1]}}',
    b"[" * 5000,
]


@pytest.mark.parametrize("table", TABLES)
def test_a_body_signed_by_a_hostile_site_is_looked_at_first(table):
    whole = table[:1] in (b"\xff", b"") or len(table) == 10
    body = table if whole else struct.pack("<Q", len(table)) + table + bytes(4)
    with pytest.raises(ProtocolError):
        read(signed(body)).tensors()


HEADERS = [
    b"",
    b"null",
    b"[1]",
    b"{",
    b'{"task": 1}',
    b"[" * 100_000,
    b'{"task": "%s", "step": "0.gist", "from": "anna", "to": "bert", "kind": "reply", '
    b'"sha256": "x", "bytes": true}' % TASK.encode(),
]


@pytest.mark.parametrize("text", HEADERS)
def test_a_header_signed_by_a_hostile_site(text):
    start = MAGIC + ANNA.public.sign
    data = start + ANNA.sign(start + text, b"letter") + struct.pack("<I", len(text)) + text
    assert not is_whole(data)
    with pytest.raises(ProtocolError):
        read(data)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_body_of_a_hostile_site(body):
    letter = read(signed(body))
    with pytest.raises(ProtocolError):
        letter.tensors(SPECS)


def signed(body):
    """Return a properly signed letter around any body."""
    import hashlib

    header = {
        "task": TASK,
        "step": "0.gist",
        "from": "anna",
        "to": "bert",
        "kind": "reply",
        "bytes": len(body),
        "sha256": hashlib.sha256(body).hexdigest(),
    }
    text = json.dumps(header).encode()
    start = MAGIC + ANNA.public.sign
    return start + ANNA.sign(start + text, b"letter") + struct.pack("<I", len(text)) + text + body


def test_rows_for_each_image_are_as_many_in_all():
    want = {"pixels": (torch.uint8, (-1, 1, 8, 8)), "labels": (torch.uint8, (-1,))}
    found = {"pixels": (torch.uint8, (5, 1, 8, 8)), "labels": (torch.uint8, (5,))}
    assert fits(found, want)
    for wrong in (
        {"labels": (torch.uint8, (4,))},
        {"labels": (torch.int64, (5,))},
        {"labels": (torch.uint8, ())},
        {"labels": (torch.uint8, (5, 1))},
        {"pixels": (torch.uint8, (5, 1, 8, 9))},
        {"more": (torch.uint8, (5,))},
    ):
        assert not fits(found | wrong, want)
    assert not fits({"pixels": found["pixels"]}, want)
    tensors = {"pixels": torch.zeros(5, 1, 8, 8).byte(), "labels": torch.zeros(4).byte()}
    letter = read(write_letter(ANNA, TASK, "0.gist", "bert", "reply", tensors))
    with pytest.raises(ProtocolError, match="different numbers of rows"):
        letter.tensors(want)
