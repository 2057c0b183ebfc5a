"""A real deployment on loopback: the commands of docs/deploy-flower.md as they stand there.

SuperLink and three SuperNodes with TLS and node keys; one SuperNode is killed in the middle of the
secure sum; the result must be the local exchange's, byte for byte.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedgist.agreement import Agreement
from fedgist.data import open_source
from fedgist.exchange.local import LocalExchange
from fedgist.report.folder import write_outcome
from fedgist.run import drive

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"<!-- block: (\w+) -->\n```\w+\n(.*?)```", re.DOTALL)
PATIENCE = 300.0  # seconds after which a test that hangs has failed


def blocks() -> dict[str, str]:
    return dict(BLOCK.findall((ROOT / "docs" / "deploy-flower.md").read_text()))


def free_ports(n: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [s.getsockname()[1] for s in held]
    for s in held:
        s.close()
    return ports


class Machine:
    """Runs the document's blocks in one folder; ends all it started, and shows logs on failure."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.blocks = folder, blocks()
        self.link, self.proxy, *nodes = free_ports(5)
        names = ("NORTH_PORT", "SOUTH_PORT", "WEST_PORT")
        self.env = os.environ | {n: str(p) for n, p in zip(names, nodes, strict=True)}
        self.env |= {
            "SUPERLINK": f"127.0.0.1:{self.link}",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
            "HOME": str(folder),
        }
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def do(self, name: str) -> None:
        self.start(name, self.blocks[name])
        assert self.wait(name) == 0, f"{name}\n{self.logs()}"

    def start(self, name: str, script: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                ["bash", "-eu", "-c", script],
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, name: str) -> int:
        try:
            return self.running[name].wait(PATIENCE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{name} hangs\n{self.logs()}")

    def until(self, what: str, *names: str) -> None:
        """Wait for a file, while processes live."""
        end = time.monotonic() + PATIENCE
        while not list(self.folder.glob(what)):
            dead = [n for n in names if self.running[n].poll() is not None]
            assert not dead and time.monotonic() < end, f"{what}: {dead}\n{self.logs()}"
            time.sleep(0.1)

    def kill(self, name: str) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.running[name].pid, signal.SIGKILL)

    def logs(self) -> str:
        texts = []
        for path in sorted(self.folder.glob("*.log")):
            lines = [
                line
                for line in path.read_text(errors="replace").splitlines()
                if "uvicorn.access" not in line
            ]
            texts.append("\n".join([f"--- {path.name}", *lines[-30:]]))
        return "\n".join(texts)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    yield made
    for name in made.running:
        made.kill(name)
    for process in made.running.values():
        process.wait(10)


def refused(machine: Machine, path: str) -> int:
    """Return the status of a request through the proxy."""
    context = ssl.create_default_context(cafile=str(machine.folder / "ca.pem"))
    url = f"https://127.0.0.1:{machine.proxy}{path}"
    try:
        kind = {"Content-Type": "application/protobuf"}
        request = urllib.request.Request(url, data=b"", method="POST", headers=kind)
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as e:
        return e.code


def through_nginx(machine: Machine) -> None:
    """Put the document's proxy before the SuperLink, with ports that are free."""
    text = machine.blocks["nginx"]
    assert "8443" in text and "127.0.0.1:8000" in text
    text = text.replace("8443", f"127.0.0.1:{machine.proxy}").replace(":8000", f":{machine.link}")
    (machine.folder / "nginx.conf").write_text(text)
    machine.start("nginx", "exec nginx -p $PWD -c nginx.conf -e stderr")
    machine.env["ENTRANCE"] = f"127.0.0.1:{machine.proxy}"
    end = time.monotonic() + 30
    while True:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", machine.proxy), 1).close()
            break
        assert time.monotonic() < end, machine.logs()
        time.sleep(0.1)
    assert refused(machine, "/v1/control/start-run") == 403
    assert refused(machine, "/v1/control/register-node") == 403
    assert refused(machine, "/v1/fleet/../control/register-node") == 403
    assert refused(machine, "/v1/fleet/%2e%2e/control/register-node") == 403
    assert refused(machine, "/v1/runtime/get-nodes") == 403
    assert refused(machine, "/v1/fleet/pull-messages") == 401  # let through, without a node's key


def expected(machine: Machine) -> bytes:
    """Return the classifier's file that the local exchange leads to without the third site."""
    a = Agreement.load(machine.folder / "task.toml")
    loaders = [
        lambda i=i: open_source(f"fashion-mini@{i}/3").images("train", a.task) for i in (1, 2, 3)
    ]
    names = [s.name for s in a.roster]
    local = LocalExchange(
        a.built, a.task, a.privacy, a.plan.sigma, loaders, names, seed=a.seed, lost=(2,)
    )
    outcome = drive(a.built, a.task, local, a.plan.rounds, a.seed)
    folder = machine.folder / "expected"
    folder.mkdir()
    title = f"{a.method['name']} on {a.task.name}".replace("_", "-")
    write_outcome(outcome, folder, a.task, a.plan.claim, title)
    return (folder / "classifier.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")  # as its processes: sums are the same anyway, heads are not
def test_the_guide_with_one_site_killed_equals_the_local_exchange(machine: Machine) -> None:
    for name in ("switches", "certificates", "keys", "task"):
        machine.do(name)
    machine.start("superlink", machine.blocks["superlink"])
    machine.do("register")
    if shutil.which("nginx"):
        through_nginx(machine)
    for site in ("north", "south", "west"):
        machine.start(site, machine.blocks[site])
    machine.start("run", machine.blocks["run"])
    machine.until("coordinator/*/0.shares.west.letter", "superlink", "run", "west")
    machine.kill("west")
    assert machine.wait("run") == 0, machine.logs()
    result = json.loads((machine.folder / "result.result.json").read_text())
    assert result["status"] == "finished" and set(result["nodes"]) == {"north", "south", "west"}
    assert any("west, step 0.upload" in line for line in result["faults"]), result
    got = (machine.folder / "result" / "classifier.safetensors").read_bytes()
    assert got == expected(machine)
