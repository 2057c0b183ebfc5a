"""Answers ``fedgist ...`` and ``python ...`` from one process that has loaded everything.

For tests that run many short commands: each is a fork of this process, with the caller's arguments,
folder, environment and streams. Usage: python warm_commands.py SOCKET
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import sys
import traceback

import fedgist
import fedgist.cli


def load() -> None:
    for m in pkgutil.walk_packages(fedgist.__path__, "fedgist."):
        if not m.name.startswith(("fedgist.flower_app", "fedgist.exchange.flower", "fedgist.__")):
            importlib.import_module(m.name)
    gc.freeze()


def serve(address: str) -> None:
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        print("ready", flush=True)
        while True:
            caller, _ = door.accept()
            if os.fork() == 0:
                door.close()
                answer(caller)
            caller.close()


def answer(caller: socket.socket) -> None:
    """Be the command; never returns."""
    code = 70
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        data, streams, _, _ = socket.recv_fds(caller, 1 << 20, 3)
        while not data.endswith(b"\n"):
            data += caller.recv(1 << 20)
        said = json.loads(data)
        for i, stream in enumerate(streams):
            os.dup2(stream, i)
            os.close(stream)
        os.chdir(said["cwd"])
        os.environ.clear()
        os.environ.update(said["env"])
        sys.path[:0] = [p for p in said["env"].get("PYTHONPATH", "").split(os.pathsep) if p]
        code = perform(said["argv"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        caller.sendall(bytes([code]))
        os._exit(code)


def perform(argv: list[str]) -> int:
    name, *rest = argv
    try:
        if name == "fedgist":
            sys.argv = argv
            fedgist.cli.main()
        elif rest and rest[0] not in ("-", "-c"):
            sys.argv = rest
            sys.path.insert(0, os.path.dirname(os.path.abspath(rest[0])))
            runpy.run_path(rest[0], run_name="__main__")
        else:
            sys.argv = rest[:1]
            sys.path.insert(0, "")
            exec(
                compile(rest[1] if rest[1:] else read(), "<block>", "exec"),
                {"__name__": "__main__"},
            )
    except SystemExit as e:
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
        return e.code if isinstance(e.code, int) else int(e.code is not None)
    return 0


def read() -> str:
    with open(0, encoding="utf-8", closefd=False) as given:
        return given.read()


if __name__ == "__main__":
    load()
    serve(sys.argv[1])
