"""Configuration: precedence, round trip, and messages that name the key."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedgist.config import dumps, load, make_method
from fedgist.errors import ConfigError


def test_defaults_load_and_resolve_every_method_field():
    run = load()
    assert run.data.source == "fashion-mini"
    assert run.data.clients == 10
    assert run.data.partition == "dirichlet:0.5"
    assert run.privacy.epsilon == 10
    assert run.method["name"] == "fedkt_csd"
    assert "recipe" in run.method


def test_round_trip(tmp_path):
    run = load(None, ["privacy.epsilon=inf", "method.heads=['lda']", "seed=3", "data.clients=7"])
    path = tmp_path / "run.toml"
    path.write_text(dumps(run), encoding="utf-8")
    again = load(path)
    assert again == run
    assert math.isinf(again.privacy.epsilon)
    assert make_method(again) == make_method(run)


def test_command_line_beats_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[privacy]\nepsilon = 3\n[data]\nclients = 4\n")
    run = load(path, ["privacy.epsilon=1"])
    assert (run.privacy.epsilon, run.data.clients) == (1, 4)


def test_set_takes_plain_text():
    assert load(None, ["data.partition=pathological:2"]).data.partition == "pathological:2"


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("privacy.epsilom=1", ["privacy.epsilom", "Did you mean 'epsilon'"]),
        ("method.heds=['lda']", ["method.heds", "Did you mean 'heads'"]),
        ("method.recipe.stps=3", ["method.recipe.stps", "Did you mean 'steps'"]),
        ("data.cliens=3", ["data.cliens", "Did you mean 'clients'"]),
        ("dat.clients=3", ["dat", "Did you mean 'data'"]),
        ("method.name=fedkt_cds", ["fedkt_cds", "Did you mean 'fedkt_csd'"]),
        ("method=nothing.at.all", ["nothing.at.all", "importable"]),
        ("privacy.epsilon=0", ["epsilon must be positive", "Got 0"]),
        ("privacy.epsilon=-1", ["epsilon must be positive", "Got -1"]),
        ("privacy.delta=1", ["delta must lie strictly between 0 and 1", "Got 1"]),
        ("privacy.delta=0", ["delta must lie strictly between 0 and 1", "Got 0"]),
        ("privacy.trust=none", ["privacy.trust", "local", "none"]),
        ("privacy.unit=family", ["privacy.unit", "family"]),
        ("privacy.records=2", ["privacy.records must be 1", "Got 2"]),
        ("method.radius=0", ["method.radius must be positive", "Got 0"]),
        ("method.radius=-2", ["method.radius must be positive", "Got -2"]),
        ("method.heads=['lda','lda']", ["method.heads", "distinct"]),
        ("method.heads=['cnn']", ["method.heads", "cnn"]),
        ("data.clients=0", ["data.clients", "Got 0"]),
        ("data.participation=0", ["data.participation"]),
        ("seed=x", ["seed", "x"]),
        ("seed", ["key=value", "seed"]),
        ("seed.x.y=1", ["seed"]),
    ],
)
def test_bad_settings_give_one_line_that_names_the_key(item, words):
    with pytest.raises(ConfigError) as e:
        load(None, [item])
    text = str(e.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


def test_bad_files(tmp_path):
    with pytest.raises(ConfigError, match="readable"):
        load(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[data\n")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load(broken)


def test_one_key_of_a_table_leaves_the_method_s_other_defaults():
    default = make_method(load(None, []))
    changed = make_method(load(None, ["method.recipe.flip=false"]))
    assert changed.recipe == replace(default.recipe, flip=False)
    assert changed.recipe.model == "mlp"


def test_held_out_images_are_training_images_that_no_client_has():
    from fedgist.setup import open_sites, prepare_run, test_images

    run = load(None, ["data.held_out=0.1", "data.clients=3", "method.heads=['lda']"])
    made = prepare_run(run)
    held, dealt = test_images(made), open_sites(made).together()
    whole = made.source.images("train", made.task)
    assert (len(held), len(dealt), len(whole)) == (600, 5400, 6000)
    together = torch.cat([held.pixels, dealt.pixels]).flatten(1).sum(1).sort().values
    assert torch.equal(together, whole.pixels.flatten(1).sum(1).sort().values)
    again = prepare_run(load(None, ["data.held_out=0.1", "seed=1", "method.heads=['lda']"]))
    assert not torch.equal(test_images(again).pixels, held.pixels)
    with pytest.raises(ConfigError, match="held_out must go with a source alone"):
        load(None, ["data.held_out=0.1", "data.test=digits"])
