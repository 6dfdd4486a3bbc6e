"""The documentation hangs together: its pages, links, pictures, commands and names are there."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from ratrain_jax.cli import cli
from ratrain_jax.lowering.mnemonics import FIELDS, SHORT_NAMES
from ratrain_jax.lowering.program import OP_TYPES, Kind
from tests.blocks import Block, commands, matches, read_blocks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def page_id(page):
    return str(page.relative_to(DOCS).with_suffix(""))


def nav_pages(nav):
    for entry in nav:
        for target in entry.values():
            yield from nav_pages(target) if isinstance(target, list) else [target]


def test_every_page_is_in_the_navigation_once():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert sorted(nav_pages(nav)) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


def anchors(page):
    """What headings of a page are linked by."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M)
    words = (re.sub(r"[^\w\s-]", "", head).strip().lower() for head in heads)
    return {re.sub(r"[-\s]+", "-", word) for word in words}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_and_pictures_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in LINK.findall(text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        assert found.is_file(), f"{target} of {page_id(page)} is not there"
        assert DOCS in found.parents, f"{target} of {page_id(page)} leaves the site"
        if anchor:
            assert anchor in anchors(found), f"{target} of {page_id(page)} has no such heading"


def refusal(words):
    """Why a reader could not run a command; None if they could."""
    match words:
        case ["ratrain", name, *rest]:
            if name not in cli.commands:
                return f"ratrain has no command {name}"
            known = {"--help", *(option for p in cli.commands[name].params for option in p.opts)}
            own = rest[: rest.index("--")] if "--" in rest else rest
            used = {word.split("=")[0] for word in own if word.startswith("-")}
            return f"ratrain {name} has no {used - known}" if used - known else None
        case ["make", target]:
            known = re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
            return None if known else f"there is no make {target}"
        case ["sudo", "python", script, *rest]:
            if not (ROOT / script).is_file():
                return f"there is no {script}"
            text = (ROOT / script).read_text()
            unknown = [word for word in rest if f'"{word}"' not in text]
            return f"{script} knows no {unknown}" if unknown else None
        case ["pip", "install", "."] | ["python"] | ["export", _]:
            return None
    return f"nothing checks {shlex.join(words)}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_commands_in_blocks_and_in_sentences_exist(page):
    text = page.read_text()
    shown = [words for b in read_blocks(text) if b.language == "console" for words in commands(b)]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    said = [shlex.split(code) for code in re.findall(r"`((?:ratrain|make) [a-z][^`…]*)`", prose)]
    assert [why for words in shown + said if (why := refusal(words))] == []


@pytest.mark.parametrize(
    "command, why",
    [
        ("ratrain fly", "no command fly"),
        ("ratrain plan --fast", "has no {'--fast'}"),
        ("make tea", "no make tea"),
        ("sudo python benchmarks/none.py", "no benchmarks/none.py"),
        ("sudo python benchmarks/slow_links.py --fast", "knows no"),
        ("rm -r site", "nothing checks"),
    ],
)
def test_commands_that_do_not_exist_are_found(command, why):
    assert why in refusal(shlex.split(command))


def table(heading_row, page):
    """The rows below a table's head, as lists of cells without backticks."""
    rows = page.read_text().split(heading_row)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]


def test_the_ops_are_those_of_programs():
    rows = table("| short | op | lane |", DOCS / "reference/ops.md")
    shown = [(short, name, lane) for short, name, lane, *_ in rows]
    assert shown == [
        (SHORT_NAMES[op], name, op.lane.value) for name, op in OP_TYPES.items()
    ] and FIELDS.keys() == {*OP_TYPES.values()}


def test_the_kinds_of_values_are_those_of_programs():
    rows = table("| kind | what it is |", DOCS / "reference/ops.md")
    assert [kind for kind, _ in rows] == [kind.value for kind in Kind]


def test_the_command_line_page_lists_every_command():
    rows = table("| command | does |", DOCS / "reference/command-line.md")
    assert sorted(name for name, _ in rows) == sorted(f"ratrain {name}" for name in cli.commands)


def test_blocks_are_read_with_their_outputs():
    text = (
        'Say:\n\n```python title="a.py"\nprint(1)\n```\n\n```text\n1\n```\n\n'
        "Other text:\n\n```text\nno output\n```\n\n<!-- not run -->\n```console\nratrain plan\n```\n"
        "<!-- with JAX 0.10 -->\n```python\nprint(2)\n```\n"
    )
    assert read_blocks(text) == [
        Block("python", "print(1)\n", 4, "a.py", "1\n"),
        Block("text", "no output\n", 14),
        Block("console", "ratrain plan\n", 19, run=False),
        Block("python", "print(2)\n", 23, jax="0.10"),
    ]


def test_what_is_shown_must_be_what_is_printed():
    assert matches("step … s\nend", "step 0.5 s\nend\n")
    assert not matches("step … s\nend", "step 0.5 s\nmore\nend too")
    assert not matches("a.b", "acb")


def test_numbers_may_differ_where_that_is_said():
    assert matches("stage 0  1.5 KiB\nall  2e-05 s", "stage 0 12.5 KiB\nall  3 s", numbers=False)
    assert not matches("stage 0 of 1", "stage 0 on 1", numbers=False)
