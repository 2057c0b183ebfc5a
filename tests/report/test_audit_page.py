"""The page of an audit: sound in every state, and each verdict says neither too much nor little."""

from __future__ import annotations

import itertools
import math
import re
import shutil
from copy import deepcopy

import numpy as np
import pytest
import sample_report as s
from page_tools import check_phone, screenshot
from test_report_page import Page

from fedgist.errors import ConfigError
from fedgist.report.audit_page import render_audit, write_audit_page
from fedgist.report.verdicts import adversaries, verdict


def attack(name, auc, state="within", **more):
    sees = "the final classifier"
    caps = {"claim_cap": 0.909, "claim_cap_tpr_at_0.1pct": 0.115, "claim_cap_tpr_at_1pct": 0.331}
    rates = {"tpr_at_0.1pct": None, "tpr_at_1pct": 0.02}
    figures = {"auc": auc, "low": auc - 0.02, "high": auc + 0.02, "records": 1000}
    row = {"attack": name, "sees": sees, "roc": s.roc(0.1), "state": state}
    return row | figures | rates | caps | more


def bound(audit="claim", state="pass", mu_low=1.8, low=8.9):
    return {
        "audit": audit,
        "sees": "the noised sum; all other images",
        "state": state,
        "mu_low": mu_low,
        "mu_claimed": 1.888,
        "mu_attained": 1.88,
        "epsilon_low": low,
        "epsilon_raw": 1.8,
        "epsilon": 10.0,
        "rates": {"false_positive": 0.1, "false_negative": 0.2, "trials": 30_000},
        "score": "likelihood ratio",
        "canary": "1 record of one image, in or out",
    }


def record(**changes):
    blocks = {
        "codes count": {"numbers": 10, "ratio": 0.52, "least": 0.31, "small": False},
        "codes mean": {"numbers": 1280, "ratio": 0.99, "small": False},  # of an older version
    }
    deviation = {
        "audit": "deviation of every block of a release of full size",
        "sees": "nobody: a check of the noise itself",
        "state": "pass",
        "note": "measured over planned",
        "blocks": blocks,
    }
    similar = attack("closest synthetic image, pixels", 0.48, note="a similarity figure")
    return {
        "state": "pass",
        "title": "FedKT-CSD on fashion-mini",
        "created": "2026-11-29T22:41:00Z",
        "claim": s.claim(),
        "noise": [bound(), deviation],
        "limit": s.limit(),
        "attacks": [
            attack("likelihood ratio", 0.898, sees="the noised sum, all other records"),
            attack("loss threshold, lda", 0.51),
            attack("LiRA (offline), lda", 0.55),
            attack("LiRA (offline), qda", 0.54),
        ],
        "similarity": [similar],
        "exposure": None,
        "notes": [],
        "seconds": {"total": 33.0, "load": 1.0, "noise": 32.0},
        "command": "fedgist audit out --shadows 64",
        "seed": 7,
        "versions": {"python": "3.11.2", "fedgist": "0.1.0"},
    } | changes


def exposure():
    rows = [{"name": "enlarging", "sees": "the upload", "psnr": 14.2, "ssim": 0.3, "distance": 0.4}]
    return {
        "headline": "An attacker recovers PSNR 14.2 dB.",
        "attacked": 100,
        "rows": rows,
        "distance": "LPIPS",
        "identified": {"gallery": 1000, "pixels": 0.2, "white box": 0.9, "chance": 0.001},
    }


def older():
    new = ("created", "limit", "command", "seed", "versions")
    out = {k: v for k, v in record().items() if k not in new}
    for row in [*out["attacks"], *out["similarity"]]:
        row.pop("roc")
    return out


def variants():
    refuted = bound(state="contradicted", mu_low=2.4, low=13.0)
    nominal = bound("nominal ε, counts sent exactly", "contradicted", 9.0, 60.0)
    weak = bound(state="inconclusive", mu_low=1.0, low=4.2)
    sampled = bound() | {"mu_claimed": None, "mu_attained": None, "epsilon_low": 9.1}
    alone = {"bound": "approximate", "epsilon": 10.0, "delta": 1e-5, "mu": None, "roc": s.roc(3.0)}
    return {
        "pass": record(),
        "contradicted": record(state="contradicted", noise=[refuted]),
        "attack": record(
            state="contradicted", attacks=[attack("loss threshold, lda", 0.99, "contradicted")]
        ),
        "nominal": record(
            state="contradicted", noise=[nominal], limit=None, claim=s.claim(parity=True)
        ),
        "inconclusive": record(state="inconclusive", noise=[weak]),
        "no claim": record(
            state="no claim",
            noise=[],
            attacks=[attack("loss threshold", 0.6, "no claim", claim_cap=None)],
            similarity=[],
            limit=None,
            claim=s.claim(math.inf),
            exposure=exposure(),
            notes=["LiRA and RMIA need a method of one sum"],
        ),
        "sampled": record(noise=[sampled], limit=alone),
        "nothing at all": record(
            state="no claim", noise=[], attacks=[], similarity=[], limit=None, notes=["no test"]
        ),
        "older": older(),
    }


@pytest.fixture(scope="module")
def pages():
    return {name: render_audit(r) for name, r in variants().items()}


@pytest.mark.parametrize("name", list(variants()))
def test_every_state_makes_a_sound_page(pages, name):
    page = Page(pages[name])
    levels = [int(t[1]) for t, _ in page.tags if re.fullmatch("h[1-6]", t)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    targets = {(a["href"] or "")[1:] for a in page.all("a")}
    assert targets | {a["aria-labelledby"] for a in page.all("section")} <= set(ids)
    assert len(page.all("table")) == len(page.all("caption"))
    assert "None" not in page.text and "nan" not in page.text.lower().split()
    assert not re.search(r"https?://|url\(|@import", pages[name])
    assert not {"script", "link", "iframe", "object", "embed", "form", "base"} & {
        tag for tag, _ in page.tags
    }
    policy = [a["content"] for a in page.all("meta") if "http-equiv" in a]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_the_verdict_comes_first_and_is_no_more_than_it_is(pages):
    text = " ".join(Page(pages["pass"]).text.split())
    summary = text[: text.index("Who attacks, and what they see")]
    for fact in (
        "Passed: no attack here got past the claim",
        "came to 95 % of what the claim allows",
        "The noise was drawn 60,000 times",
        "4 attacks tried",
        "It is no proof",
        "its noise comes from a seed",
        "ε = 10",
    ):
        assert fact in summary, fact
    assert "safe" not in summary.lower()


def test_every_state_has_words_of_its_own():
    found = {name: verdict(r) for name, r in variants().items()}
    assert {k: v.level for k, v in found.items()} == {
        "pass": "green",
        "contradicted": "red",
        "attack": "red",
        "nominal": "red",
        "inconclusive": "amber",
        "no claim": "red",
        "sampled": "green",
        "nothing at all": "amber",
        "older": "green",
    }
    assert "Refuted by: the claim." in found["contradicted"].means
    assert "loss threshold, lda" in found["attack"].means
    assert "is another statement" in found["nominal"].means
    assert "is another statement" not in found["contradicted"].means
    assert "came to 53 %" in found["inconclusive"].means
    assert "no pass" in found["inconclusive"].not_means
    assert "does not mean that images are safe" in found["no claim"].not_means
    assert "came to 91 %" in found["sampled"].means
    assert found["nothing at all"].tried == "Nothing could be tried."
    real = record()
    real["claim"] |= {"seeded": False}
    assert "seed" not in verdict(real).not_means


def test_each_attacker_is_named_once_with_what_it_sees(pages):
    rows = adversaries(record())
    assert [name for name, _, _ in rows] == [
        "audit of the noise: the claim",
        "likelihood ratio",
        "loss threshold",
        "LiRA (offline)",
        "closest synthetic image",
    ]
    assert all(sees for _, sees, _ in rows) and all(does for _, _, does in rows)
    text = Page(pages["no claim"]).text
    assert "Rebuilding images: enlarging" in text and "The upload" in text
    assert "What uploads show" in text


def test_similarity_stands_apart_and_has_no_verdict(pages):
    text = " ".join(Page(pages["pass"]).text.split())
    at = text.index("Similarity: no evidence of privacy")
    assert "closest synthetic image" not in text[text.index("Attacks on single images") : at]
    section = text[at : text.index("How to repeat it", at)]
    assert "closest synthetic image, pixels" in section and "within" not in section


def test_the_limit_is_named(pages):
    assert "single Gaussian with μ = 1.89" in Page(pages["pass"]).text
    assert "amount to no single Gaussian" in " ".join(Page(pages["sampled"]).text.split())
    assert "There is no limit" in Page(pages["no claim"]).text
    claim = s.claim() | {"adjacency": "replace-one"}
    text = " ".join(Page(render_audit(record(claim=claim))).text.split())
    assert "read under add-remove, ε = 10" in text


def test_it_says_how_to_repeat_it(pages):
    text = Page(pages["pass"]).text
    assert "fedgist audit out --shadows 64" in text and "7, the run’s own" in text
    assert "0.1.0" in text
    assert "From where the folder" not in Page(pages["older"]).text


def test_every_field_is_escaped():
    evil = "<img src=x onerror=alert(1)>"
    bad = record(title=evil, command=evil, notes=[evil], versions={evil: evil, "fedgist": evil})
    bad["attacks"][0] |= {"attack": evil, "sees": evil, "note": evil}
    bad["noise"][0] |= {"audit": evil, "sees": evil, "canary": evil, "score": evil}
    bad["noise"][1]["blocks"][evil] = {"numbers": 1, "ratio": 1.0, "small": True}
    bad["claim"] |= {"line": evil, "odds": evil}
    before = deepcopy(bad)
    assert "<img src=x" not in render_audit(bad)
    assert bad == before  # and nothing is changed on the way


def test_the_page_is_written_whole(tmp_path):
    write_audit_page(record(title="surrogate \udc80"), tmp_path / "audit.html")
    assert "surrogate ?" in (tmp_path / "audit.html").read_text(encoding="utf-8")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/audit\.html"):
        write_audit_page(record(), tmp_path / "file" / "audit.html")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_chromium_shows_the_page(tmp_path, pages, dark):
    pixels = screenshot(tmp_path, pages["pass"], 1000, dark=dark)
    back = pixels[2, 2]
    assert back.tolist() == ([20, 24, 29] if dark else [255, 255, 255])
    assert (np.abs(pixels - back).sum(2) > 60).mean() > 0.02  # something is drawn
    assert (pixels[:, -8:] == back).all()  # and nothing runs over the right edge
    green = np.abs(pixels[:600] - ([21, 48, 29] if dark else [231, 245, 234])).sum(2) < 6
    assert green.sum() > 5000  # the style sheet is in force


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("name", ["pass", "nominal", "no claim"])
def test_chromium_on_a_phone(tmp_path, pages, name):
    check_phone(tmp_path, pages[name])
