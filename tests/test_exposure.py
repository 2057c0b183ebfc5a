"""A run that attacks its own uploads: the record, the picture, the page."""

from __future__ import annotations

import json

import pytest

from fedgist.config import load
from fedgist.experiment import execute

BASE = [
    "data.source=digits",
    "data.limit=300",
    "data.clients=2",
    "privacy.epsilon=inf",
    "evaluation.ceiling=false",
    "evaluation.inversion=true",
    "evaluation.decoder_steps=3",
]
SMALL = ["method.recipe.steps=4", "method.recipe.width=4"]


def attacked(method, *more, folder=None):
    return execute(load(None, [*BASE, f"method.name={method}", *more]), folder)


def test_the_report_says_what_uploads_show(tmp_path):
    options = ["method.side=4", "method.rounds=2", "method.least_gain=0", "method.improve.steps=1"]
    result = attacked("fedsumup", *options, *SMALL, folder=tmp_path / "out")
    found = json.loads((tmp_path / "out" / "report.json").read_text())["exposure"]
    names = [a["name"] for a in found["rows"]]
    assert {"upload", "MoIA", "decoder", "decoder, one round old", "decoder, all rounds"} <= set(
        names
    )
    assert found["attacked"] <= 100
    assert found["identified"]["white box"] > 0.9, "a gallery through the compressor finds all"
    assert any(a["attack"] == "loss threshold" for a in result.report["membership"])
    page = (tmp_path / "out" / "report.html").read_text()
    assert found["headline"] in page.replace("&#39;", "'")
    assert "data:image/png;base64," in page
    assert (tmp_path / "out" / "exposure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("method", ["downsample", "dp_pix"])
def test_fixed_transforms_are_attacked_too(method):
    found = attacked(method, *SMALL).report["exposure"]
    names = {a["name"] for a in found["rows"]}
    assert "decoder" in names
    assert ("MoIA" in names) == (method == "downsample"), "noise has no gradient"


def test_activations_are_attacked_by_a_decoder():
    found = attacked("sfl", "method.recipe.width=4", "method.recipe.steps=2").report["exposure"]
    assert [a["name"] for a in found["rows"]] == ["decoder"]


def test_uploads_are_no_distilled_images():
    """The audit by canaries is for images that stand for many; here each is one of the client's."""
    more = ["evaluation.inversion=false", "evaluation.membership=true", "method.side=4"]
    assert attacked("downsample", *more, *SMALL).report["membership"] == []


def test_noised_statistics_are_no_uploads():
    options = ["method.release=statistics", "privacy.epsilon=5", "method.rounds=1", "method.side=4"]
    assert "exposure" not in attacked("fedsumup", *options, *SMALL).report


@pytest.mark.parametrize("method", ["fedavg", "fedkt_csd"])
def test_methods_that_send_no_images_are_left_alone(method):
    more = (
        ["method.heads=['lda']", "method.features=scattering:32"] if method == "fedkt_csd" else []
    )
    more += ["method.rounds=1"] if method == "fedavg" else []
    assert "exposure" not in attacked(method, *more).report
