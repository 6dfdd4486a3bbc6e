"""What the mechanisms gain on links that are slow beside the computation, measured between processes of one core each.

sudo python benchmarks/slow_links.py

Two processes run in network namespaces. The link between them is limited so that the bytes of a step take a share of its
compute seconds. The variants of a step run the very same executables, in turn, in blocks of steps that follow each other;
medians are shown, and beside the ratios what the simulator says of links and cores without any overhead.
Needs Linux, root and iproute2. Takes 3 minutes with --quick, and without, at the same speed, about an hour; with
--keep FILE it writes down what it has measured, and goes on from there when it is started again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from links.cases import ABLATED, BASE, DATA_PARALLEL, FULL, PIPELINES, QUICK, Case
from links.keep import Kept
from links.measure import Bench
from links.network import Network, network
from links.processes import Team
from links.tables import tables

DOCS = Path(__file__).parents[1] / "docs"
TEMPLATE = Path(__file__).parent / "links" / "page.md"
PAGE = DOCS / "explanation" / "slow-links.md"
PICTURE = DOCS / "images" / "slow_links.png"
SAME = 1e-6
"""Relative difference of losses up to which two runs count as the same."""


def measure(links: Network, options: argparse.Namespace, kept: Kept) -> None:
    """Measures all cases that are not there already."""
    with Team(links, options.threads) as team:
        bench = Bench(links, team)
        for case in _cases(options):
            if kept.has(case):
                continue
            shares = (0.5,) if options.quick else None
            kept.add(case, list(bench.results(case, shares, traced=case in ABLATED)))
            if options.docs and case == ABLATED[0]:
                bench.picture(str(PICTURE), [BASE, FULL])


def _cases(options: argparse.Namespace) -> Sequence[Case]:
    if options.quick:
        return QUICK
    # The longest last.
    return sorted((*DATA_PARALLEL, *PIPELINES), key=lambda case: case.clip)


def check_both(links: Network) -> None:
    """Stages and ranks over two processes: too many devices for two cores to be timed, but not to be right."""
    case, found = Case(2, 2, stages=2), []
    for count in (1, 2):
        with Team(links, threads=8, devices=4 // count, count=count) as team:
            found.append(Bench(links, team).losses(case, FULL, steps=3))
    for alone, several in zip(*found, strict=True):
        if abs(several - alone) > SAME * abs(alone):
            raise SystemExit(
                f"2 stages × 2 ranks: losses {found[1]}, but {found[0]} in one process"
            )
    equal = "the very losses" if found[0] == found[1] else "losses as near as rounding lets them"
    print(f"2 stages × 2 ranks over two processes: {equal} of one process\n")


def write_page(made: Mapping[str, str]) -> None:
    """Writes the page: its text with each table in its place."""
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, table in made.items():
        mark = f"<!-- {name} -->\n"
        if mark not in text:
            raise SystemExit(f"{TEMPLATE} has no place for the table {name}")
        text = text.replace(mark, f"{table}\n")
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    """Prints the tables, and which aims are reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two cases at one rate")
    parser.add_argument("--threads", type=int, default=2, help="of XLA's pool in each process")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="file for what was measured")
    parser.add_argument("--tables", action="store_true", help="only of what FILE has")
    parser.add_argument("--docs", action="store_true", help="write the page and its picture")
    options = parser.parse_args()
    if options.quick and options.keep:
        parser.error("--quick measures one rate of a case, and --keep would take it for all.")
    if options.tables and not options.keep:
        parser.error("--tables needs --keep FILE.")
    kept = Kept(options.keep)
    if not options.tables:
        with network() as links:
            check_both(links)
            measure(links, options, kept)
    made = tables(kept.results(_cases(options)))
    for name, table in made.items():
        print(f"{name}\n\n{table}\n")
    if options.docs:
        write_page(made)


if __name__ == "__main__":
    main()
