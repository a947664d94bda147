"""The live page: its routes, and what a person sees of a real engine in a real browser."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.live_page import PageServer, browser, chromium
from jaxserve.api.events import Finished
from jaxserve.api.request import Request, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.cluster.conductor import Conductor
from jaxserve.cluster.member import Member
from jaxserve.observe.view import Snapshot
from jaxserve.server.dashboard import FILES, HIDDEN_ID
from tests.replica.holders import virtual
from tests.scheduling.recorded import Recorded, crowd

WAIT = 60.0
COLOURED = """
  const canvas = document.getElementById("timeline");
  const context = canvas.getContext("2d");
  const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
  let found = 0, at = null;
  for (let place = 0; place < data.length; place += 4) {
    const high = Math.max(data[place], data[place + 1], data[place + 2]);
    const low = Math.min(data[place], data[place + 1], data[place + 2]);
    if (high - low > 60 && data[place + 3] > 200) {
      found += 1;
      at = [(place / 4) % canvas.width, Math.floor(place / 4 / canvas.width)];
    }
  }
  return [found, at];
"""


def get(url: str) -> tuple[int, str, dict[str, str]]:
    try:
        with urllib.request.urlopen(url, timeout=WAIT) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


class Viewed:
    """An engine as far as the page needs it, around a replica without devices. asked: the steps
    from which on it was asked."""

    def __init__(self, replica: Recorded):
        self.replica = replica
        self.asked = []

    def view(self, since: int = 0) -> dict:
        self.asked.append(since)
        replica = self.replica
        snapshot = Snapshot.take(replica.journal, replica.scheduler, replica.now, since)
        return {"model": "tiny", "mesh": "spp=1", "alive": True, **snapshot.shown()}


def with_role(replica, role: str):
    replica.info = dataclasses.replace(replica.info, role=role)
    return replica


# --- routes


@pytest.fixture(scope="module")
def plain() -> Iterator[PageServer]:
    replica = Recorded()
    for id in ("ours-1", "theirs-1"):
        replica.submit(id, 40, tokens=3)
    replica.run(2)
    for id in ("ours-2", "theirs-2"):
        replica.submit(id, 40, tokens=1)
    replica.run()
    replica.submit("theirs-3", 40)
    replica.run(1)

    def ours():
        return lambda id: id.startswith("ours")

    with PageServer(Viewed(replica), visible_ids=ours) as served:
        yield served


def test_the_pages_files_may_load_nothing_from_elsewhere(plain):
    for name in ("", *FILES):
        if name == "index.html":
            continue
        status, body, headers = get(f"{plain.url}page/{name}")
        assert (
            status == 200
            and body
            and headers["content-security-policy"].startswith("default-src 'self'")
        ), name
        assert headers["x-content-type-options"] == "nosniff"
        assert "http" not in body.replace("http://www.w3.org/2000/svg", ""), name
        assert "innerHTML" not in body and " style=" not in body and " onclick" not in body, name


def test_the_root_leads_to_the_page(plain):
    assert get(plain.url)[1] == get(f"{plain.url}page/")[1]


@pytest.mark.parametrize(
    "path",
    [
        "page/__init__.py",
        "page/..%2f__init__.py",
        "page/../../setup.py",
        "page//etc/passwd",
        "page/x",
    ],
)
def test_no_other_file_is_served(plain, path):
    assert get(plain.url + path)[0] == 404


@pytest.mark.parametrize("since", ["-1", "x", "1.5"])
def test_a_step_that_is_none_is_refused(plain, since):
    assert get(f"{plain.url}page/data?since={since}")[0] == 422


def test_who_may_see_only_some_requests_sees_no_other_ids(plain):
    status, body, _ = get(f"{plain.url}page/data?since=0")
    told = json.loads(body)
    assert status == 200 and "theirs" not in body
    assert {row[1] for row in told["requests"]} == {HIDDEN_ID}
    assert {row[1] for row in told["ended"]} == {"ours-1", "ours-2", HIDDEN_ID}
    assert {name for name, _ in told["names"].values()} == {"ours-1", "ours-2", HIDDEN_ID}


def test_before_there_is_an_engine_the_state_is_told():
    with PageServer(None) as served:
        served.frontend.state = "starting"
        assert json.loads(get(f"{served.url}page/data")[1]) == {"state": "starting"}


# --- in a browser


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    if chromium() is None:
        pytest.skip(
            "chromium and chromedriver are not installed: apt-get install chromium chromium-driver"
        )
    with browser(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture(scope="module")
def engine():
    from tests.engine.harness import engine as make

    made = make(mesh="spp=2,kvp=2", seqs=4)
    made.start()
    yield made
    made.close()


@pytest.fixture(scope="module")
def served(engine) -> Iterator[PageServer]:
    with PageServer(engine) as served:
        yield served


def generate(engine, id: str, prompt: int, tokens: int, **slo) -> threading.Event:
    """Set once the request has ended."""
    done = threading.Event()
    sampling = SamplingParams.make(temperature=0, max_tokens=tokens, ignore_eos=True)
    request = Request.make(
        id,
        np.arange(prompt) % 90,
        sampling,
        vocab=engine.info.vocab,
        max_len=engine.info.max_model_len,
        arrival=engine.now(),
        slo=Slo(**slo),
        bypass_prefix_cache=True,
    )
    engine.submit(
        request,
        lambda events: done.set() if any(isinstance(event, Finished) for event in events) else None,
    )
    return done


class Screen:
    """The page as it is seen."""

    def __init__(self, driver, url: str):
        self.driver = driver
        driver.get("about:blank")  # the page before asks no more
        driver.get_log("browser")  # what there was before
        driver.get(url)

    def all(self, selector: str) -> list:
        return self.driver.find_elements("css selector", selector)

    def one(self, selector: str):
        return self.all(selector)[0]

    def text(self, selector: str) -> str:
        """Returns the text of an element, hidden ones included."""
        return self.driver.execute_script(
            "return document.querySelector(arguments[0]).textContent", selector
        )

    def texts(self, selector: str) -> list[str]:
        return self.driver.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)",
            selector,
        )

    def until(self, done, what: str):
        ends = time.monotonic() + WAIT
        while not (found := done()):
            assert time.monotonic() < ends, f"{what}; the page says {self.text('body')[:2000]!r}"
            time.sleep(0.05)
        return found

    def ended(self, id: str) -> bool:
        """Returns True if the table says that the request has ended."""
        return (id, "length") in zip(
            self.texts("#rows button"), self.texts("#rows td:nth-child(3)")
        )

    def choose(self, id: str) -> None:
        self.until(lambda: self.ended(id), f"{id} is in the table and has ended")
        self.driver.execute_script(
            "[...document.querySelectorAll('#rows button')]"
            ".find((one) => one.textContent === arguments[0]).click()",
            id,
        )

    def coloured(self) -> tuple[int, list[int] | None]:
        """Pixels of the timeline in the colour of a request, and one of them."""
        return self.driver.execute_script(COLOURED)

    def faults(self) -> list[str]:
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE"
        ]


def test_a_request_is_seen_in_the_timeline_and_the_table_and_in_detail(driver, engine, served):
    page = Screen(driver, served.url)
    page.until(lambda: page.text("#state") == "live", "it is live")
    assert page.coloured()[0] == 0
    assert generate(engine, "first", 150, 20, ttft=100.0, tpot=0.000001).wait(120)
    page.choose("first")
    page.until(lambda: page.coloured()[0] > 100, "its chunks are in the timeline")
    facts = dict(zip(page.texts("#facts dt"), page.texts("#facts dd")))
    assert (
        facts["prefilled"] == "150 of 150"
        and facts["generated"] == "20"
        and facts["state"] == "length"
    )
    # in time to the first token, late after it
    assert page.one("#facts dd.good").text and page.one("#facts dd.bad").text
    chunks = [
        tuple(row.find_element("css selector", f"td:nth-child({n})").text for n in (1, 2))
        for row in page.all("#chunks tr")
    ]
    assert sorted(chunks[-3:]) == [
        ("prefill", "0–63"),
        ("prefill", "128–149"),
        ("prefill", "64–127"),
    ]
    assert chunks[0] == ("decode × 19", "150–168")
    assert (
        page.text("#ttft-note") == "first token: 1 of 1 in time"
        and page.text("#tpot-note") == "per token: 0 of 1 in time"
        and page.text("#both-note") == "both objectives: 0 of 1 in time"
    )
    assert facts["both in time"] == "no" and facts["longest gap"] != "–"
    assert page.faults() == []


def test_a_chunk_tells_of_itself_under_the_pointer(driver, engine, served):
    from selenium.webdriver import ActionChains

    page = Screen(driver, served.url)
    assert generate(engine, "pointed-at", 400, 3).wait(120)
    page.one("#pause").click()
    # to and fro: asks at once
    page.driver.execute_script("document.getElementById('pause').click()")
    page.choose("pointed-at")
    _, place = page.until(
        lambda: (found := page.coloured())[0] > 20 and found, "its chunks are in the timeline"
    )
    page.one("#pause").click()
    _, place = page.coloured()
    canvas = page.one("#timeline")
    ActionChains(driver).move_to_element_with_offset(
        canvas, place[0] - canvas.size["width"] // 2, place[1] - canvas.size["height"] // 2
    ).perform()
    said = page.until(
        lambda: page.one("#tip").is_displayed() and page.text("#tip"), "the chunk tells of itself"
    )
    assert (
        said.startswith("pointed-at") and "predicted" in said and "took" in said and "stage" in said
    )


def test_the_page_can_be_used_from_the_keyboard(driver, engine, served):
    from selenium.webdriver import Keys

    page = Screen(driver, served.url)
    assert generate(engine, "typed", 100, 3).wait(120)
    page.until(lambda: page.ended("typed"), "it is in the table")
    page.one("#pause").send_keys(Keys.SPACE)
    assert (
        page.text("#state") == "paused"
        and page.one("#pause").get_attribute("aria-pressed") == "true"
    )
    page.one("#timeline").send_keys(Keys.ARROW_RIGHT)
    assert page.text("#tip").startswith("typed")
    page.one("#timeline").send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ENTER)
    assert page.text("#detail-title") == "typed" and page.one("#detail-body").is_displayed()
    page.one("body").send_keys(Keys.ESCAPE)
    assert not page.one("#detail-body").is_displayed()
    page.one("#pause").send_keys(Keys.ENTER)
    page.until(lambda: page.text("#state") == "live", "it goes on")
    page.one("#rows button").send_keys(Keys.ENTER)
    assert (
        page.text("#detail-title") == page.text("#rows button")
        and page.one("#detail-body").is_displayed()
    )


def test_an_id_with_markup_is_text(driver, engine, served):
    page = Screen(driver, served.url)
    id = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    assert generate(engine, id, 30, 4).wait(120)
    page.choose(id)
    page.until(lambda: page.text("#detail-title") == id, "it is the title of the detail")
    page.one("#timeline").send_keys("\ue014")  # the right arrow: the newest chunk
    page.until(lambda: page.text("#tip").startswith(id), "it is what the chunk tells")
    assert not page.all("img") and len(page.all("script")) == 1 and driver.title == "jaxserve"
    assert page.faults() == []


def test_a_crowd_is_shown_in_part(driver):
    with PageServer(Viewed(crowd())) as served:
        page = Screen(driver, served.url)
        page.until(lambda: page.text("#waiting") == "4,096", "the crowd is counted")
        assert page.text("#running") == "256"
        rows = page.texts("#rows button")
        assert len(rows) == 100 and rows[0].startswith("runs-")
        assert (
            page.text("#requests-note")
            == "100 of 384; filter to find others; 3,968 more on the server"
        )
        assert page.text("#queue-note").startswith("4,096 in line") and "not drawn" in page.text(
            "#queue-note"
        )
        page.one("#filter").send_keys("runs-200")
        assert page.texts("#rows button") == ["runs-200"]
        page.one("#filter").clear()
        page.until(
            lambda: len(driver.find_elements("css selector", "*")) < 1000, "few elements are drawn"
        )
        assert page.faults() == []


def test_the_replicas_of_a_cluster_are_shown_with_their_roles(driver):
    prefill, decode, lost = (virtual().replica for _ in range(3))
    members = [
        Member(role, with_role(replica, role))
        for role, replica in (("prefill", prefill), ("decode", decode), ("mixed", lost))
    ]
    conductor = Conductor(members, clock=prefill.clock, threaded=False)
    members[2].suspect = True
    members[1].prompt_tokens, members[1].cached_tokens = 200, 150
    with PageServer(conductor) as served:
        page = Screen(driver, served.url)
        page.until(lambda: page.text("#members-note") == "2 of 3 take requests", "they are counted")
        cells = page.texts("#member-rows td")
        rows = [cells[start : start + 12] for start in range(0, len(cells), 12)]
        assert [row[:3] for row in rows] == [
            ["prefill", "prefill", "alive"],
            ["decode", "decode", "alive"],
            ["mixed", "mixed", "lost"],
        ]
        assert rows[1][8:10] == ["75 %", "0 %"] and rows[2][8:] == ["–"] * 4
        assert not page.one("#flows").is_displayed()
        assert page.faults() == []


class Storing:
    """A replica that shows `host_bytes` of KV in host memory, and fetches of blocks of 1 MiB."""

    def __init__(self, replica, host_bytes: int):
        self.replica = replica
        self.kv = {"host_bytes": host_bytes, "disk_bytes": 0, "fetched": []}

    def __getattr__(self, name):
        return getattr(self.replica, name)

    def fetch(self, source: str, blocks: int) -> None:
        self.kv["fetched"] = [
            {"source": source, "blocks": blocks, "bytes": blocks << 20, "seconds": 1.5}
        ]

    def view(self, since: int = 0) -> dict:
        return {**self.replica.view(since), "kv": self.kv}


def test_what_replicas_have_below_their_devices_and_fetch_from_each_other_is_shown(driver):
    made = virtual().replica, virtual().replica
    replicas = [
        Storing(with_role(one, role), 3 << 20) for one, role in zip(made, ("prefill", "decode"))
    ]
    members = [Member(f"replica {n}", replica) for n, replica in enumerate(replicas)]
    conductor = Conductor(members, clock=made[0].clock, threaded=False)
    replicas[1].fetch("replica 0", 1)
    with PageServer(conductor) as served:
        page = Screen(driver, served.url)
        page.until(lambda: page.text("#flows-note") == "1.0 MiB in all", "the flow is there")
        assert page.texts("#member-rows td")[10:12] == ["3.0 MiB", "0.0 MiB"]
        replicas[1].fetch("replica 0", 6)
        page.until(lambda: page.text("#flows-note") == "6.0 MiB in all", "it has grown")
        row = page.texts("#flow-rows td")
        assert row[:5] == ["replica 0", "replica 1", "6", "6.0 MiB", "1.50 s"]
        assert 0.0 < float(row[5]) <= 10.0, "five MiB in at least a poll"
        assert page.faults() == []


def test_only_what_is_new_is_asked_for_and_nothing_while_paused(driver):
    replica = Recorded()
    replica.submit("r", 20, tokens=500)
    replica.run(300)
    engine = Viewed(replica)
    with PageServer(engine) as served:
        page = Screen(driver, served.url)
        page.until(lambda: len(engine.asked) > 4, "it asks again")
        assert engine.asked[:5] == [0, 128, 256, 300, 300]
        replica.run(3)
        page.until(lambda: engine.asked[-1] == 303, "it asks for what is new")
        page.one("#pause").click()
        time.sleep(0.2)  # what was under way
        asked = len(engine.asked)
        time.sleep(1.2)
        assert len(engine.asked) == asked
        page.one("#pause").click()
        page.until(lambda: len(engine.asked) > asked, "it goes on")


def test_a_server_that_starts_anew_is_shown_from_its_start(driver):
    before = Recorded()
    after = Recorded()
    before.submit("before", 20, tokens=40)
    before.run()
    with PageServer(Viewed(before)) as served:
        page = Screen(driver, served.url)
        page.choose("before")
        served.frontend.replica = None
        served.frontend.state = "starting"
        page.until(
            lambda: "starting" in page.text("#banner") and page.one("#banner").is_displayed(),
            "it says that it is not ready",
        )
        after.journal.born = 17.0
        after.now = 18.0
        after.submit("after", 20, tokens=3)
        after.run()
        served.frontend.replica = Viewed(after)
        served.frontend.state = "serving"
        page.until(
            lambda: page.texts("#rows button") == ["after"], "the new one is shown, and no other"
        )
        assert not page.one("#banner").is_displayed() and page.text("#state") == "live"


def test_a_server_that_is_gone_or_broken_is_said_to_be(driver):
    replica = Recorded()
    replica.submit("r", 20)
    replica.run()
    engine = Viewed(replica)
    with PageServer(engine) as served:
        page = Screen(driver, served.url)
        page.until(lambda: page.text("#state") == "live", "it is live")
        served.frontend.replica = SimpleNamespace(
            view=lambda since: {**engine.view(since), "alive": False}
        )
        page.until(
            lambda: page.text("#state") == "broken" and "has stopped" in page.text("#banner"),
            "the engine is said to be broken",
        )
        served.frontend.replica = engine
        page.until(lambda: page.text("#state") == "live", "it is live again")
        served.stop()
        page.until(lambda: page.text("#state") == "server gone", "the server is said to be gone")
        assert (
            "does not answer. It was last heard" in page.text("#banner")
            and page.one("#banner").is_displayed()
        )
        assert page.texts("#rows button") == ["r"]  # what was known is still there


def test_several_models_are_shown_one_at_a_time(driver):
    replicas = {"one": Recorded(), "two": Recorded()}
    for number, (name, replica) in enumerate(replicas.items()):
        replica.journal.born = 7.0 + number
        replica.submit(f"r-{name}", 20, tokens=3)
        replica.run()
    with PageServer(Viewed(replicas["one"])) as served:
        page = Screen(driver, served.url)
        page.until(lambda: page.texts("#rows button") == ["r-one"], "the request is shown")
        assert not page.one("#model").is_displayed(), "the only model need not be chosen"
        served.frontend.name = "one"
        other = SimpleNamespace(name="two", replica=Viewed(replicas["two"]), state="serving")
        frontends = {"one": served.frontend, "two": other}
        served.models.all[:] = frontends.values()
        served.models.named = frontends.__getitem__
        served.models.several = True
        page.until(lambda: page.texts("#model option") == ["one", "two"], "both are offered")
        assert page.one("#model").is_displayed()
        driver.execute_script(
            "const model = document.getElementById('model');"
            "model.value = 'two'; model.dispatchEvent(new Event('change'))"
        )
        page.until(lambda: page.texts("#rows button") == ["r-two"], "that of the other is shown")


def test_it_can_be_read_in_the_dark(driver):
    replica = Recorded()
    replica.submit("r", 20)
    replica.run()
    colours = []
    with PageServer(Viewed(replica)) as served:
        for scheme in ("light", "dark"):
            driver.execute_cdp_cmd(
                "Emulation.setEmulatedMedia",
                {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
            )
            Screen(driver, served.url)
            colours.append(
                driver.execute_script(
                    "const own = getComputedStyle(document.body);"
                    "return [own.backgroundColor, own.color].map((c) => c.match(/\\d+/g)[0])"
                )
            )
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    (light, on_light), (dark, on_dark) = ((int(back), int(text)) for back, text in colours)
    assert light > on_light + 150 and on_dark > dark + 150


def test_nothing_is_asked_while_the_tab_is_hidden(driver):
    engine = Viewed(Recorded())
    with PageServer(engine) as served:
        page = Screen(driver, served.url)
        page.until(lambda: len(engine.asked) > 1, "it asks again")
        own = driver.current_window_handle
        driver.switch_to.new_window("tab")
        time.sleep(0.3)  # what was under way
        asked = len(engine.asked)
        time.sleep(1.2)
        assert len(engine.asked) == asked
        driver.close()
        driver.switch_to.window(own)
        page.until(lambda: len(engine.asked) > asked, "it goes on")
