"""The task file: one hash, read back equal, and every slip named."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from fedgist.agreement import Agreement, agree
from fedgist.config import load
from fedgist.errors import ConfigError, EncoderError, PrivacyError
from fedgist.policy import Policy
from fedgist.privacy.identity import Identity
from fedgist.types import Task

KEYS = [Identity.new(n).public for n in ("lead", "a", "b", "c", "d")]
TASK = Task("toy", ("x", "y"), channels=1, size=8, max_images=500)
BASE = ["method.features=scattering:32", "method.heads=['lda']", "privacy.trust=distributed"]


def make(sets=(), sites=4, **terms):
    return agree(load(None, [*BASE, *sets]), TASK, KEYS[0], KEYS[1 : 1 + sites], terms)


def written(agreement, path):
    path.write_text(agreement.dumps())
    return Agreement.load(path)


def test_read_back_equal_with_the_same_hash(tmp_path):
    made = make(["privacy.missing=1", "privacy.epsilon=3"], deadline="2030-01-01T00:00:00Z")
    again = written(made, tmp_path / "task.toml")
    assert again == made and again.digest == made.digest
    assert again.plan.claim.epsilon == pytest.approx(3)
    assert made.digest in made.dumps().splitlines()[0]


def test_layout_does_not_change_the_hash_but_any_value_does(tmp_path):
    made = make()
    path = tmp_path / "task.toml"
    text = made.dumps()
    path.write_text("# a note\n\n" + text.replace(" = ", "   =   "))
    assert Agreement.load(path).digest == made.digest
    for old, new in (
        ("epsilon = 10.0", "epsilon = 9.0"),
        ('name = "toy"', 'name = "toy2"'),
        ("seed = 0", "seed = 1"),
        ("threshold = 3", "threshold = 4"),
    ):
        assert old in text
        path.write_text(text.replace(old, new))
        assert Agreement.load(path).digest != made.digest


def test_two_tasks_with_one_content_are_two():
    assert make().digest != make().digest


def test_everybody_plans_the_same(tmp_path):
    made = make()
    again = written(made, tmp_path / "task.toml")
    assert again.plan == made.plan
    assert again.built == made.built
    again.check_encoders()


def test_another_encoder_is_refused(tmp_path):
    made = make()
    (digest,) = made.encoders.values()
    path = tmp_path / "task.toml"
    path.write_text(made.dumps().replace(digest, "0" * 64))
    with pytest.raises(EncoderError, match="must be the task's"):
        Agreement.load(path).check_encoders()
    path.write_text(made.dumps().replace("scattering:32", "scattering:64", 1))
    with pytest.raises(EncoderError, match="must pin the encoders"):
        Agreement.load(path).check_encoders()


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("format = 1", "format = 2", "format is wrong"),
        ("seed = 0", "seed = -1", "seed is wrong"),
        ("seed = 0", "sead = 0", "unknown key sead. Did you mean 'seed'"),
        ("threshold = 3", "threshold = 9", "at most the 4 sites"),
        ('trust = "distributed"', 'trust = "everybody"', "privacy"),
        ("secure = true", "secure = false", "must travel in a secure sum"),
        ("channels = 1", "channels = 2", "task.channels is wrong"),
        ('name = "fedkt_csd"', 'name = "fedkt"', "method.name must be one of"),
    ],
)
def test_slips_are_named(tmp_path, old, new, match):
    text = make().dumps()
    assert old in text
    path = tmp_path / "task.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises((ConfigError, PrivacyError), match=match):
        _ = Agreement.load(path).plan


def test_a_file_that_is_none(tmp_path):
    for content in (b"", b"\xff\xfe", b"[", b"id = 1"):
        (tmp_path / "t.toml").write_bytes(content)
        with pytest.raises(ConfigError, match=r"t\.toml"):
            Agreement.load(tmp_path / "t.toml")
    with pytest.raises(ConfigError, match="readable"):
        Agreement.load(tmp_path / "none.toml")


def test_names_and_keys_are_each_one_s_own():
    with pytest.raises(ConfigError, match="names of their own"):
        agree(load(None, BASE), TASK, KEYS[0], [KEYS[1], KEYS[1]], {})
    twin = Identity.new("lead").public
    with pytest.raises(ConfigError, match="names of their own"):
        agree(load(None, BASE), TASK, KEYS[0], [KEYS[1], twin], {})
    with pytest.raises(ConfigError, match="at least two sites"):
        make(sites=1)


@pytest.mark.parametrize("sites", [2, 3, 4, 5, 10, 64, 300])
@pytest.mark.parametrize("missing", [0, 1])
def test_default_terms_are_safe_for_any_number_of_sites(sites, missing):
    keys = [Identity.new(f"s{i}").public for i in range(sites)]
    made = agree(load(None, [*BASE, f"privacy.missing={missing}"]), TASK, KEYS[0], keys, {})
    terms = made.exchange
    circle = sites if terms.degree is None else terms.degree + 1
    assert circle < 2 * terms.threshold <= 2 * circle
    assert terms.quorum == sites - missing
    assert (terms.degree is None) == (sites <= 200)


def test_deadline(tmp_path):
    now = datetime.now(UTC)
    assert make(deadline=(now - timedelta(minutes=1)).isoformat()).overdue
    assert not make(deadline=(now + timedelta(minutes=1)).isoformat()).overdue
    assert not make().overdue


def test_the_claim_says_who_sees_what():
    assert "inside a secure sum" in make().plan.claim.noise_by
    assert not any("secure sum" in n for n in make().plan.claim.notes)
    central = make(["privacy.trust=central"])
    assert "exact total" in central.plan.claim.noise_by
    plain = make(["privacy.trust=central"], secure=False)
    assert "exact sums" in plain.plan.claim.noise_by


def test_policy_file(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text("max_epsilon = 2.0\n")
    with pytest.raises(PrivacyError, match=r"policy, max_epsilon = 2.0. Got 9\.99|Got 10"):
        Policy.load(path).check(make(["privacy.noise=system"]))
    path.write_text("max_epsilom = 2.0\n")
    with pytest.raises(ConfigError, match="Did you mean 'max_epsilon'"):
        Policy.load(path)
    Policy().check(make(["privacy.noise=system", "privacy.epsilon=9.5"]))


def changed(agreement, **claim):
    """Return an agreement whose plan claims something else."""
    plan = agreement.plan
    agreement.__dict__["plan"] = replace(plan, claim=replace(plan.claim, **claim))
    return agreement


@pytest.mark.parametrize(
    ("claim", "rule"),
    [
        ({"sigma": 0.0}, "noise under an ε"),
        ({"accountant": "privacy loss distribution of the Poisson-sampled Gaussian"}, "accountant"),
        ({"track": "private images"}, "encoders"),
        ({"epsilon": 11.0}, "max_epsilon"),
        ({"delta": 1e-3}, "max_delta"),
    ],
)
def test_what_no_claim_may_rest_on_is_refused(claim, rule):
    good = ["privacy.noise=system", "privacy.epsilon=9.5"]
    assert all(r.kept for r in Policy().rules(make(good)))
    broken = [r.name for r in Policy().rules(changed(make(good), **claim)) if not r.kept]
    assert broken == [rule]
    with pytest.raises(PrivacyError, match=rule):
        Policy().check(changed(make(good), **claim))


def test_exact_counts_under_an_epsilon_are_refused():
    a = make(["privacy.noise=system", "privacy.epsilon=9.5"])
    (rnd,) = a.plan.rounds
    queries = tuple(
        replace(q, exact_counts=True, count=0.0, mean=q.mean + q.count) for q in rnd.queries
    )
    a.__dict__["plan"] = replace(a.plan, rounds=(replace(rnd, queries=queries),))
    assert [r.name for r in Policy().rules(a) if not r.kept] == ["counts"]
    assert all(isinstance(v, str | float | int) for r in Policy().rules(a)
               for v in r.record().values())  # fmt: skip


def test_the_documented_policy_is_the_default(tmp_path):
    from pathlib import Path

    text = (Path(__file__).parents[1] / "docs" / "deploy.md").read_text()
    block = next(b.split("```")[0] for b in text.split("```toml\n")[1:] if "max_epsilon" in b)
    assert Policy(**tomllib.loads(block)) == Policy()
