"""`fedgist doctor`: one line for each thing, and the remedy beside what is wrong."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading

import pytest

from fedgist.agreement import agree
from fedgist.config import load
from fedgist.doctor import examine
from fedgist.privacy.identity import Identity
from fedgist.types import Task

TASK = Task("toy", ("0", "1"), channels=1, size=8, max_images=500)


def by_name(checks):
    return {c["what"]: c for c in checks}


@pytest.fixture
def site(tmp_path):
    """A task file, the keys of coordinator and site, an empty mailbox."""
    leader, member, other = (Identity.new(n) for n in ("lead", "north", "south"))
    run = load(None, ["method.heads=['qda']", "privacy.trust=distributed", "privacy.noise=system"])
    run = run.model_copy(update={"method": run.method | {"features": ""}})
    agreement = agree(run, TASK, leader.public, [member.public, other.public], {})
    (tmp_path / "task.toml").write_text(agreement.dumps())
    for identity in (leader, member):
        identity.save(tmp_path / f"{identity.name}.key")
    (tmp_path / "share").mkdir()
    return tmp_path


def test_all_is_well(site):
    checks = examine(
        task=site / "task.toml",
        key=site / "north.key",
        mailbox=site / "share",
        ledger=site / "ledger.sqlite",
    )
    found = by_name(checks)
    assert {c["state"] for c in checks} == {"good"}
    assert found["roster"]["found"] == "site 0 of the task"
    assert "fedgist" in found["versions"]["found"]
    assert list((site / "share").iterdir()) == []  # the probe is gone


def test_each_fault_is_named(site):
    Identity.new("east").save(site / "east.key")
    (site / "policy.toml").write_text("max_epsilon = 1.0\n")
    (site / "file").write_text("")
    found = by_name(
        examine(
            task=site / "task.toml",
            key=site / "east.key",
            policy=site / "policy.toml",
            mailbox=site / "file",
            data="no-such-data",
            ledger=site / "policy.toml",
        )
    )
    bad = {k for k, c in found.items() if c["state"] == "bad"}
    assert bad == {"roster", "policy", "mailbox", "data", "ledger"}
    assert "max_epsilon" in found["policy"]["found"]
    assert "no-such-data" in found["data"]["found"]
    assert found["mailbox"]["remedy"]


def test_a_key_that_others_can_read_and_a_task_that_is_none(site):
    (site / "north.key").chmod(0o644)
    (site / "task.toml").write_text("x = 1")
    found = by_name(
        examine(task=site / "task.toml", key=site / "north.key", ledger=site / "l.sqlite")
    )
    assert found["task"]["state"] == found["key"]["state"] == "bad"
    assert "chmod 600" in found["key"]["found"]


def test_a_port_nobody_listens_on():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    found = by_name(examine(server=f"127.0.0.1:{port}"))
    assert found["port"]["state"] == "bad" and "firewall" in found["port"]["remedy"]
    assert by_name(examine(server="nowhere"))["server"]["state"] == "bad"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_tls_in_one_line_each(tmp_path):
    def certificate(name, alternative):
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
             "-nodes", "-keyout", tmp_path / f"{name}.key", "-out", tmp_path / f"{name}.pem",
             "-days", "2", "-subj", "/CN=x", "-addext", f"subjectAltName={alternative}"],
            check=True, capture_output=True,
        )  # fmt: skip

    certificate("right", "IP:127.0.0.1")
    certificate("wrong", "DNS:elsewhere.example")

    def look(served, trusted):
        with serving(tmp_path, served) as port:
            certificate_file = None if trusted is None else tmp_path / f"{trusted}.pem"
            return by_name(examine(server=f"127.0.0.1:{port}", certificate=certificate_file))["TLS"]

    assert look("right", "right")["state"] == "good"
    mismatch = look("wrong", "wrong")
    assert mismatch["state"] == "bad" and "mismatch" in mismatch["found"]
    assert "name that the certificate was made for" in mismatch["remedy"]
    assert "--root-certificate" in look("right", None)["remedy"]
    plain = look(None, "right")
    assert plain["state"] == "bad" and "does not speak TLS" in plain["found"]


class serving:
    """A server that shakes hands once, in plain text when it has no certificate."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name

    def __enter__(self):
        self.socket = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self.serve, daemon=True).start()
        return self.socket.getsockname()[1]

    def __exit__(self, *error):
        self.socket.close()

    def serve(self):
        try:
            connection, _ = self.socket.accept()
            with connection:
                if self.name is None:
                    connection.recv(100)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    return
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                pair = (self.folder / f"{self.name}.pem", self.folder / f"{self.name}.key")
                context.load_cert_chain(*pair)
                context.wrap_socket(connection, server_side=True).close()
        except OSError:
            pass
