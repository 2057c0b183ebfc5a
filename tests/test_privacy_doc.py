"""Every number in docs/privacy.md, worked out again from the library's public functions.

Tables stand in the document between ``<!-- computed: NAME -->`` and ``<!-- end -->``: `TABLES` has
a function for each. Numbers in running text are in `told`. Any other number that looks like a
result (a decimal point, a thousands separator, a per cent sign, an exponent) fails a test.

``python tests/test_privacy_doc.py --write`` rewrites the tables.
"""

import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from scipy.special import ndtr

from fedgist.agreement import Agreement, agree
from fedgist.audit.membership import FPRS, claimed
from fedgist.config import load
from fedgist.encoders import encoder_info
from fedgist.exchange.wire import sum_terms
from fedgist.experiment import expected_signal
from fedgist.method import method_class
from fedgist.methods.fedkt_csd import SHARES, FedKTCSD
from fedgist.policy import Policy
from fedgist.privacy.accounting import epsilon_of, odds, sampled_epsilon, sensitivity, sigma_for
from fedgist.privacy.claim import LAW, Privacy, summed_sigma
from fedgist.privacy.curves import epsilon_gaussian, sigma_gaussian
from fedgist.privacy.identity import Identity
from fedgist.privacy.noise import MIN_SHARE_SCALE
from fedgist.privacy.spending import epsilon_total
from fedgist.queries import MomentsQuery, SumQuery
from fedgist.report.record import read_json
from fedgist.run import Plan, plan_of
from fedgist.types import Adjacency, Round, Task

ROOT = Path(__file__).resolve().parents[1]
DOC = ROOT / "docs" / "privacy.md"
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"<!-- computed: (\w+) -->\n(.*?)\n?<!-- end -->", re.DOTALL)
NUMBER = re.compile(r"\d+(?:[.,]\d+)+|\d+e-?\d+|\d+ ?%")  # what looks like a result
NAMES = re.compile(r"\]\([^)]*\)|arXiv \d{4}\.\d{5}|doi:\S+")  # links and names of papers

DELTA = Privacy().delta
ONE: Adjacency = "replace-one"
PRIOR = 0.01  # belief that a certain image was used
TASK = Task("clothes", tuple("abcdefghij"), 1, 28)
LEVELS = (0.5, 1, 3, 5, 8, 10)
FEW = (1, 3, 10)


def table(head: Sequence[str], body: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def eps(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def short(value: float, digits: int = 0) -> str:
    """Write an exponent as the document does: 1e-5."""
    return f"{value:.{digits}e}".replace("e-0", "e-")


def share(value: float) -> str:
    return f"{100 * value:.3g} %"


@cache
def plan(name: str, **terms: Any) -> Plan:
    return plan_of(method_class(name)(), TASK, Privacy(noise="system", **terms))


def sigma(epsilon: float, delta: float = DELTA) -> float:
    return sigma_for(epsilon, delta, LAW)


def levels(label: Any, value: Callable[[float], float]) -> list[Any]:
    """Return one row: what becomes of the noise of each ε."""
    return [label, *(eps(value(e)) for e in FEW)]


def nearer(times: float) -> Callable[[float], float]:
    """Return what ε becomes when neighbours are ``times`` as far apart."""
    return lambda e: epsilon_of(sigma(e) / times, DELTA, LAW)


def readings() -> str:
    names = ("fedkt_csd", "logistic", "collab_dm")
    body = [levels(f"`{n}`", lambda e, n=n: plan(n, epsilon=e).claim.readings[ONE]) for n in names]
    return table(["ε under replace-one of", *(f"ε = {e}, add-remove" for e in FEW)], body)


def groups() -> str:
    body = [levels(k, nearer(k)) for k in (1, 2, 5, 10, 100)]
    return table(["images of one person", *(f"ε = {e} for one image" for e in FEW)], body)


def two_sites() -> str:
    body = [levels("`central`, `distributed`: both in one sum", nearer(2))]
    body += [levels("`local`: two releases", nearer(math.sqrt(2)))]
    return table(["trust", *(f"ε = {e} at each site" for e in FEW)], body)


def price() -> str:
    pairs = [(e, sigma_gaussian(e, DELTA), sigma(e)) for e in LEVELS]
    body = [[e, f"{a:.4f}", f"{b:.4f}", f"{100 * (b / a - 1):.1f} %"] for e, a, b in pairs]
    return table(["ε", "σ, continuous, exact", "σ, discrete, as used", "more noise"], body)


@cache
def agreement(sites: int, missing: int) -> Agreement:
    sets = ["privacy.trust=distributed", "privacy.noise=system", "privacy.epsilon=10"]
    run = load(None, [*sets, f"privacy.missing={missing}", "method.heads=['lda']"])
    names = (Identity.new(f"s{i}").public for i in range(sites))
    return agree(run, TASK, Identity.new("lead").public, tuple(names), {})


def left(sites: int, missing: int, colluding: int) -> float:
    """Return the ε that is left when ``colluding`` sites tell their noise shares."""
    s = agreement(sites, missing).plan.sigma * math.sqrt((sites - colluding) / (sites - missing))
    return epsilon_of(s, DELTA, LAW)


def shares() -> str:
    body = []
    for n, m in ((3, 0), (3, 1), (4, 1), (10, 0), (10, 1), (10, 3), (50, 5)):
        made = agreement(n, m)
        terms, noise = sum_terms(made, 0), summed_sigma(made.privacy, 1.0, n)
        told = [f"{noise:.3f}", terms.least, terms.threshold, max(0, terms.colluders)]
        body.append([n, m, *told, eps(left(n, m, m + 1))])
    head = ["sites", "`missing`", "noise", "quorum", "threshold", "colluders, rules broken"]
    return table([*head, "ε = 10 with one more gone"], body)


def paper(epsilon: float) -> Plan:
    return plan_of(FedKTCSD(parity="paper", features="", radius=20.0), TASK, Privacy(epsilon))


def published() -> str:
    made = [(e, paper(e)) for e in FEW]
    body = [
        [e, *map(eps, p.claim.readings.values()), eps(epsilon_of(p.sigma, DELTA, "gaussian"))]
        for e, p in made
    ]
    return table(["nominal ε", *made[0][1].claim.readings, "add-remove, were counts public"], body)


def composed() -> str:
    ks = (1, 2, 3, 5, 10)
    body = [[e, *(eps(epsilon_total(k * 0.5 / sigma(e) ** 2, DELTA)) for k in ks)] for e in FEW]
    return table(["ε of one release", *(f"{k} of them" for k in ks)], body)


def sampled() -> str:
    body = []
    for rate, z, times in ((0.01, 1.0, 1000), (0.05, 1.5, 500), (0.1, 2.0, 60)):
        asked = [Round("pool", (SumQuery(1.0, times=times, rates=(rate,)),))]
        read = [sampled_epsilon(asked, z, DELTA, accountant=a) for a in ("pld", "rdp")]
        two = sampled_epsilon(asked, z, DELTA, group=2)
        whole = epsilon_gaussian(z / math.sqrt(times), DELTA)
        body.append([rate, z, times, *map(eps, (*read, two, whole))])
    head = ["rate q", "noise", "releases", "ε (loss distribution)", "ε (Rényi)"]
    return table([*head, "ε for a replacement", "ε without sampling"], body)


def risks() -> str:
    body = []
    for e in LEVELS:
        mu, got = 1 / sigma(e), claimed(e, DELTA, LAW)
        alone = (math.expm1(e) + 2 * DELTA) / (math.exp(e) + 1)
        words = odds(e).split("odds of ")[1].split(" to 1")[0]
        told = [words, f"{alone:.3f}", f"{2 * ndtr(mu / 2) - 1:.3f}", f"{got.auc:.3f}"]
        body.append([e, *told, share(got.tpr[0]), share(got.tpr[1])])
    head = ["ε", "e^ε", "advantage, from (ε, δ) alone", "advantage", "AUC"]
    return table([*head, "TPR at 0.1 % FPR", "TPR at 1 % FPR"], body)


def after(prior: float, hit: float, false: float) -> float:
    return prior * hit / (prior * hit + (1 - prior) * false)


def posteriors() -> str:
    body = []
    for e in LEVELS:
        mu, got = 1 / sigma(e), claimed(e, DELTA, LAW)
        beyond = float(ndtr(mu / 2 - e / mu))
        at = [after(PRIOR, math.exp(e), 1.0)]
        at += [after(PRIOR, hit, false) for hit, false in zip(got.tpr, FPRS, strict=True)]
        body.append([e, *map(share, at), short(beyond, 1)])
    head = ["ε", "any evidence: at most", "a yes at 0.1 % FPR", "a yes at 1 % FPR"]
    return table([*head, "chance of evidence beyond e^ε"], body)


def attacks() -> str:
    body = []
    for case in read_json(RESULTS / "fedkt_csd_fashion.json")["accuracy"][:3]:
        for row in case["runs"][0]["membership"][:2]:
            span = f"{row['auc']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
            told = [span, f"{row['cap']:.3f}", share(row["tpr_at_1pct"])]
            body.append([case["name"], row["attack"], *told, share(row["cap_tpr_at_1pct"])])
    return table(["release", "attack", "AUC [95 %]", "cap", "TPR at 1 % FPR", "cap"], body)


def audit() -> str:
    path = RESULTS / "audit_fashion.json"
    if not path.is_file():
        return "`benchmarks/audit_fashion.toml` has no committed result yet."
    body = []
    for case in read_json(path)["cases"]:
        noise = [row["epsilon_low"] for row in case["noise"] if "epsilon_low" in row]
        seen = [row for row in case["attacks"] if row["sees"].startswith("the final classifier")]
        best = max(seen, key=lambda row: row["auc"], default={})
        told = [f"{best['attack']}: {best['auc']:.3f}" if best else "–"]
        told += [f"{best['claim_cap']:.3f}" if best.get("claim_cap") else "–"]
        low = eps(max(map(float, noise))) if noise else "–"
        body.append([case["name"], eps(float(case["claim"]["epsilon"])), low, *told, case["state"]])
    head = ["run", "ε claimed", "ε at least, from its noise", "best on a classifier, AUC"]
    return table([*head, "cap of the claim", "verdict"], body)


def needed(block: str, d: int, e: float) -> str:
    m, s, p, n = SHARES["both"] if block == "class covariances" else FedKTCSD().feature_shares
    signal = expected_signal(MomentsQuery(1.0, d, 10, m, s, p, n), sigma(e))
    found = re.search(rf"{block} from ([\d,]+) ", signal)
    assert found
    return found[1]


def sizes() -> str:
    asked = [("class means", 512, "in each class")]
    asked += [("pooled covariance", d, "in all") for d in (32, 64, 128, 256, 512)]
    asked += [("class covariances", 128, "in each class")]
    body = [[f"{b}, d = {d}, {where}", *(needed(b, d, e) for e in FEW)] for b, d, where in asked]
    return table(["images from which it rises above its noise", *(f"ε = {e}" for e in FEW)], body)


def bought() -> str:
    cases = read_json(RESULTS / "sweeps_fashion.json")["accuracy"]
    found = {row["name"]: row["mean"] for row in cases}
    level = {e: int(needed("pooled covariance", 512, e).replace(",", "")) for e in (1, 10)}
    body = []
    for n in (100, 300, 1000, 3000, 6000):
        line: list[str] = [f"{10 * n:,}"]
        for e in level:
            mean = found[f"images a class = {n}, ε = {e}"]
            line += [f"{10 * n / level[e]:.2g}", f"{100 * (mean['lda_ceiling'] - mean['lda']):.1f}"]
        body.append(line)
    head = [x for e in level for x in (f"ε = {e}: times the level", "points lost")]
    return table(["images in all", *head], body)


def deltas() -> str:
    ds = (1e-5, 1e-6, 1e-7, 1e-8, 1e-9)
    read = [(e, [eps(epsilon_of(sigma(e), d, LAW)) for d in ds]) for e in FEW]
    more = [(e, [f"{sigma(e, d) / sigma(e):.2f} times" for d in ds]) for e in FEW]
    body = [[f"ε of the noise of ε = {e}, δ = {short(DELTA)}", *row] for e, row in read]
    body += [[f"noise to keep ε = {e}", *row] for e, row in more]
    return table(["", *(f"δ = {short(d)}" for d in ds)], body)


def encoders() -> str:
    body = []
    for name in ("pca", "gist-ae", "dct", "scattering", "random-conv:0"):
        info = encoder_info(name)
        fitted = f"{info['fitted_on']:,}" if "fitted_on" in info else "none"
        exact = "by construction" if info["exact"] else "at one fixed batch shape"
        body.append([f"`{name}`", info["dim"], info["track"], fitted, exact])
    head = ["encoder", "numbers", "track", "public images", "a row is the same in any batch"]
    return table(head, body)


FIRST = (readings, groups, two_sites, price, shares, published, composed, sampled, risks)
SECOND = (posteriors, attacks, audit, sizes, bought, deltas, encoders)
TABLES: dict[str, Callable[[], str]] = {f.__name__: f for f in (*FIRST, *SECOND)}


def told() -> list[tuple[str, tuple[Any, ...]]]:
    """Return phrases of the document and the values in them."""
    base, replaced = plan("fedkt_csd", epsilon=10), plan("fedkt_csd", epsilon=10, adjacency=ONE)
    old = paper(10)
    classic = math.sqrt(2 * math.log(1.25 / DELTA)) / 10
    noise, asked = 0.7849, method_class("ndpdc")().plan(TASK)
    distilled = [sampled_epsilon(asked, noise, DELTA, group=g) for g in (1, 2)]
    hit = claimed(10, DELTA, LAW).tpr[1]
    assert 0.3 < hit < 0.36  # "a third of the used images"
    sure = after(PRIOR, hit, FPRS[1])
    local = tuple(summed_sigma(Privacy(trust="local"), 1, n) for n in (10, 100))
    first, decoded = similarities()
    many, few = (float(needed("class covariances", d, 10).replace(",", "")) for d in (256, 64))
    one = 100 * FPRS[1]
    return [
        *((phrase, (short(DELTA),)) for phrase in ("δ = {},", "(10, {})", "default {} makes")),
        ("takes {:.2f} times the noise", (replaced.sigma / base.sigma,)),
        ("*public* norms ({} for codes", (FedKTCSD().clip_quantile,)),
        ("‖u‖ ≤ L (`levels`, {})", (FedKTCSD().levels,)),
        ("costs {:g} % of the squared", (100 * SHARES["both"][3],)),
        ("√(2 ln(1.25/δ))/ε is used", ()),
        ("is worth ε = {:.2f}", (epsilon_gaussian(classic, DELTA),)),
        ("Shares below s = {:g} are refused", (MIN_SHARE_SCALE,)),
        ("this is {:.0e}, and", (tau(MIN_SHARE_SCALE, 1000),)),
        ("ε = 10 is ε = {:.2f},", (old.claim.readings["replace-same-class"],)),
        ("with {:.1f} % less noise", (100 * (1 - base.sigma / old.sigma),)),
        ("asks {} times under", (["seven"][len(plan("logistic", epsilon=10).rounds) - 7],)),
        ("with noise {} `ndpdc` has ε = {:.2f} under add/remove", (noise, distilled[0])),
        ("and {:.0f} under `replace-one`", (distilled[1],)),
        ("bounds one task: {:g} and {}", (Policy().max_epsilon, short(Policy().max_delta))),
        ("at SSIM {:.2f} where the upload itself has −{:.2f}", (decoded, -first)),
        ("be {} to 1,", (odds(10).split("odds of ")[1].split(" to 1")[0],)),
        ("*TPR at {:g} % FPR*: of the used images found while {:g} % of", (one, one)),
        ("a belief of {:g} %", (100 * PRIOR,)),
        ("yes at {:g} % FPR turns {:g} % into {:.0f} %", (one, 100 * PRIOR, 100 * sure)),
        ("images at {:g} % false alarms", (one,)),
        ("second moment from σ d^{:.1f}/√share", (math.log(many / few, 4),)),
        ("below the level of {}", (needed("class means", 512, 1),)),
        ("n · δ = {:g} for a thousand images, {:g} for ten", (DELTA * 1e3, DELTA * 1e4)),
        ("{:.1f} for sixty thousand", (DELTA * 6e4,)),
        ("{:.2f} times the noise with 10 sites and {:.2f} times with 100", local),
    ]


def tau(scale: float, sites: int) -> float:
    """Return how far a sum of discrete Gaussian shares is from one (Kairouz, Liu, Steinke 2021)."""
    return 10 * sum(math.exp(-2 * (math.pi * scale) ** 2 * k / (k + 1)) for k in range(1, sites))


def similarities() -> tuple[float, ...]:
    """Return the mean SSIM of uploads of FedSumUp, and of what the best decoder makes of them."""
    case = read_json(RESULTS / "fedsumup_table.json")["accuracy"][0]
    rows = [{r["name"]: r["ssim"] for r in x["exposure"]["rows"]} for x in case["runs"]]
    return tuple(sum(r[k] for r in rows) / len(rows) for k in ("upload", "decoder, all rounds"))


def document() -> str:
    return DOC.read_text("utf-8")


def prose(text: str) -> str:
    return NAMES.sub(" ", " ".join(BLOCK.sub(" ", text).split()))


@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str) -> None:
    stands = dict(BLOCK.findall(document()))
    assert stands.get(name) == TABLES[name](), f"run python {Path(__file__).name} --write"


def test_running_text_says_what_the_library_says_and_no_other_number() -> None:
    text = rest = prose(document())
    for said in [phrase.format(*values) for phrase, values in told()]:
        assert said in text, f"the document must say: {said}"
        rest = rest.replace(said, " ")
    assert NUMBER.findall(rest) == [], "put these into `told` or a table"
    assert sorted(name for name, _ in BLOCK.findall(document())) == sorted(TABLES)


@pytest.mark.parametrize("added", ["ε is 3.7", "of 12,000 images", "in 40 % of cases", "1e-7"])
def test_an_untested_number_is_seen(added: str) -> None:
    assert NUMBER.search(prose(f"Some text, {added}, and more."))


def test_links_lead_somewhere() -> None:
    text = document()
    slugs = {
        file: {
            re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-")
            for h in re.findall(r"^#+ (.+)$", (DOC.parent / file).read_text("utf-8"), re.MULTILINE)
        }
        for file in {f or DOC.name for f, _ in re.findall(r"\]\(([^)#]*)(#[^)]*)?\)", text)}
    }
    for file, anchor in re.findall(r"\]\(([^)#]*)(#[^)]*)?\)", text):
        assert not anchor or anchor[1:] in slugs[file or DOC.name], (file, anchor)


def test_what_the_text_says_of_adjacency() -> None:
    claim = plan("fedkt_csd", epsilon=10).claim
    assert claim.readings["replace-one"] == claim.readings["replace-same-class"]
    assert sensitivity(SumQuery(1.0), ONE) == 2 * sensitivity(SumQuery(1.0), "add-remove")
    assert Privacy().missing == 0 and "central" not in Policy().trust


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_sites_that_stand_against_a_coordinator_that_breaks_the_rules(missing: int) -> None:
    enough, few = (sum_terms(agreement(3 * missing + i, missing), 0) for i in (1, 0))
    assert enough.colluders >= missing > few.colluders


def computed(block: re.Match[str]) -> str:
    return f"<!-- computed: {block[1]} -->\n{TABLES[block[1]]()}\n<!-- end -->"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(f"usage: python {sys.argv[0]} --write")
    DOC.write_text(BLOCK.sub(computed, document()), encoding="utf-8")
