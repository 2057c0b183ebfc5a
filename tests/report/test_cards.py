from __future__ import annotations

import json
import math

import jsonschema
import pytest
import sample_report as s
import yaml
from huggingface_hub import DatasetCard, ModelCard

from fedgist.errors import DataError
from fedgist.report.cards import privacy_card
from fedgist.report.export import write_synthetic
from fedgist.report.readme import FILES, Terms, dataset_card, model_card
from fedgist.report.record import read_json, to_json, write_json

TEXT, NUMBER = {"type": "string", "minLength": 1}, {"type": ["number", "string"]}
MAYBE = {"type": ["string", "null"]}


def closed(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


def many(item):
    return {"type": "array", "items": item}


SCHEMA = closed(
    format={"const": "fedgist-privacy-card-1"},
    follows={"type": "string", "pattern": "800-226"},
    title=TEXT,
    created={"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"},
    software=closed(fedgist=TEXT, versions={"type": "object"}),
    statement=TEXT,
    fit_for_release={"type": "boolean"},
    guarantee=closed(
        unit=closed(
            name={"enum": ["image", "person", "client"]},
            images_at_most={"type": "integer", "minimum": 1},
            text=TEXT,
        ),
        adjacency=closed(
            name={"enum": ["add-remove", "replace-one", "replace-same-class"]}, hides=TEXT
        ),
        parameters=closed(
            epsilon=NUMBER,
            epsilon_asked_for=NUMBER,
            delta={"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            epsilon_by_adjacency={"type": "object", "minProperties": 3},
        ),
        odds=TEXT,
    ),
    algorithm=closed(
        mechanism=TEXT,
        noise=closed(
            law={"enum": ["gaussian", "discrete-gaussian", None]},
            multiplier=NUMBER,
            sensitivity=NUMBER,
        ),
        sampling=TEXT,
        accountant=TEXT,
        accountant_library=closed(name={"enum": ["fedgist", "dp-accounting"]}, version=MAYBE),
        releases=many({"type": "object", "required": ["block", "bits", "noise"]}),
    ),
    utility=closed(told={"type": "boolean"}, chosen=MAYBE, heads={"type": "object"}, note=TEXT),
    implementation=closed(
        randomness={"enum": ["seed", "operating system", None]},
        sampler=MAYBE,
        floating_point=MAYBE,
    ),
    trust=closed(
        model={"enum": ["local", "central", "distributed"]},
        noise_by=TEXT,
        text=TEXT,
        simulation={"type": "boolean"},
        secure_sum={"type": ["boolean", "null"]},
    ),
    threat=closed(adversary=MAYBE, knows=MAYBE, text=TEXT),
    data_collection=closed(
        clients={"type": "integer", "minimum": 1},
        bytes_from_each_client_at_most={"type": "integer"},
        bytes_to_each_client_at_most={"type": "integer"},
        blocks=many(TEXT),
        text=TEXT,
    ),
    access_control=closed(covered={"const": False}, text=TEXT, results=TEXT),
    not_covered={"minItems": 4} | many(closed(title=TEXT, text=TEXT)),
    auditing={
        "anyOf": [
            {"type": "null"},
            closed(
                membership=many({"type": "object", "required": ["attack", "auc"]}),
                exposure_measured={"type": "boolean"},
            ),
        ]
    },
    public_sources=closed(
        track=TEXT,
        encoders=many(closed(name=TEXT, sha256={"type": "string", "pattern": "^[0-9a-f]{64}$"})),
    ),
    notes=many(TEXT),
)


def valid(card) -> bool:
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(json.loads(to_json(card)))


@pytest.mark.parametrize(
    "claim",
    [
        s.claim(),
        s.claim(noise="system"),
        s.claim(math.inf),
        s.claim(trust="local"),
        s.claim(trust="distributed", noise="system"),
        s.claim(parity=True),
    ],
)
@pytest.mark.parametrize("scores", [True, False])
def test_a_card_of_every_kind_of_claim_meets_the_schema(claim, scores):
    card = privacy_card(s.report(claim_record=claim), scores=scores)
    jsonschema.validate(json.loads(to_json(card)), SCHEMA)
    assert card["statement"] == claim["line"]
    assert card["guarantee"]["parameters"]["epsilon"] == claim["epsilon"]


@pytest.mark.parametrize("wrong", ["guarantee", "threat", "notes"])
def test_the_schema_refuses_a_card_that_lacks_a_layer(wrong):
    card = privacy_card(s.report())
    assert valid(card)
    assert not valid({k: v for k, v in card.items() if k != wrong})
    assert not valid(card | {"more": 1})


def test_every_value_is_the_records():
    digest = "ab" * 32
    record = s.report(encoders={"pca": digest}, versions={"dp-accounting": "0.6.0"})
    card, claim = privacy_card(record), record["claim"]
    assert card["algorithm"]["noise"] == {
        "law": "discrete-gaussian",
        "multiplier": claim["sigma"],
        "sensitivity": claim["sensitivity"],
    }
    assert card["algorithm"]["accountant_library"] == {"name": "fedgist", "version": "0.1.0"}
    assert card["public_sources"]["encoders"] == [{"name": "pca", "sha256": digest}]
    assert card["utility"]["heads"]["qda"] == {"accuracy": 0.8128, "ceiling": 0.8311}
    assert [a["attack"] for a in card["auditing"]["membership"]] == [
        "likelihood ratio",
        "closest synthetic image",
    ]
    assert card["implementation"]["randomness"] == "seed" and not card["fit_for_release"]


def test_a_real_release_says_so():
    record = s.report(claim_record=s.claim(noise="system", trust="distributed"), simulation=False)
    record |= {"config": {"exchange": {"secure": True}, "encoders": {"pca": "0" * 64}}}
    card = privacy_card(record)
    assert card["fit_for_release"] and card["implementation"]["randomness"] == "operating system"
    assert "OpenDP" in card["implementation"]["sampler"]
    assert card["trust"]["secure_sum"] is True
    assert card["public_sources"]["encoders"][0]["name"] == "pca"


def test_without_noise_nothing_is_promised():
    card = privacy_card(s.report(claim_record=s.claim(math.inf)))
    assert not card["fit_for_release"] and card["threat"]["adversary"] is None
    assert card["implementation"] == {"randomness": None, "sampler": None, "floating_point": None}
    assert card["algorithm"]["noise"]["law"] is None


def test_sampled_releases_name_their_sampler():
    claim = s.claim(noise="system") | {"sampling": "Poisson, each record with probability 0.2"}
    card = privacy_card(s.report(claim_record=claim, versions={"dp-accounting": "0.6.0"}))
    assert card["algorithm"]["accountant_library"]["version"] == "0.6.0"
    assert card["implementation"]["sampler"] == "exact inversion of the rounded Gaussian"


def test_a_card_to_pass_on_holds_no_exact_number():
    record = s.report()
    shown, public = privacy_card(record), privacy_card(record, scores=False)
    assert "0.8128" in to_json(shown) and "0.884" in to_json(shown)
    for number in ("0.8128", "0.8311", "0.884", "0.7544"):
        assert number not in to_json(public)
    assert any(row["title"] == "This card" for row in shown["not_covered"])
    assert not any(row["title"] in ("This card", "This report") for row in public["not_covered"])
    for table in record["partition"]["table"]:
        assert str(table) not in to_json(shown)


def test_what_is_no_report_is_refused_in_one_line():
    for record in ({}, s.report() | {"claim": 3}, s.report() | {"left": [1]}):
        with pytest.raises(DataError, match=r"^report.json must be the report of a FedGist run.*"):
            privacy_card(record)


def test_a_card_comes_back_from_its_file(tmp_path):
    card = privacy_card(s.report(claim_record=s.claim(math.inf)))
    write_json(tmp_path / "c.json", card)
    assert read_json(tmp_path / "c.json") == card


@pytest.mark.parametrize("layout", FILES)
def test_hugging_face_reads_the_data_set_card(layout):
    card = DatasetCard(dataset_card(s.report(), 10_000, layout, Terms("cc-by-4.0")))
    assert card.data.license == "cc-by-4.0"
    assert card.data.size_categories == ["10K<n<100K"]
    assert card.data.task_categories == ["image-classification"]
    assert s.claim()["line"] in card.text and "Out of scope" in card.text
    assert "Not fit for release" in card.text
    assert (card.data.to_dict().get("configs") is not None) == (
        layout in ("imagefolder", "parquet", "webdataset")
    )


def test_hostile_names_stay_in_their_place():
    classes = (*s.HOSTILE, "a\x85b\u2028c\x7f", "\udc80", "`tick`\n---\nlicense: mit")
    record = s.report(classes, title="x: {y}\u2029---")
    for text in (dataset_card(record, 5), model_card(record, "network", "decode", "")):
        block = text.split("---\n")[1]
        assert "license" not in yaml.safe_load(block)
        assert "synthetic" in block or "fedgist" in block
        text.encode()
    assert DatasetCard(dataset_card(record, 5)).data.pretty_name.endswith("x: {y}\u2029---")


def test_hugging_face_reads_the_model_card():
    text = model_card(s.report(), "network", "decode", "- `classifier.onnx`\n", Terms("mit"))
    card = ModelCard(text)
    assert card.data.library_name == "fedgist" and card.data.license == "mit"
    assert card.data.pipeline_tag == "image-classification"
    assert "[batch, 1, 28, 28]" in card.text and "`T-shirt/top`" in card.text
    assert "0.81" not in text  # scores are exact numbers


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set")
    write_synthetic(s.images(per_class=3, size=8), folder, s.claim(), "FedKT-CSD on toys")
    return folder / "synthetic"


def test_croissant_loads_the_set_it_describes(written):
    mlcroissant = pytest.importorskip("mlcroissant")
    data = mlcroissant.Dataset(written / "croissant.json")
    assert not data.metadata.ctx.issues.errors
    about = json.loads((written / "croissant.json").read_text())
    assert about["conformsTo"][0].endswith("croissant/1.1")
    assert s.claim()["line"] in data.metadata.personal_sensitive_information[0]
    assert data.metadata.data_biases and data.metadata.data_use_cases
    classes = list(data.records("classes"))
    assert [c["classes/name"].decode() for c in classes] == list(s.FASHION)
    folders = {c["classes/folder"]: c["classes/index"] for c in classes}
    rows = list(data.records("images"))
    assert len(rows) == 27 and rows[0]["images/image"].size == (8, 8)
    assert sorted(folders[r["images/folder"]] for r in rows) == sorted([*range(9)] * 3)


def test_croissant_notices_a_changed_file(written, tmp_path):
    mlcroissant = pytest.importorskip("mlcroissant")
    for path in ("croissant.json", "classes.json", "synthetic.npz"):
        (tmp_path / path).write_bytes((written / path).read_bytes())
    (tmp_path / "classes.json").write_text('{"classes": []}')
    with pytest.raises(Exception, match=r"Download\(classes.json\)"):
        list(mlcroissant.Dataset(tmp_path / "croissant.json").records("classes"))


def test_what_only_the_publisher_knows_is_left_out_until_given(written):
    about = json.loads((written / "croissant.json").read_text())
    assert not {"license", "creator", "url", "datePublished"} & about.keys()
    card = DatasetCard((written / "README.md").read_text())
    assert card.data.license is None


def test_noise_that_does_not_cover_everything_is_no_guarantee():
    claim = s.claim(parity=True)
    assert claim["epsilon"] == math.inf and claim["sigma"] > 0
    card = privacy_card(s.report(claim_record=claim))
    assert card["threat"]["adversary"] is None and not card["fit_for_release"]
    assert card["implementation"]["sampler"] and card["access_control"]["results"].startswith(
        "Keep"
    )
