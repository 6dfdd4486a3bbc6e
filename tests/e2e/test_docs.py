"""The documentation's blocks run, print what is shown, and the site builds."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

from tests.blocks import matches, page_blocks, run_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Residuals and costs are counted from what JAX traces, which differs between versions. The pages show the main target's.
SAME_NUMBERS = jax.__version__.startswith("0.10.")
RUN = [page for page in sorted(DOCS.rglob("*.md")) if any(True for _ in page_blocks(page))]


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(DOCS).with_suffix("")))
def test_the_blocks_of_a_page_run_and_print_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block, printed in run_page(page):
        name = page.relative_to(ROOT)
        wrong = f"line {block.line} prints otherwise; `python -m tests.blocks {name}` writes it:\n"
        if block.output is not None and jax.__version__.startswith(block.jax or ""):
            assert matches(block.output, printed, SAME_NUMBERS), wrong + printed


def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path):
    assert find_spec("mkdocs"), "install the docs extra"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    training = (tmp_path / "api/training.html").read_text()
    assert "Decorates a train step so that it runs as a pipeline" in training
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(
            r'<(?:script|link|img)\b[^>]*(?:src|href)="((?:https?:)?//[^"]*)"', page.read_text()
        )
        assert fetched == [], page
