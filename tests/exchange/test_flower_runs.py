"""Whole runs over Flower's messages, in one process, are the local exchange's bit for bit."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("flwr")

from federation_tools import federation, outcome_bytes
from fedgist.errors import FedGistError, ProtocolError
from fedgist.exchange.flower import FlowerTransport, client_app, find_sites, server_app
from fedgist.flower_app.coordinator import coordinate_over, result_file
from fedgist.method import method_names
from flower_tools import InProcessGrid, Node
from quick_methods import QUICK

# One head is enough here.
FAST_METHODS = QUICK | {"fedkt_csd": ["method.features=scattering:32", "method.heads=['lda']"]}
FAST = 0.01


@pytest.fixture
def parts(images):
    return [images.take(torch.arange(60) % 3 == i) for i in range(3)]


def grid_of(fed, ended=None, **faults) -> InProcessGrid:
    """Return one node for each site; each answers as the worker would, but in this process."""

    def apart(site):
        def answer(place, request, limit):
            try:
                text = site.ended(request)
            except ProtocolError:
                pass
            else:
                (ended if ended is not None else []).append(text)
                return b""
            try:
                return site.answer(request)
            except FedGistError as e:
                return site.fault(request, e)

        return answer

    nodes = {}
    for i, m in enumerate(fed.members):
        key = fed.folder / f"{m.name}.key"
        if not key.exists():
            m.save(key)
        config = {"task": "task.toml", "key": str(key), "data": "somewhere"}
        app = client_app(apart(fed.sites[m.name]))
        nodes[900 - i] = Node(app, config, faults.get(m.name.replace("-", "_"), {}))
    return InProcessGrid(nodes)


def run(fed, grid, patience=0.2):
    a, said = fed.agreement, []
    sites = find_sites(grid, a.roster, 5.0, say=said.append, poll=FAST)
    assert not said
    return fed.run(FlowerTransport(grid, sites, patience, FAST))


@pytest.mark.parametrize("trust", ["local", "central", "distributed"])
@pytest.mark.parametrize("name", method_names())
def test_every_method_equals_the_local_exchange(tmp_path, task, parts, name, trust):
    sets = [f"method.name={name}", *FAST_METHODS.get(name, []), f"privacy.trust={trust}"]
    fed = federation(tmp_path, task, parts, sets, base=["privacy.noise=seeded"])
    if trust != "local" and not any(r.noised for r in fed.agreement.plan.rounds):
        pytest.skip("who adds noise matters to sums only")
    ended: list[str] = []
    outcome, exchange = run(fed, grid_of(fed, ended))
    assert outcome_bytes(outcome) == outcome_bytes(fed.local(parts))
    assert not exchange.faults and ended == ["finished"] * 3


@pytest.mark.parametrize(
    ("k", "fault"), enumerate(["garbage", "error", "killed", "silent", "error"])
)
def test_a_site_lost_at_any_message_in_any_way(tmp_path, task, parts, k, fault):
    """Before its upload is in, the site is left out; after that, its images count."""
    sets = ["privacy.trust=distributed", "privacy.missing=1"]
    fed = federation(tmp_path, task, parts, sets, {"threshold": 2})
    gone = {i: fault for i in range(k, 6)}
    outcome, exchange = run(fed, grid_of(fed, site_1=gone))
    lost = (1,) if k <= 2 else ()
    assert outcome_bytes(outcome) == outcome_bytes(fed.local(parts, lost=lost))
    assert {name for _, name in exchange.faults} == {"site-1"}
    assert all(": " in why for why in exchange.faults.values())


def test_a_run_that_was_stopped_goes_on_in_another_run_of_flower(tmp_path, task, parts):
    sets = ["privacy.trust=distributed", "privacy.missing=1"]
    fed = federation(tmp_path, task, parts, sets, {"threshold": 2})
    broken = {i: "silent" for i in range(1, 9)}
    with pytest.raises(ProtocolError, match="no answer in"):
        run(fed, grid_of(fed, site_0=broken, site_1=broken))
    outcome, _ = run(fed, grid_of(fed))
    assert outcome_bytes(outcome) == outcome_bytes(fed.local(parts))


# --- the coordinator's app ---------------------------------------------------------------------


def files_of(fed, folder):
    """Write what a coordinator has on disk; return the run's configuration."""
    fed.leader.save(folder / "leader.key")
    (folder / "task.toml").write_text(fed.agreement.dumps())
    return {
        "task": str(folder / "task.toml"),
        "key": str(folder / "leader.key"),
        "out": str(folder / "out"),
        "state": str(folder / "state"),
        "test": "",
        "wait": 5.0,
    }


def call(grid, config):
    from flwr.app import Context, RecordDict

    context = Context(grid.run.run_id, 1, {}, RecordDict(), config)
    server_app(coordinate_over)(grid, context)


def test_the_app_runs_a_task_and_writes_how_it_ended(tmp_path, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"], {"patience": 5.0})
    grid = grid_of(fed)
    grid.nodes[7] = Node(client_app(), {})
    config = files_of(fed, tmp_path)
    call(grid, config)
    result = json.loads(result_file(tmp_path / "out").read_text())
    assert result["status"] == "finished" and result["error"] is None
    assert result["run"] == str(grid.run.run_id)
    assert result["nodes"] == {"site-0": "900", "site-1": "899", "site-2": "898"}
    assert (tmp_path / "out" / "report.json").is_file()


def test_an_app_that_fails_says_so_in_the_file_and_to_flower(tmp_path, task, parts):
    terms = {"patience": 0.1, "quorum": 3}
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"], terms)
    grid = grid_of(fed, site_2={0: "error"})
    config = files_of(fed, tmp_path)
    with pytest.raises(ProtocolError, match="site-2"):
        call(grid, config)
    result = json.loads(result_file(tmp_path / "out").read_text())
    assert result["status"] == "failed"
    assert "site-2 (the app failed there (Flower's code 2): read the log" in result["error"]


def test_an_app_without_its_settings_says_which(tmp_path, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"])
    with pytest.raises(FedGistError, match="must give task, out"):
        call(grid_of(fed), {"task": "", "key": "k", "out": "", "wait": 1.0})
