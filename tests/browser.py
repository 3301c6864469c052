"""A page in a real browser without a window: what it looks like to somebody, as numbers."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
            "--disable-background-networking", "--disable-component-update")  # fmt: skip

_AROUND = """<!DOCTYPE html><body style="margin: 0"><iframe width="{width}" height="6000" frameborder="0"
srcdoc="{page}"></iframe><pre id="seen"></pre><script>onload = () => {{
  const page = document.querySelector("iframe").contentDocument, look = page.defaultView.getComputedStyle;
  const box = one => one.getBoundingClientRect();
  const texts = [...page.querySelectorAll("main *")].filter(one => [...one.childNodes].some(
    node => node.nodeType == 3 && node.data.trim()) && !["title", "desc"].includes(one.tagName));
  document.getElementById("seen").textContent = JSON.stringify({{
    width: page.documentElement.scrollWidth, background: look(page.body).backgroundColor,
    colours: [...new Set(texts.map(one => one.closest("svg") ? look(one).fill : look(one).color))],
    cut_off: texts.filter(one => one.closest("svg")).filter(one => {{
      const outer = box(one.closest("svg")), inner = box(one);
      return inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.top < outer.top - 1
        || inner.bottom > outer.bottom + 1; }}).map(one => one.textContent),
    sizes: texts.filter(one => one.closest("svg")).map(one => box(one).height),
    pictures: [...page.querySelectorAll("svg[role=img]")].map(one => [box(one).width, box(one).height]),
    requests: page.defaultView.performance.getEntriesByType("resource").map(entry => entry.name),
    scripts: page.scripts.length,
    text: page.querySelector("main").innerText,
  }}); }}</script>"""


def seen(page: str, *, width: int, dark: bool, picture: Path | None = None) -> dict[str, Any]:
    """What Chromium makes of a page that is `width` CSS pixels wide; with `picture`, a PNG of it is left there."""
    assert CHROMIUM is not None
    with TemporaryDirectory() as folder:
        around = Path(folder, "around.html")
        around.write_text(_AROUND.format(width=width, page=html.escape(page)), encoding="utf-8")
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        wanted = ("--dump-dom",) if picture is None else (f"--screenshot={picture}", f"--window-size={width},3000")
        command = [CHROMIUM, *_OPTIONS, scheme, f"--user-data-dir={folder}/user", *wanted, around.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    if picture is not None:
        return {}
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found and found[1], done.stdout[-2000:]
    measured: dict[str, Any] = json.loads(html.unescape(found[1]))
    return measured


def contrast(one: str, other: str) -> float:
    """The WCAG contrast ratio of two colours as a browser writes them, `rgb(r, g, b)`."""
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
