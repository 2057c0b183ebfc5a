"""Gist files brought together by hand: bad ones are named, good ones are not lost."""

from __future__ import annotations

import pytest
import torch

from federation_tools import OPEN, federation, outcome_bytes
from fedgist.agreement import Agreement
from fedgist.errors import ProtocolError
from fedgist.exchange.letter import write_letter
from fedgist.federation import combine
from fedgist.privacy.identity import Identity


@pytest.fixture
def parts(images):
    return [images.take(torch.arange(60) % 4 == i) for i in range(4)]


@pytest.fixture
def made(tmp_path, task, parts):
    """A federation of four sites, each with its gist in a file, and the coordinator's files."""
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"], {"quorum": 3})
    for name, site in fed.sites.items():
        (tmp_path / f"{name}.gist").write_bytes(site.contribute())
    (tmp_path / "task.toml").write_text(fed.agreement.dumps())
    fed.leader.save(tmp_path / "lead.key")
    return fed


def joined(fed, *names):
    folder = fed.folder
    files = [folder / f"{n}.gist" for n in names]
    return combine(
        folder / "task.toml", folder / "lead.key", files, folder / "out", state=folder / "state"
    )


def result(fed):
    return (fed.folder / "out" / "classifier.safetensors").read_bytes()


@pytest.mark.usefixtures("one_thread")
def test_any_order_and_the_local_result(made, parts):
    report = joined(made, "site-2", "site-0", "site-3", "site-1")
    assert [c["client"] for c in report["clients"]] == ["site-2", "site-0", "site-3", "site-1"]
    expected = outcome_bytes(made.local(parts))
    assert all(piece in result(made) for piece in expected)
    assert not [n for n in report["claim"]["notes"] if "site-" in n]


@pytest.mark.usefixtures("one_thread")
def test_bad_files_are_named_and_the_others_count(made, parts, tmp_path):
    digest = made.agreement.digest
    (tmp_path / "eve.gist").write_bytes(
        write_letter(Identity.new("eve"), digest, "0.gist", "leader", "reply", {})
    )
    (tmp_path / "old.gist").write_bytes(
        write_letter(made.members[3], "0" * 64, "0.gist", "leader", "reply", {})
    )
    (tmp_path / "junk.gist").write_bytes(b"\x80\x04K\x01.")
    nan = {"count": torch.tensor([float("nan")])}
    (tmp_path / "nan.gist").write_bytes(
        write_letter(made.members[3], digest, "0.gist", "leader", "reply", nan, asked="")
    )
    (tmp_path / "twice.gist").write_bytes(
        write_letter(made.members[0], digest, "0.gist", "leader", "reply", {}, asked="")
    )
    report = joined(
        made, "eve", "site-0", "twice", "old", "junk", "nan", "site-1", "none", "site-2", "site-1"
    )
    notes = "\n".join(report["claim"]["notes"])
    for name, why in (
        ("eve.gist", "not one of a site"),
        ("twice.gist", "site-0 has sent another file"),
        ("old.gist", "not a gist of site-3"),
        ("junk.gist", "begin with FEDGIST"),
        ("nan.gist", "not a gist of site-3"),
        ("none.gist", "No such file"),
    ):
        line = next(n for n in notes.splitlines() if name in n)
        assert why in line, line
    expected = outcome_bytes(made.local(parts, lost=(3,)))
    assert all(piece in result(made) for piece in expected)


def test_too_few_files_lose_nothing(made):
    with pytest.raises(ProtocolError, match=r"at least 3 sites\. Got 2; missing: site-2 .* site-3"):
        joined(made, "site-0", "site-1")
    report = joined(made, "site-3")  # the first two were kept
    assert {c["client"] for c in report["clients"]} == {"site-0", "site-1", "site-3"}
    assert (made.folder / "out" / "report.html").is_file()


def test_one_file_is_not_enough_for_a_secure_sum(tmp_path, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=distributed"], policy=OPEN)
    with pytest.raises(ProtocolError, match="a single file must be enough"):
        fed.sites["site-0"].contribute()
    assert isinstance(fed.agreement, Agreement)
