"""What a run has measured, in a file, so that one that was broken off goes on from there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from links.cases import Case
from links.measure import Measured, Result


class Kept:
    """Results by case.

    Args:
        path: of the file, which may not be there yet; nothing is read or written without.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[Case, list[Result]] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                case, rows = json.loads(line)
                self._found[Case(**case)] = [_result(row) for row in rows]

    def results(self, cases: Sequence[Case]) -> list[Result]:
        """All of some cases, in their order."""
        return [result for case in cases for result in self._found.get(case, ())]

    def has(self, case: Case) -> bool:
        """Whether a case was measured."""
        return case in self._found

    def add(self, case: Case, results: Sequence[Result]) -> None:
        """Adds the results of a case."""
        self._found[case] = list(results)
        if self._path is not None:
            rows = [dataclasses.asdict(result) for result in results]
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps([dataclasses.asdict(case), rows]) + "\n")


def _result(row: dict[str, Any]) -> Result:
    case = Case(**row.pop("case"))
    variants = {name: Measured(**measured) for name, measured in row.pop("variants").items()}
    return Result(case=case, variants=variants, **row)
