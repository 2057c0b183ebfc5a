"""Blocks of a guide, run as they stand: in a folder of their own, with HOME there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
SHELL = ("bash", "sh")
# One process that has everything loaded answers all commands of a page: loading takes seconds.
CALLER = """\
#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as s:
    s.connect({address!r})
    said = {{"argv": ["{name}", *sys.argv[1:]], "cwd": os.getcwd(), "env": dict(os.environ)}}
    socket.send_fds(s, [json.dumps(said).encode() + b"\\n"], [0, 1, 2])
    code = s.recv(1)
sys.exit(code[0] if code else "killed")
"""


@dataclass(frozen=True)
class Block:
    """One fenced block: ``title="NAME"`` behind the language makes it a file of that name."""

    language: str
    code: str
    title: str = ""

    @property
    def script(self) -> str:
        """What a shell has to run for it; nothing for other languages."""
        if self.title:
            put = f"mkdir -p $(dirname {self.title}); cat > {self.title}"
            return f"{put} <<'END-OF-FILE'\n{self.code}END-OF-FILE\n"
        if self.language == "python":
            return f"python - <<'END-OF-FILE'\n{self.code}END-OF-FILE\n"
        return self.code if self.language in SHELL else ""


def blocks(page: Path, heading: str | None = None) -> list[Block]:
    """Return the fenced blocks of a page, or of one section, in order."""
    text = page.read_text("utf-8")
    if heading is not None:
        text = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = []
    for m in FENCE.finditer(text):
        title = re.search(r'title="([\w./-]+)"', m["info"])
        code = "".join(s.removeprefix(m["indent"]) for s in m["code"].splitlines(keepends=True))
        found.append(Block(m["language"], code, title[1] if title else ""))
    return found


def commands(page: Path, heading: str) -> str:
    """Return the ``bash`` blocks of one section as one script."""
    return "\n".join(b.code for b in blocks(page, heading) if b.language == "bash")


def run(
    script: str, folder: Path, bin_: Path | None = None, seconds: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder, which is its HOME as well.

    Args:
        script: for bash; its first failure ends it.
        folder: where.
        bin_: where ``fedgist`` and ``python`` are, see `warm`; None for those that run the tests.
        seconds: after which it has failed.
    """
    path = [str(bin_)] * (bin_ is not None) + [str(Path(sys.executable).parent)]
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment(os.pathsep.join([*path, os.environ["PATH"]]), folder),
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def environment(path: str, home: Path) -> Mapping[str, str]:
    one = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "MPLBACKEND": "Agg"}
    return os.environ | one | {"PATH": path, "HOME": str(home)}


@contextmanager
def warm() -> Iterator[Path]:
    """Yield a folder with ``fedgist`` and ``python`` that start in no time."""
    with tempfile.TemporaryDirectory(prefix="fedgist-") as name:
        bin_, address = Path(name, "bin"), str(Path(name, "socket"))
        bin_.mkdir()
        for command in ("fedgist", "python"):
            text = CALLER.format(python=sys.executable, address=address, name=command)
            (bin_ / command).write_text(text)
            (bin_ / command).chmod(0o755)
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm_commands.py")), address],
            env=environment(os.environ["PATH"], Path(name)),
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            assert server.stdout is not None and server.stdout.readline(), "it did not start"
            yield bin_
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.communicate()
