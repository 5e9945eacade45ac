"""The tab in Chromium, and the page of `keras-het report`: what they show, how they are used."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import made_training
import pytest
from test_plugin import application_of
from werkzeug.serving import make_server

from keras_het.launch.command_line import main

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="needs the commands chromium and chromedriver (Debian: chromium, chromium-driver)",
)
SECONDS = 90


def until(condition, what):
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    pytest.fail(f"not within {SECONDS} s: {what}")


class Browser:
    """Chromium with the plugin's page, by the selectors of its elements."""

    def __init__(self):
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        for argument in (
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--window-size=1400,1000", "--no-first-run", "--disable-background-networking"),
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # as without a network
        ):
            options.add_argument(argument)
        self.driver = webdriver.Chrome(options, Service(str(DRIVER)))

    def open(self, address):
        self.driver.get(address)
        self.ready()

    def script(self, text, *arguments):
        return self.driver.execute_script(text, *arguments)

    def text(self, selector):
        found = self.script(
            "return document.querySelector(arguments[0])?.innerText ?? ''", selector
        )
        return str(found)

    def element(self, selector):
        return self.driver.find_element("css selector", selector)

    def is_shown(self, selector):
        return bool(
            self.script("return !!document.querySelector(arguments[0])?.clientHeight", selector)
        )

    def ready(self):
        until(
            lambda: self.text("[role=status]").startswith(("Updated", "Written")),
            "the page is complete",
        )

    def choose(self, label, value):
        self.script(
            "const select = document.querySelector(`select[aria-label='${arguments[0]}']`);"
            "select.value = arguments[1]; select.dispatchEvent(new Event('change'));",
            label,
            value,
        )
        self.ready()

    def colors(self, plot):
        """Number of colours in the middle row of a plot, to see that something is drawn."""
        return int(
            self.script(
                "const canvas = document.querySelectorAll('.plot canvas')[arguments[0]];"
                "const context = canvas.getContext('2d');"
                "const row = context.getImageData(160, canvas.height / 2, canvas.width - 190, 1);"
                "return new Set(new Uint32Array(row.data.buffer)).size;",
                plot,
            )
        )

    def complaints(self):
        """Messages of the console that are about the page: TensorBoard's own are not."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if re.search("plugin|file://|Content Security Policy", entry["message"])
        ]

    def requests(self):
        """Addresses of what was asked for since the last call, answered or not."""
        messages = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        return [
            each["params"]["request"]["url"]
            for each in messages
            if each["method"] == "Network.requestWillBeSent"
        ]


@pytest.fixture(scope="module")
def started():
    pytest.importorskip("selenium")
    made = Browser()
    yield made
    made.driver.quit()


@pytest.fixture
def browser(started):
    """The browser with an empty page, and nothing in its console."""
    started.driver.get("about:blank")
    started.complaints()
    return started


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    made_training.write(folder / "a", 6, 1000)
    made_training.write(folder / "b", 40, 400)
    made_training.write(folder / "one step", 3, 1)
    return folder


@pytest.fixture(scope="module")
def address(logs):
    """The tab alone, served in this process."""
    with served(application_of(logs)) as start:
        yield start


@pytest.fixture(scope="module")
def page(logs):
    return page_of(logs, "a")


@contextlib.contextmanager
def served(application):
    server = make_server("127.0.0.1", 0, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/data/plugin_entry.html?name=keras_het"
    finally:  # else the thread would keep the run from ending after a test that failed
        server.shutdown()
        thread.join()
        server.server_close()


def page_of(folder, run):
    """The address of the page that `keras-het report` writes of a training."""
    path = folder / "report.html"
    assert main(["report", str(folder), "--run", run, "--html", str(path)]) == 0
    return path.as_uri()


@pytest.fixture(params=["address", "page"])
def shell(browser, request):
    """The tab and the page of a report: each is open."""
    browser.open(request.getfixturevalue(request.param))
    return str(request.param)


@pytest.mark.usefixtures("shell")
def test_the_page_shows_a_training(browser):
    assert browser.text(".range") == "steps 0 to 999"
    assert browser.text(".verdict .first")
    assert "faster" in browser.text(".facts") or "as fast" in browser.text(".facts")
    assert browser.colors(0) > 5
    assert browser.colors(1) > 1
    assert browser.is_shown(".uplot canvas")
    assert re.search(r"async worker 1\s+980\s+55\s+3\s+80 ms", browser.text("main"))
    assert browser.text(".uplot .u-legend").count("GPU") == 6
    assert browser.text(".bars").startswith("Only a phase")
    assert browser.script("return document.querySelectorAll('.scroll tbody tr').length") == 6
    assert "became slower" in browser.text(".changes")
    assert browser.complaints() == []


@pytest.mark.full
def test_steps_that_were_not_measured_are_drawn_as_such(browser, tmp_path):
    from selenium.webdriver.common.action_chains import ActionChains

    made_training.write(tmp_path, 4, 100, measured_every=4)
    with served(application_of(tmp_path)) as start:
        for address in (start, page_of(tmp_path, "telemetry")):
            browser.open(address)
            assert browser.text(".range") == "steps 0 to 99, 25 measured"
            assert browser.text("main").count("Hatched: steps that were not measured") == 2
            canvas = browser.element(".plot canvas")
            ActionChains(browser.driver).move_to_element(canvas).perform()
            until(lambda: "measured step" in browser.text(".tip"), "what the step stands for")
            told = re.search(
                r"measured step (\d+); stands for steps (\d+) to", browser.text(".tip")
            )
            assert told and int(told.group(1)) - int(told.group(2)) == 3
    if picture := os.environ.get("KERAS_HET_TEST_PICTURE"):
        browser.driver.save_screenshot(picture)
    assert browser.complaints() == []


@pytest.mark.full
def test_a_training_that_went_on_with_other_devices(browser, tmp_path):
    made_training.write_generations(tmp_path)
    with served(application_of(tmp_path)) as start:
        for address in (start, page_of(tmp_path, "telemetry")):
            browser.open(address)
            assert browser.text(".range") == "steps 0 to 899"
            assert browser.text(".verdict .first").startswith("No bottleneck found")
            assert "step 300restart with 2 workers" in browser.text(".changes").replace("\n", "")
            assert "worker 1 GPU 0 (until step 299)" in browser.text(".scroll tbody")
            assert browser.text(".uplot .u-legend").count("GPU") == 4
            assert browser.colors(0) > 5
            if picture := os.environ.get("KERAS_HET_TEST_PICTURE"):
                browser.driver.save_screenshot(picture)
    assert browser.complaints() == []


@pytest.mark.full
def test_zoom_hover_and_keyboard(browser, shell):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    canvas = browser.element(".plot canvas")
    ActionChains(browser.driver).move_to_element(canvas).perform()
    until(lambda: "ms" in browser.text(".tip"), "a value beside the pointer")
    assert re.search(r"worker \d GPU \d\nsteps? ", browser.text(".tip"))
    drag = ActionChains(browser.driver).move_to_element(canvas).click_and_hold()
    drag.move_by_offset(200, 0).pause(0.1).release().perform()
    until(lambda: browser.is_shown(".top button"), "a way back to all steps")
    browser.ready()
    part = browser.text(".range")
    first, last = map(int, re.findall(r"\d+", part)[:2])
    assert 400 < first < last < 800
    assert part.endswith("; all else: steps 0 to 999") == (shell == "page")
    until(
        lambda: "became slower" not in browser.text(".changes"), "only the changes of these steps"
    )

    canvas.send_keys(Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    until(lambda: "worker 0 GPU 1" in browser.text(".spoken"), "what the arrow keys point at")
    canvas.send_keys(*[Keys.ARROW_LEFT] * 700)
    until(lambda: re.search(f"steps? {first}", browser.text(".spoken")), "the first column")
    canvas.send_keys(*[Keys.ARROW_RIGHT] * 700)
    until(lambda: re.search(rf"steps? .*\b{last},", browser.text(".spoken")), "the last one")
    assert browser.colors(0) > 5
    canvas.send_keys("+")
    until(lambda: browser.text(".range") != part, "a closer look")
    canvas.send_keys(Keys.ESCAPE)
    until(lambda: browser.text(".range") == "steps 0 to 999", "all steps again")
    canvas.send_keys(Keys.ARROW_UP, Keys.ENTER)
    until(lambda: "5 of 6 chosen" in browser.text("main"), "one device less in the lanes")
    assert browser.complaints() == []


@pytest.mark.full
@pytest.mark.parametrize("theme", ["dark", "light"])
def test_the_page_needs_nothing_and_has_the_theme_of_the_system(browser, page, theme):
    feature = {"name": "prefers-color-scheme", "value": theme}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    try:
        browser.requests()
        browser.open(page)
        assert [each for each in browser.requests() if not each.startswith((page, "data:"))] == []
        assert browser.driver.title == "keras_het: a"
        assert not browser.is_shown(".top button")
        background = browser.script("return getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(27, 30, 35)") == (theme == "dark")
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.full
def test_choices(browser, shell):
    browser.choose("Quantity", "hw.temperature")
    until(lambda: "°C" in browser.text(".legend"), "the unit of a temperature")
    browser.choose("Value of a column", "highest")
    browser.script("[...document.querySelectorAll('th button')].at(-1).click()")
    assert browser.script("return document.querySelector('th[aria-sort=descending]').innerText")
    assert browser.complaints() == []
    if shell == "page":
        return
    browser.choose("Run", "b/telemetry")
    until(lambda: browser.text(".range") == "steps 0 to 399", "the other run")
    until(lambda: re.search("1[0-2] of 40 chosen", browser.text("main")), "a choice of many")
    assert browser.complaints() == []


@pytest.mark.full
def test_one_step_and_no_training(browser, address, tmp_path):
    browser.open(address)
    browser.choose("Run", "one step/telemetry")
    until(lambda: browser.text(".range") == "step 0", "the run with one step")
    assert browser.text(".verdict .first")
    assert browser.complaints() == []
    with served(application_of(tmp_path)) as start:
        browser.driver.get(start)
        until(lambda: browser.is_shown(".nothing"), "what to do for a training to be here")
        assert "keras_het.callbacks.Telemetry" in browser.text(".nothing")
        assert not browser.is_shown("main")
    assert browser.complaints() == []


@pytest.mark.full
def test_what_a_log_says_is_shown_as_text(browser, tmp_path):
    from keras_het.planning.diagnosis.recording import Change, Device
    from keras_het.telemetry.event_log import EventLog

    evil = "</script><img src=x onerror=document.title='evil'>"
    log = EventLog(tmp_path / "telemetry", (Device(evil, 0, evil, evil, evil),) * 1)
    log.write_steps(0, made_training.times(made_training.devices_of(1), 100))
    log.write_change(Change(5, evil, f"as {evil}"))
    log.write_change(Change(7, "shares", "shares 3 5 (min_max: even split)"))
    log.close()
    with served(application_of(tmp_path)) as start:
        for address in (start, page_of(tmp_path, "telemetry")):
            browser.open(address)
            assert evil in browser.text("main")
            assert browser.script("return document.querySelectorAll('img').length") == 0
            assert browser.driver.title != "evil"
            assert browser.text(".changes li").count("shares") == 1, "its kind once"
    assert browser.complaints() == []


@pytest.mark.full
def test_a_server_that_fails_is_named(browser, address):
    browser.open(address)
    browser.script("window.fetch = async () => new Response('out of memory', {status: 500})")
    browser.script("[...document.querySelectorAll('.top button')].at(-1).click()")
    until(lambda: "out of memory" in browser.text(".problem"), "what the server said")


@pytest.mark.full
def test_a_large_training_without_a_network(browser, tmp_path):
    made_training.write(tmp_path, 200, 5000)
    with served(application_of(tmp_path)) as start:
        browser.requests()
        browser.open(start)
        asked = browser.requests()
        assert browser.text(".range") == "steps 0 to 4,999"
        assert browser.text(".verdict .first")
        assert browser.colors(0) > 5
        origin = start.partition("/data/")[0]
        assert any(address.endswith(".js") for address in asked)
        assert [each for each in asked if not each.startswith((origin, "data:", "blob:"))] == []
    browser.open(page_of(tmp_path, "telemetry"))
    assert browser.text(".range") == "steps 0 to 4,999"
    assert browser.colors(0) > 5
    assert browser.complaints() == []


# Elements that are cut off, or beyond the window and in nothing that scrolls sideways.
_LOST = """
const lost = [];
const scrolls = (e) => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX);
for (const each of document.querySelectorAll('body *')) {
  const box = each.getBoundingClientRect();
  if (!box.width || !box.height || each.closest('svg, .spoken, .track, .gantt-track')) continue;
  let around = each;
  while (around && !scrolls(around)) around = around.parentElement;
  const style = getComputedStyle(each);
  const hidden = style.overflowX === 'hidden' && each.scrollWidth > each.clientWidth;
  if (hidden || (!around && (box.right > innerWidth || box.left < 0)))
    lost.push(`${each.tagName}.${each.className} ${each.innerText?.slice(0, 60)}`);
}
return lost;
"""


@pytest.mark.full
def test_a_narrow_window_loses_nothing(browser, tmp_path, monkeypatch):
    """All that is wider than a telephone can be scrolled to, in the tab and on the page."""
    model = "NVIDIA-GeForce-RTX-2080-Ti-of-a-name-that-is-longer-than-the-window-is-wide"
    monkeypatch.setattr(made_training, "MODELS", {model: 1.0, "other": 3.0, "third": 6.0})
    made_training.write(tmp_path / "a", 6, 1000)
    window = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
    try:
        with served(application_of(tmp_path)) as start:
            for address in (start, page_of(tmp_path, "a")):
                browser.open(address)
                until(lambda: browser.is_shown(".uplot canvas"), "the last plot")
                assert model in browser.text(".scroll tbody")
                assert browser.script(_LOST) == []
                assert browser.script("return document.documentElement.scrollWidth") <= 390
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@contextlib.contextmanager
def tensorboard(folder, *arguments):
    """TensorBoard itself, as users start it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", "from tensorboard.main import run_main; run_main()"),
            *("--logdir", str(folder), "--port", "0", "--host", "127.0.0.1", *arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output = ""
        while not (found := re.search(r"http://127\.0\.0\.1:\d+/", output)):
            line = process.stdout.readline() if process.stdout else ""
            assert line, f"TensorBoard has ended: {output}"
            output += line
        reader = threading.Thread(target=process.communicate)
        reader.start()
        yield found.group()
    finally:
        # The data server is a process of its own.
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)
        reader.join(timeout=60)


@pytest.fixture
def entry_point(tmp_path, monkeypatch):
    """The entry point, also where the package was installed before it had one."""
    import importlib.metadata

    group = importlib.metadata.entry_points(group="tensorboard_plugins")
    if not any(point.name == "keras_het" for point in group):
        info = tmp_path / "site" / "keras_het_entry-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: keras-het-entry\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[tensorboard_plugins]\nkeras_het = keras_het.tensorboard.loader:HetLoader\n"
        )
        monkeypatch.syspath_prepend(tmp_path / "site")


@pytest.mark.full
@pytest.mark.parametrize(("load_fast", "dark"), [("auto", False), ("false", True)])
def test_the_tab_in_tensorboard(browser, tmp_path, entry_point, load_fast, dark):
    folder = tmp_path / "logs"
    made_training.write(folder, 3, 3000, keep_steps=1000)
    with tensorboard(folder, f"--load_fast={load_fast}") as start:
        until_there = "return fetch('data/plugins_listing').then(a => a.json())"
        browser.driver.get(start)
        until(lambda: browser.script(until_there)["keras_het"]["enabled"], "data in TensorBoard")
        browser.driver.get("about:blank")
        browser.requests()
        browser.driver.get(f"{start}?darkMode={str(dark).lower()}#keras_het")
        frames = until(
            lambda: browser.driver.find_elements("tag name", "iframe"), "the frame of the tab"
        )
        browser.driver.switch_to.frame(frames[0])
        browser.ready()
        assert browser.text(".range") == "steps 0 to 2,999, later ones thinned"
        theme = browser.script("return document.documentElement.dataset.theme")
        assert theme == ("dark" if dark else "light")
        background = browser.script("return getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(27, 30, 35)") == dark
        assert browser.colors(0) > 5
        browser.driver.switch_to.default_content()
        assert browser.complaints() == []
        local = (start, "data:", "blob:", "about:")
        assert [each for each in browser.requests() if not each.startswith(local)] == []
