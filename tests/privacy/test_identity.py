"""Keys: a signature is good for one purpose, typing errors are found, files stay private."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import string
import subprocess
import sys

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from fedgist.errors import ConfigError, FedGistError, PrivacyError
from fedgist.privacy.identity import Identity, Public, keys_new


@pytest.fixture(scope="module")
def someone() -> Identity:
    return Identity.new("clinic-a")


def test_a_signature_is_good_for_its_message_and_purpose_only(someone):
    signature = someone.sign(b"yes", b"letter")
    assert someone.public.verify(signature, b"yes", b"letter")
    assert not someone.public.verify(signature, b"no", b"letter")
    assert not someone.public.verify(signature, b"yes", b"keys")
    assert not Identity.new("clinic-a").public.verify(signature, b"yes", b"letter")
    # moving the border between purpose and message must not give the same bytes
    assert not someone.public.verify(signature, b"ryes", b"lette")
    assert not someone.public.verify(signature[:-1], b"yes", b"letter")
    assert not someone.public.verify(b"", b"yes", b"letter")


def test_what_is_signed_is_fixed_for_all_versions():
    identity = Identity(
        "a",
        Ed25519PrivateKey.from_private_bytes(bytes(range(32))),
        X25519PrivateKey.from_private_bytes(bytes(range(32, 64))),
    )
    plain = identity.sign_key.sign(b"fedgist signature 1\x00\x06letterhello")
    assert identity.sign(b"hello", b"letter") == plain
    # public keys of these private ones as others print them (TLS 1.3 examples and test vectors)
    assert identity.public.sign.hex() == (
        "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
    )
    assert identity.public.seal.hex() == (
        "358072d6365880d1aeea329adf9121383851ed21a28e3b75e965d0d2cd166254"
    )
    assert identity.public.text() == (  # task files hold such lines: they must stay readable
        "fedgist1:a:AOQQPP7TZYIL4HLQ3UMOOS6ATFT6JVRQTOSQ2XY53SDGIESVGG4DLADS2Y3FRAGRV3VDFGW7SEQTQOC"
        "R5UQ2FDR3OXUWLUGSZULGEVA:AJB42QHF"
    )


@pytest.mark.parametrize("purpose", [b"", b"x" * 256])
def test_a_purpose_has_a_length_that_one_byte_holds(someone, purpose):
    with pytest.raises(ValueError, match="purpose"):
        someone.sign(b"", purpose)


def test_the_line_comes_back_however_a_mail_breaks_it(someone):
    text = someone.public.text()
    assert Public.of(text) == someone.public
    assert Public.of(f"\n {text[:60]}\n{text[60:]} \r\n") == someone.public
    name, rest = text.split(":")[1], text.split(":")[2:]
    assert Public.of(":".join(["fedgist1", name, *map(str.lower, rest)])) == someone.public


def test_every_single_typing_error_is_found(someone):
    text = someone.public.text()
    for i in range(len(text)):
        for c in {text[(i + 1) % len(text)], "A", "b", "7", ":"} - {text[i], text[i].upper()}:
            if c.upper() == text[i].upper() and i > text.rindex("a:"):
                continue  # case means nothing in base 32
            with pytest.raises(ConfigError):
                Public.of(text[:i] + c + text[i + 1 :])
        with pytest.raises(ConfigError):
            Public.of(text[:i] + text[i + 1 :])


@given(st.text(max_size=200) | st.text(string.ascii_letters + ":234567").map("fedgist1:".__add__))
def test_any_text_is_a_key_or_one_error(text):
    with pytest.raises(FedGistError) as e:
        Public.of(text)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".a", "-a", "a/b", "a b", "a\n", "ä", "a" * 65, "a:b", "a\\b"]
)
def test_names_that_make_no_folder_are_refused(name):
    with pytest.raises(ConfigError, match="name must be"):
        Identity.new(name)


@pytest.mark.parametrize("name", ["a", "A.b-c_9", "a" * 64, "_", "9"])
def test_other_names_are_fine(name):
    assert Public.of(Identity.new(name).public.text()).name == name


@pytest.mark.parametrize("point", [bytes(32), b"\x01" + bytes(31)])
def test_a_key_that_gives_no_secret_is_refused(someone, point):
    with pytest.raises(ConfigError, match="no secret"):
        dataclasses.replace(someone.public, seal=point)


def test_fingerprints_differ_with_every_part(someone):
    other, p = Identity.new("b").public, someone.public
    changed = [dataclasses.replace(p, **{f: getattr(other, f)}) for f in ("name", "sign", "seal")]
    prints = {x.fingerprint for x in [p, *changed]}
    assert len(prints) == 4
    assert all(len(f) == 19 and f.count("-") == 3 for f in prints)


def test_secrets_are_neither_shown_nor_pickled(someone):
    assert someone.sign_key.private_bytes_raw().hex() not in repr(someone)
    assert "PrivateKey" not in repr(someone)
    with pytest.raises(TypeError):
        pickle.dumps(someone)


def test_files_come_back_and_only_the_owner_reads_them(tmp_path):
    before = os.umask(0)
    try:
        private, public = keys_new(tmp_path / "keys", "clinic-a")
    finally:
        os.umask(before)
    assert (private.name, public.name) == ("clinic-a.key", "clinic-a.pub")
    assert private.stat().st_mode & 0o777 == 0o600
    assert private.parent.stat().st_mode & 0o077 == 0
    identity = Identity.load(private)
    assert identity.public == Public.of(public.read_text())
    assert identity.public.verify(identity.sign(b"m", b"p"), b"m", b"p")
    assert sorted(p.name for p in private.parent.iterdir()) == ["clinic-a.key", "clinic-a.pub"]


@pytest.mark.parametrize("which", [".key", ".pub"])
def test_a_key_is_never_overwritten(tmp_path, which):
    there = tmp_path / f"a{which}"
    there.write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        keys_new(tmp_path, "a")
    assert there.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [there]


def test_a_file_system_without_hard_links_will_do(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    private, _ = keys_new(tmp_path, "a")
    kept = private.read_bytes()
    with pytest.raises(ConfigError, match="exists"):
        Identity.new("a").save(private)
    assert private.read_bytes() == kept
    assert len(list(tmp_path.iterdir())) == 2


def test_two_at_once_make_one_key(tmp_path):
    code = (
        "import sys; from pathlib import Path; from fedgist.privacy.identity import Identity;"
        "from fedgist.errors import ConfigError\nme = Identity.new('a')\n"
        "print('ready', flush=True); sys.stdin.read()\n"
        "try: me.save(Path(sys.argv[1])); print(me.public.text())\n"
        "except ConfigError: print('taken')"
    )
    run = [sys.executable, "-c", code, str(tmp_path / "a.key")]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(run, stdin=pipe, stdout=pipe, text=True) for _ in range(3)]
    for p in started:
        assert p.stdout.readline() == "ready\n"
    for p in started:
        p.stdin.close()
    said = sorted(p.stdout.read().strip() for p in started)
    assert [p.wait() for p in started] == [0, 0, 0]
    for p in started:
        p.stdout.close()
    assert said[1:] == ["taken", "taken"]
    assert said[0] == Identity.load(tmp_path / "a.key").public.text()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_can_reach_is_refused(tmp_path, mode):
    private, _ = keys_new(tmp_path, "a")
    private.chmod(mode)
    with pytest.raises(PrivacyError, match=f"mode {mode:o}.*chmod 600"):
        Identity.load(private)


def spoiled():
    good = json.loads("{}")
    yield from (b"", b"{}", b"[]", b"null", b"\xff\xfe", b"x" * 5000, b"[" * 4000)
    yield json.dumps(good | {"format": "fedgist1", "public": 3, "sign": [], "seal": {}}).encode()


@pytest.mark.parametrize("data", list(spoiled()), ids=range(8))
def test_what_is_no_key_file_is_one_line(tmp_path, data):
    path = tmp_path / "a.key"
    path.touch(0o600)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"a\.key") as e:
        Identity.load(path)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("name", ["format", "public", "sign", "seal"])
def test_an_altered_key_file_is_found_and_not_quoted(tmp_path, name):
    private, _ = keys_new(tmp_path, "a")
    content = json.loads(private.read_text())
    secret = content["sign"]
    other = keys_new(tmp_path, "b")[0]
    content[name] = "fedgist9" if name == "format" else json.loads(other.read_text())[name]
    private.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="altered") as e:
        Identity.load(private)
    assert secret not in str(e.value) and e.value.__suppress_context__


def test_missing_files_and_folders_are_one_line(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        Identity.load(tmp_path / "a.key")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="folder"):
        keys_new(tmp_path / "file", "a")
    with pytest.raises(ConfigError, match="writable"):
        Identity.new("a").save(tmp_path / "nowhere" / "a.key")
