"""How large the HTML report of a large step is, and how long it takes to open in a headless Chromium.

Run: python benchmarks/bench_report.py [page.html ...]

Goals: under 5 MB, and open in under 2 s, for 16 stages × 256 microbatches. Opened is when the browser has drawn all, counted
from when it was told to open the file; of that, `busy` is the processor time of the page's main thread, which does not depend
on what else the machine does. Each page is opened several times, since the first also starts the browser's parts.
Needs Debian's packages chromium and chromium-driver.
"""

from __future__ import annotations

import pathlib
import shutil
import statistics
import sys
import tempfile
import time

from selenium.webdriver import Chrome, ChromeOptions, ChromeService

import ratrain_jax as rt
from ratrain_jax.models import ModelConfig, language_model

STAGES, MICROBATCHES, LAYERS, TIMES = 16, 256, 32, 5
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1400,1000",
)


def make_report(path: pathlib.Path, zero: int) -> None:
    """Writes the report of a language model's step on MT-3000."""
    config = ModelConfig("bench", layers=LAYERS, hidden=512, ffn=1024, heads=8, kv_heads=4, vocab=2048)  # fmt: skip
    lm = language_model(config, sequence=256, dtype="float16")
    step = rt.train_step(
        stages=STAGES, data_parallel=2, microbatches=MICROBATCHES, recovery="forward", zero=zero
    )(lm.step)
    lowered = step.lower(lm.abstract_state(), lm.abstract_batch(2 * MICROBATCHES))
    timeline = rt.simulate(lowered, "mt3000")
    print(f"{len(timeline.chart.bars):,} bars in {STAGES} stages × {MICROBATCHES} microbatches, zero={zero}")  # fmt: skip
    start = time.perf_counter()
    timeline.report(path)
    print(f"  written in {time.perf_counter() - start:.2f} s")


# The first frame after the last drawing.
DRAWN = """
const done = arguments[0]
const look = () => requestAnimationFrame(
  window.Bokeh?.documents?.[0]?.is_idle ? () => done(performance.now()) : look)
look()
"""


def open_times(path: pathlib.Path) -> list[tuple[float, float]]:
    """Seconds from opening the file until all is drawn, and how many of them its main thread was busy, each time anew."""
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        sys.exit("install Debian's packages chromium and chromium-driver to open reports.")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ChromeOptions()
        options.binary_location = str(programs[0])
        for switch in (*SWITCHES, f"--user-data-dir={profile}"):
            options.add_argument(switch)
        driver = Chrome(options, ChromeService(programs[1]))
        found = []
        try:
            for _ in range(TIMES):
                driver.get("about:blank")
                driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
                driver.get(path.as_uri())
                took = driver.execute_async_script(DRAWN) / 1e3
                metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
                busy = next(m["value"] for m in metrics if m["name"] == "TaskDuration")
                driver.execute_cdp_cmd("Performance.disable", {})
                found.append((took, busy))
        finally:
            driver.quit()
    return found


def main() -> None:
    """Prints size and opening time of the pages given, or of two of a large step."""
    with tempfile.TemporaryDirectory() as folder:
        pages = [pathlib.Path(name).resolve() for name in sys.argv[1:]]
        for zero in () if pages else (1, 2):
            path = pathlib.Path(folder) / f"zero{zero}.html"
            make_report(path, zero)
            print_page(path)
        for path in pages:
            print(path.name)
            print_page(path)


def print_page(path: pathlib.Path) -> None:
    """Prints size and opening time of a page."""
    print(f"  {path.stat().st_size / 1e6:.2f} MB")
    took, busy = zip(*open_times(path), strict=True)
    shown = ", ".join(f"{seconds:.2f}" for seconds in took)
    print(f"  opens in {statistics.median(took):.2f} s (median of {shown})")
    print(f"  of it {statistics.median(busy):.2f} s busy")


if __name__ == "__main__":
    main()
