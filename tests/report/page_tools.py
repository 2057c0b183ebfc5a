"""Looks at pages with a headless Chromium."""

from __future__ import annotations

import html
import json
import re
import subprocess
from pathlib import Path

import numpy as np
from PIL import Image

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--allow-file-access-from-files --enable-logging=stderr"
)
# Chromium opens no window below 500 pixels, so a phone is a frame of 360 inside one.
PROBE = """<body style="margin:0"><iframe id="f" src="page.html" style="width:360px;height:6000px"
></iframe><script>
document.getElementById("f").onload = () => {
  const d = document.getElementById("f").contentDocument;
  const past = [...d.querySelectorAll("main *")].filter((e) => {
    for (let p = e.parentElement; p; p = p.parentElement)
      if (["auto", "hidden"].includes(d.defaultView.getComputedStyle(p).overflowX)) return false;
    return e.getBoundingClientRect().right > 361;
  }).map((e) => e.tagName);
  document.title = "seen";
  document.body.dataset.seen = JSON.stringify({
    scroll: d.documentElement.scrollWidth, past, text: d.body.innerText.length,
    loaded: d.defaultView.performance.getEntriesByType("resource").map((e) => e.name),
  });
};
</script></body>"""


def _chromium(folder: Path, page: Path, *more: str) -> subprocess.CompletedProcess[str]:
    profile = f"--user-data-dir={folder / 'profile'}"
    command = ["chromium", *FLAGS.split(), profile, *more, page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)


def screenshot(folder: Path, text: str, width: int, *, dark: bool = False) -> np.ndarray:
    """Return int ``[3000, width, 3]``: the top of a page; its console must stay silent."""
    page, shot = folder / "page.html", folder / "page.png"
    page.write_text(text, encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    done = _chromium(folder, page, scheme, f"--screenshot={shot}", f"--window-size={width},3000")
    assert "CONSOLE" not in done.stderr
    pixels = np.asarray(Image.open(shot).convert("RGB")).astype(int)
    assert pixels.shape == (3000, width, 3)
    return pixels


def check_phone(folder: Path, text: str) -> None:
    """Check that a page is no wider than 360 pixels and loads nothing there."""
    (folder / "page.html").write_text(text, encoding="utf-8")
    probe = folder / "probe.html"
    probe.write_text(PROBE, encoding="utf-8")
    done = _chromium(folder, probe, "--virtual-time-budget=4000", "--dump-dom")
    assert "CONSOLE" not in done.stderr
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, done.stdout[-500:]
    seen = json.loads(html.unescape(found[1]))
    assert seen["text"] > 1000  # it was really there
    assert seen["scroll"] <= 360 and seen["past"] == []
    assert [name for name in seen["loaded"] if not name.startswith("data:")] == []
