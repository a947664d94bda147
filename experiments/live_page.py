"""The live page over an engine that is busy: long prompts, chats and decodes on several lanes and
stages.

    python -m experiments.live_page                                      # look at it yourself
    python -m experiments.live_page --screenshot=docs/images/live.png    # what docs/live_page.md
    shows; needs Chromium

The page is served without authentication, on loopback only.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI

from experiments.script import command_line
from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event, Finished
from jaxserve.api.request import Request, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.server.dashboard import router
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import (
    CacheConfig,
    ConfigError,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)

OPTIONS = {
    "live_page": [
        Option(
            "model",
            str,
            "random:tiny",
            "model: a fetched name, a folder, a .gguf file or random:NAME",
        ),
        Option("mesh", str, "spp=2,kvp=2", "mesh"),
        Option("profile", str, "auto", "what steps cost: a file, auto or none"),
        Option("port", int, 0, "port of the page; 0 takes a free one", 0, 65535),
        Option("seconds", float, 100.0, "how long the load lasts", 1),
        Option("every", float, 0.04, "mean seconds from one chat to the next", 0.001),
        Option("long_every", float, 4.0, "mean seconds from one long prompt to the next", 0.001),
        Option("long", int, 16000, "tokens of a long prompt", 16),
        Option(
            "screenshot",
            str,
            None,
            "file for a picture of the page, taken after 40 s, when some wait",
        ),
        Option("dark", str, "no", "the picture in dark colours", choices=("yes", "no")),
    ]
}
SIZE = 1400, 900
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)
CLASSES = "chat:ttft=3,tpot=0.1;document:ttft=5,stretch=4,tpot=0.2"
# that wait, and long ones that run: no more come then, so that any machine keeps up
QUEUE = 5
DOCUMENTS = 2


def chromium() -> tuple[str, str] | None:
    """The browser and its driver; None where one of them is not installed."""
    found = shutil.which("chromium"), shutil.which("chromedriver")
    return (found[0], found[1]) if found[0] and found[1] else None


@contextlib.contextmanager
def browser(folder: Path, size: tuple[int, int] = SIZE, dark: bool = False) -> Iterator[Any]:
    """A headless Chromium, as selenium's driver, that keeps its files in a folder."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    found = chromium()
    assert found is not None, "chromium or chromedriver is not installed"
    options = webdriver.ChromeOptions()
    options.binary_location = found[0]
    for flag in (
        *FLAGS,
        f"--user-data-dir={folder}",
        f"--window-size={size[0]},{size[1]}",
        *(["--force-dark-mode"] if dark else []),
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(found[1]))
    driver.set_page_load_timeout(30)
    try:
        if dark:
            driver.execute_cdp_cmd(
                "Emulation.setEmulatedMedia",
                {"features": [{"name": "prefers-color-scheme", "value": "dark"}]},
            )
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False},
        )
        yield driver
    finally:
        driver.quit()


class PageServer:
    """The page of an engine (or of what has a `view` as one) on a port of loopback, while it is
    entered. visible_ids: see router."""

    def __init__(self, engine: Any, port: int = 0, visible_ids: Any = lambda: None):
        self.frontend = SimpleNamespace(name="", replica=engine, state="serving")
        app = FastAPI(openapi_url=None)
        self.models = SimpleNamespace(
            all=[self.frontend], several=False, named=lambda name: self.frontend
        )
        app.include_router(router(self.models, visible_ids))
        self._server = uvicorn.Server(
            uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=1)
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> PageServer:
        self._thread.start()
        ends = time.monotonic() + 20
        while not self._server.started:
            if time.monotonic() > ends or not self._thread.is_alive():
                raise ConfigError("port", "the page's server does not start")
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}/"
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(20)


class PageLoad:
    """Chats, some of which share a beginning, and long prompts, at random times."""

    def __init__(self, engine: Any, values: dict[str, Any]):
        self._engine = engine
        self._values = values
        self._dice = np.random.default_rng(0)
        self._common = self._dice.integers(0, engine.info.vocab, 512)
        self._numbers = itertools.count(1)
        self._documents: set[str] = set()  # that have not ended

    def send(self, name: str, prompt: np.ndarray, tokens: int, class_name: str | None) -> None:
        engine = self._engine
        sampling = SamplingParams.make(temperature=0, max_tokens=tokens, ignore_eos=True)
        request = Request.make(
            f"{name}-{next(self._numbers)}",
            prompt,
            sampling,
            vocab=engine.info.vocab,
            max_len=engine.info.max_model_len,
            arrival=engine.now(),
            slo=Slo(class_name=class_name),
            classes=engine.info.class_names,
        )

        def hear(events: Sequence[Event]) -> None:
            if any(isinstance(event, Finished) for event in events):
                self._documents.discard(request.id)

        with contextlib.suppress(RequestError):  # the queue is full: the page shows that too
            engine.submit(request, hear)
            if class_name == "document":
                self._documents.add(request.id)

    def chat(self) -> None:
        if self._engine.load().waiting >= QUEUE:
            return
        dice = self._dice
        vocab = self._engine.info.vocab
        prompt = dice.integers(0, vocab, int(dice.integers(40, 400)))
        if dice.random() < 0.3:
            prompt = np.concatenate([self._common, prompt])
        self.send("chat", prompt, int(dice.integers(40, 240)), "chat")

    def document(self) -> None:
        if len(self._documents) >= DOCUMENTS:
            return
        self.send(
            "document",
            self._dice.integers(0, self._engine.info.vocab, self._values["long"]),
            64,
            "document",
        )

    def run(self, seconds: float) -> None:
        kinds: list[tuple[Callable[[], None], float]] = [
            (self.chat, self._values["every"]),
            (self.document, self._values["long_every"]),
        ]
        begun = time.monotonic()
        due = [begun + self._dice.exponential(every) for _, every in kinds]
        while (now := time.monotonic()) < begun + seconds:
            for place, (send, every) in enumerate(kinds):
                if now >= due[place]:
                    send()
                    due[place] += self._dice.exponential(every)
            time.sleep(min(0.05, max(0.0, min(due) - now)))


CHOOSE = """
  const all = [...document.querySelectorAll("#rows tr")];
  const rows = all.filter((row) => /document/.test(row.textContent));
  const early = rows.findLast((row) => /prefilling/.test(row.textContent));
  const queued = Number(document.getElementById("waiting").textContent);
  if (!early || queued < arguments[0]) return false;
  early.querySelector("button").click();
  return true;
"""


def take(url: str, file: Path, dark: bool, load: threading.Thread) -> None:
    """A picture of the page under a load, when a long prompt prefills and others wait."""
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder), dark=dark) as driver:
        driver.get(url)
        load.join(40)
        while load.is_alive() and not driver.execute_script(CHOOSE, 3):
            time.sleep(0.1)
        time.sleep(0.7)  # one update
        file.parent.mkdir(parents=True, exist_ok=True)
        driver.save_screenshot(str(file))
        drawn = driver.find_element("css selector", "body").get_attribute("data-drawn")
        print(f"{file}: {file.stat().st_size} bytes; the page drew it in {drawn} ms")


def run(values: dict[str, Any]) -> int:
    from jaxserve.engine.build import build

    if values["screenshot"] and chromium() is None:
        raise ConfigError(
            "screenshot",
            "needs chromium and chromedriver: apt-get install chromium chromium-driver",
        )
    length = values["long"] + 512
    config = EngineConfig(
        ModelSource(values["model"], max_model_len=length),
        MeshConfig.parse(values["mesh"]),
        CacheConfig(pages=5 * length // 16 // 2, lane_tokens=values["long"] // 2),
        SchedulerConfig(
            max_seqs=12,
            chunk_tokens=512,
            policy="slack",
            chunking="adaptive",
            step_time=0.1,
            classes=CLASSES,
        ),
        profile=values["profile"],
    )
    engine = build(config, progress=sys.stderr.isatty())
    engine.start()
    try:
        with PageServer(engine, values["port"]) as served:
            print(f"the page is at {served.url}", flush=True)
            load = PageLoad(engine, values)
            if values["screenshot"]:
                thread = threading.Thread(target=load.run, args=(values["seconds"],), daemon=True)
                thread.start()
                take(served.url, Path(values["screenshot"]), values["dark"] == "yes", thread)
            else:
                load.run(values["seconds"])
    finally:
        engine.close()
    return 0


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    sys.exit(command_line("live_page", "the live page over a busy engine", COMMAND, sys.argv[1:]))
