"""The fenced blocks of Markdown pages, run as a reader would run them.

All ```python blocks of a page are run in order in one namespace, and its ```console blocks of `ratrain` commands between
them, unless `<!-- not run -->` stands above one. A page that begins with `<!-- continues other.md -->` starts from what the
python blocks of that page left. A ```text block with nothing but blank lines before it is the output of the block above; `…`
in it stands for any text; `<!-- with JAX 0.10 -->` above a block says with which version it prints that. `python -m
tests.blocks docs/page.md` writes those outputs of a page anew that are no longer so.
"""

import contextlib
import dataclasses
import io
import re
import shlex
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

_BLOCK = re.compile(r"""^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```$""", re.DOTALL | re.MULTILINE)
_VERSION = re.compile(r"<!-- with JAX (\S+) -->\n$")
_CONTINUES = re.compile(r"^<!-- continues (\S+) -->$", re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        language: what stands behind the fence.
        code: its lines.
        line: the line of the page that its first one is.
        title: the file that it is said to be saved as; None where nothing is said.
        output: what it is said to print; None where nothing is said.
        run: whether it is to be run.
        jax: the version of JAX with which it prints that; None for all.
    """

    language: str
    code: str
    line: int
    title: str | None = None
    output: str | None = None
    run: bool = True
    jax: str | None = None


def read_blocks(text: str) -> list[Block]:
    """The blocks of a page, outputs with the blocks that they are of."""
    found: list[Block] = []
    end = 0
    for match in _BLOCK.finditer(text):
        language, title, code = match.groups()
        between = text[end : match.start()]
        if language == "text" and found and found[-1].language in RUNS and not between.strip():
            found[-1] = dataclasses.replace(found[-1], output=code)
        else:
            line = text.count("\n", 0, match.start()) + 2
            run = not between.endswith("<!-- not run -->\n")
            version = _VERSION.search(between)
            found.append(Block(language, code, line, title, None, run, version and version[1]))
        end = match.end()
    return found


def commands(block: Block) -> list[list[str]]:
    """The commands of a ```console block, each as its words, without comments."""
    lines = block.code.replace("\\\n", " ").splitlines()
    return [words for words in (shlex.split(line, comments=True) for line in lines) if words]


def run_page(path: Path) -> Iterator[tuple[Block, str]]:
    """Runs a page in the current folder.

    Yields:
        Each python block, and each console block of `ratrain` commands, with what it printed.
    """
    # Classes look up the module that they are of.
    page = sys.modules["page"] = types.ModuleType("page")
    for name, block in page_blocks(path):
        # With an encoding, as a terminal has one: else the command line keeps to ASCII.
        printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        with contextlib.redirect_stdout(printed):
            RUNS[block.language](block, name, page.__dict__)
        printed.seek(0)
        if name == path:
            yield block, printed.read()


def page_blocks(path: Path) -> Iterator[tuple[Path, Block]]:
    """The blocks of a page that are run, behind those of the pages that it continues."""
    text = path.read_text()
    if continued := _CONTINUES.search(text):
        for name, block in page_blocks((path.parent / continued[1]).resolve()):
            if block.language == "python":
                yield name, block
    for block in read_blocks(text):
        if block.run and (block.language == "python" or _is_ours(block)):
            yield path, block


def _is_ours(block: Block) -> bool:
    return block.language == "console" and {words[0] for words in commands(block)} == {"ratrain"}


def run_python(block: Block, path: Path, names: dict) -> None:
    """Runs a python block, saved if it says as what; an error in it names the page and its line."""
    if block.title is not None:
        Path(block.title).write_text(block.code)
    exec(compile("\n" * (block.line - 1) + block.code, path, "exec"), names)


def run_console(block: Block, path: Path, names: dict) -> None:
    """Runs a console block's `ratrain` commands."""
    from ratrain_jax.cli import main

    for words in commands(block):
        try:
            main(words[1:])
        except SystemExit as ended:
            assert not ended.code, f"{path}:{block.line}: {shlex.join(words)} failed"


RUNS = {"python": run_python, "console": run_console}
"""How a block of a language is run."""


def matches(shown: str, printed: str, numbers: bool = True) -> bool:
    """Whether a page shows what was printed.

    Args:
        shown: the output in the page.
        printed: what was printed.
        numbers: whether numbers, their columns and units, and bars of letters must be the same.
    """
    if not numbers:
        shown, printed = map(_without_numbers, (shown, printed))
    pattern = re.escape(shown.strip()).replace("…", ".*")
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


_NUMBER = re.compile(r"\d[\d.,]*(e[+-]?\d+)?…?( ([KMGT]i)?B\b)?")
_BAR = re.compile(r"([A-Z])\1+")  # as long as its bytes are many


def _without_numbers(text: str) -> str:
    return re.sub(r" +", " ", _BAR.sub(r"\1", _NUMBER.sub("0", text)))


def fill(path: Path) -> str:
    """A page with the outputs that its blocks print, wherever it shows one."""
    text = path.read_text()
    for block, printed in run_page(path):
        if block.output is not None and not matches(block.output, printed):
            text = text.replace(
                f"```text\n{block.output}```", f"```text\n{printed.rstrip()}\n```", 1
            )
    return text


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        page = Path(argument).resolve()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            filled = fill(page)
        page.write_text(filled)
