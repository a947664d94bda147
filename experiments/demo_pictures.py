"""Pictures of `jaxserve demo`: what a terminal shows at its end, and the live page of its twelve
devices while they answer. Each is of a run of its own: a browser takes time that answers need.

    python -m experiments.demo_pictures        # makes docs/images/demo.png and demo_page.png
"""

from __future__ import annotations

import fcntl
import html
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from experiments.live_page import browser, chromium
from experiments.script import command_line
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

OPTIONS = {
    "demo_pictures": [
        Option("out", str, "docs/images", "folder of demo.png (a terminal) and demo_page.png"),
        Option("only", str, "both", "which to make", choices=("both", "terminal", "page")),
    ]
}
COMMAND_SHOWN = "python3 -m jaxserve demo"
ROWS, COLUMNS = 80, 100  # of the terminal, which scrolls nothing away
PAGE_SECONDS = 60.0  # until the long prompt is seen on the page
PAGE_SIZE = 1400, 900
STYLE = (
    "margin: 0; padding: 16px; display: inline-block; background: #1b1f27; color: #dde1e8; "
    "font: 14px/1.35 'DejaVu Sans Mono', monospace"
)
LONG = """
  const rows = [...document.querySelectorAll("#rows tr")];
  const long = rows.find((row) => /prefilling/.test(row.textContent));
"""
LONG_IS_PREFILLED = f"{LONG} return !long;"
OPEN_LONG = f"""{LONG}
  if (!long) return false;
  long.querySelector("button").click();
  return true;
"""


def demo() -> Iterator[bytes]:
    """Runs the demo in a terminal of its own; yields what it writes. Ends it if its reader
    stops."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxserve", "demo"], stdin=end, stdout=end, stderr=end
    )
    os.close(end)
    try:
        while True:
            try:
                written = os.read(terminal, 1 << 16)
            except OSError:  # Linux: the other end is closed
                break
            if not written:
                break
            yield written
    finally:
        process.terminate()
        process.wait()
        os.close(terminal)


def terminal_picture(file: Path) -> None:
    """A picture of all that the demo's terminal shows at its end."""
    import pyte

    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    for written in demo():
        stream.feed(written)
    shown = "\n".join(line.rstrip() for line in screen.display).rstrip()
    text = html.escape(f"$ {COMMAND_SHOWN}\n{shown}")
    page = f'<body style="margin: 0"><pre style="{STYLE}">{text}</pre></body>'
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder), (1200, 1800)) as driver:
        driver.get(f"data:text/html;charset=utf-8,{quote(page)}")
        driver.find_element("css selector", "pre").screenshot(str(file))


def page_picture(file: Path) -> None:
    """A picture of the live page when the twelve devices have prefilled the long prompt."""
    seen = b""
    writes = demo()
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder), PAGE_SIZE) as driver:
        for written in writes:
            seen += written
            if found := re.search(rb"live page: (http://\S+/)", seen):
                driver.get(found[1].decode())
                _take(driver, file)
                break
    writes.close()


def _take(driver: Any, file: Path) -> None:
    until = time.monotonic() + PAGE_SECONDS
    for script in (OPEN_LONG, LONG_IS_PREFILLED):
        while not driver.execute_script(script):
            if time.monotonic() > until:
                raise ConfigError("out", "the page shows no prompt that is prefilled")
            time.sleep(0.1)
    time.sleep(0.7)  # one update
    driver.save_screenshot(str(file))


def run(values: dict[str, Any]) -> int:
    if chromium() is None:
        raise ConfigError(
            "out", "needs chromium and chromedriver: apt-get install chromium chromium-driver"
        )
    folder = Path(values["out"])
    folder.mkdir(parents=True, exist_ok=True)
    made = {"terminal": (terminal_picture, "demo.png"), "page": (page_picture, "demo_page.png")}
    for name, (make, file) in made.items():
        if values["only"] in ("both", name):
            make(folder / file)
            print(folder / file)
    return 0


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    sys.exit(command_line("demo_pictures", "pictures of jaxserve demo", COMMAND, sys.argv[1:]))
