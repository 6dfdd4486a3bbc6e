"""A headless Chromium without a network, and reports for it to open.

Debian's packages `chromium` and `chromium-driver` bring the browser; nothing is downloaded.
"""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.action_chains import ActionBuilder, ActionChains
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.support.wait import WebDriverWait

import ratrain_jax as rt
from ratrain_jax.runtime.measured import MeasuredOp, MeasuredRun

SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--window-size=1400,1000",
)
PACKAGES = {"chromium": "chromium", "chromedriver": "chromium-driver"}


def driver_of(profile, *switches):
    """A browser whose log and requests are kept; `profile` is an empty folder."""
    for program, package in PACKAGES.items():
        if shutil.which(program) is None:
            pytest.exit(f"{program} is missing: install Debian's package {package}.", returncode=2)
    options = ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for switch in (*SWITCHES, *switches, f"--user-data-dir={profile}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return Chrome(options, ChromeService(shutil.which("chromedriver")))


@dataclasses.dataclass(frozen=True)
class Page:
    """A report that is open.

    Attributes:
        driver: the browser.
    """

    driver: Chrome

    def open(self, path):
        """Opens a file and waits until all is drawn."""
        for log in ("browser", "performance"):  # reading a log empties it
            self.driver.get_log(log)
        self.driver.get(f"file://{path}")
        drawn = "return window.Bokeh?.documents?.[0]?.is_idle === true"
        WebDriverWait(self.driver, 60).until(lambda driver: driver.execute_script(drawn))
        return self

    def run(self, code, *args):
        """Runs a script's body; `model(name)` and `view(name)` are a figure's."""
        return self.driver.execute_script(
            "const model = (name) => Bokeh.documents[0].get_model_by_name(name);"
            "const view = (name) => Bokeh.index.find_one(model(name));" + code,
            *args,
        )

    def times(self):
        """What span of time is in view."""
        return self.run("const r = model('bars').x_range; return [r.start, r.end]")

    def place(self, figure, x, y):
        """The place in the window of data coordinates, after scrolling there."""
        return self.run(
            "const [name, x, y] = arguments, plot = view(name);"
            "plot.el.scrollIntoView({block: 'center', behavior: 'instant'});"
            "const box = plot.canvas_view.el.getBoundingClientRect();"
            "return [box.x + plot.frame.x_scale.compute(x), box.y + plot.frame.y_scale.compute(y)]",
            figure,
            x,
            y,
        )

    def point(self, place):
        """Moves the mouse to a place in the window."""
        actions = ActionBuilder(self.driver)
        actions.pointer_action.move_to_location(round(place[0]), round(place[1]))
        actions.perform()

    def drag(self, start, end):
        """Drags from one place in the window to another."""
        actions = ActionBuilder(self.driver)
        for place, act in ((start, "pointer_down"), (end, "pointer_up")):
            actions.pointer_action.move_to_location(round(place[0]), round(place[1]))
            getattr(actions.pointer_action, act)()
        actions.perform()

    def wheel(self, place, amount):
        """Turns the wheel at a place in the window."""
        origin = ScrollOrigin.from_viewport(round(place[0]), round(place[1]))
        ActionChains(self.driver).scroll_from_origin(origin, 0, amount).perform()

    def until(self, code, *args):
        """Waits until a script gives something true, and gives that."""
        return WebDriverWait(self.driver, 10).until(lambda _: self.run(code, *args))

    def tooltip(self):
        """The text of the tooltip that is shown."""
        return self.until(
            "const seek = (root) => [...root.querySelectorAll('*')].flatMap((e) =>"
            "  [...(e.classList.contains('bk-Tooltip') ? [e] : []),"
            "   ...(e.shadowRoot ? seek(e.shadowRoot) : [])]);"
            "const shown = seek(document).filter((e) => e.getBoundingClientRect().width > 0);"
            "const parts = shown.flatMap((e) => [...(e.shadowRoot ?? e).children]);"
            "const told = parts.filter((e) => e.tagName != 'STYLE').map((e) => e.textContent);"
            "return told.join(' ').replace(/\\s+/g, ' ')"
        )

    def requests(self):
        """The addresses that were asked for since the page was opened; what stands in the page itself is none."""
        logged = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        sent = [m["params"] for m in logged if m["method"] == "Network.requestWillBeSent"]
        urls = {params["request"]["url"] for params in sent}
        return {url for url in urls if not url.startswith("data:")}

    def complaints(self):
        """What the browser's log holds beyond what Bokeh tells of itself."""
        told = ("INFO", "DEBUG")
        return [entry for entry in self.driver.get_log("browser") if entry["level"] not in told]


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    driver = driver_of(tmp_path_factory.mktemp("profile"))
    yield Page(driver)
    driver.quit()


@pytest.fixture(scope="session")
def timeline():
    """A step with every kind of lane in use."""
    names = ("first", "second", "third", "fourth")

    @rt.train_step(
        stages=2, data_parallel=2, microbatches=4, recovery="forward", boundaries=("third",)
    )
    def step(params, x):
        def loss_fn(params):
            hidden = x
            for name in names:
                hidden = jnp.tanh(rt.layer(hidden, name) @ params[name])
            return (hidden**2).mean()

        loss, grads = rt.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = {name: jax.ShapeDtypeStruct((512, 512), "float32") for name in names}
    return rt.simulate(step.lower(params, jax.ShapeDtypeStruct((4096, 512), "float32")), "a100")


@pytest.fixture(scope="session")
def measured(timeline):
    """The same step, each op a tenth longer than predicted."""
    ops = tuple(MeasuredOp(e.op, 1.1 * e.start, 1.1 * e.end) for e in timeline.events)
    return MeasuredRun(timeline.program, ops, max(op.end for op in ops))


@pytest.fixture(scope="session")
def report(timeline, measured, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    timeline.report(path, measured=measured)
    return path
