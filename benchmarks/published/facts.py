"""Reads the published rows."""

from __future__ import annotations

import csv
import pathlib

FACTS = pathlib.Path(__file__).parent / "facts"


def read(name: str) -> list[dict[str, str]]:
    """The rows of a file; lines of its header begin with #."""
    lines = (FACTS / f"{name}.csv").read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))
