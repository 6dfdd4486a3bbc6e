"""The tables of a run, in Markdown, and what it says about the promises."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from links.cases import BASE, FULL, RECOVERED, RECOVERED_AHEAD, Case
from links.measure import Measured, Result

SLOWER, SHARE_OF_GAIN, OFF = 0.98, 0.85, 0.10
"""The least ratio that is promised, the least share of the gain that could be had, and the largest error of a prediction."""
BEST = ((Case(1, 1), 1.35), (Case(4, 2), 1.35))
"""The least ratio at a case's best rate."""


def tables(results: Sequence[Result]) -> dict[str, str]:
    """Every table, by name.

    Args:
        results: of all cases.
    """
    flat = [r for r in results if r.case.stages == 1]
    made = {
        f"{'clipped' if clip else 'plain'}": _gains([r for r in flat if r.case.clip == clip])
        for clip in (False, True)
        if any(r.case.clip == clip for r in flat)
    }
    made["mechanisms"] = _mechanisms([r for r in flat if r.variants[FULL].tail is not None])
    piped = [r for r in results if r.case.stages > 1]
    if piped:
        made["pipeline"] = _pipeline(piped)
    made["predictions"] = _predictions(results)
    made["aims"] = _aims(results)
    return made


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.0f}"


def _gains(results: Sequence[Result]) -> str:
    """Step-end baseline and the full schedule at each rate."""
    rows = []
    for r in results:
        one = [f"zero={r.case.zero}, m={r.case.microbatches}", f"{r.share:g}", _ms(r.compute)]
        for name in (name for name in r.variants if name != BASE):
            gain = f"{r.ratio(name, BASE):.2f} ({r.ideal_ratio(name, BASE):.2f})"
            one += [_ms(r.variants[name].seconds), gain]
        rows.append([*one[:3], _ms(r.variants[BASE].seconds), *one[3:7]])
    head = ["step", "link / compute", "compute ms", "1f1b ms", "ratrain ms", "ratio (bound)"]
    if any("deferred" in r.variants for r in results):
        return _table([*head, "deferred ms", "ratio (bound)"], rows)
    return _table(head, [row[:6] for row in rows])


def _mechanisms(results: Sequence[Result]) -> str:
    rows = [
        [
            f"zero={r.case.zero}, m={r.case.microbatches}, {r.share:g}: {name}",
            _ms(one.seconds),
            _ms(one.tail),
            _ms(one.exposed),
            f"{r.ratio(name, BASE):.2f}",
            f"{r.ideal_ratio(name, BASE):.2f}",
        ]
        for r in results
        for name, one in r.variants.items()
    ]
    head = ["variant", "step ms", "tail ms", "exposed ms", "ratio", "bound"]
    return _table(head, rows)


def _pipeline(results: Sequence[Result]) -> str:
    rows = [
        [
            f"m={r.case.microbatches}, {r.share:g}",
            _ms(r.variants[RECOVERED].seconds),
            _ms(r.variants[RECOVERED_AHEAD].seconds),
            f"{r.ratio(RECOVERED_AHEAD, RECOVERED):.2f} ({r.ideal_ratio(RECOVERED_AHEAD, RECOVERED):.2f})",
            _ms(r.variants[FULL].seconds),
            f"{r.ratio(FULL, RECOVERED_AHEAD):.2f} ({r.ideal_ratio(FULL, RECOVERED_AHEAD):.2f})",
            f"{r.variants[FULL].ideal / r.variants[FULL].seconds:.2f}",
        ]
        for r in results
    ]
    head = [
        "step",
        "recovered ms",
        "ahead ms",
        "ratio (bound)",
        "residuals saved ms",
        "gain of saving (bound)",
        "bound / measured",
    ]
    return _table(head, rows)


def _named(results: Sequence[Result]) -> Iterator[tuple[str, Measured]]:
    for r in results:
        for name, one in r.variants.items():
            yield f"{_of(r)}, {name}", one


def _of(result: Result) -> str:
    """A case on a link, in words."""
    case = result.case
    ways = (f"zero={case.zero}",) if case.stages == 1 else (f"{case.stages} stages",)
    clipped = ("clipped",) if case.clip else ()
    return ", ".join((*ways, f"m={case.microbatches}", *clipped, f"{result.share:g}"))


def _predictions(results: Sequence[Result]) -> str:
    errors = {name: one.predicted / one.seconds - 1 for name, one in _named(results)}
    large = [error for error in errors.values() if abs(error) > OFF]
    mean, middle = statistics.mean(map(abs, errors.values())), statistics.median(errors.values())
    return f"{len(errors)} steps predicted: mean error {mean:.1%}, {len(large)} over {OFF:.0%}; the median is {middle:+.1%}."


def _aims(results: Sequence[Result]) -> str:
    found = list(promises(results))
    missed = [f"- {what}" for held, what in found if not held]
    return "\n".join(
        [f"{len(found) - len(missed)} of {len(found)} are reached; not these:", "", *missed]
    )


def promises(results: Sequence[Result]) -> Iterator[tuple[bool, str]]:
    """Each promise, and whether it is kept.

    Args:
        results: of all cases.
    """
    flat = [r for r in results if r.case.stages == 1]
    for case, least in BEST:
        found = [r.ratio(FULL, BASE) for r in flat if r.case == case]
        if found:
            best = max(found)
            named = f"zero={case.zero}, m={case.microbatches}"
            yield best >= least, f"{named}: {best:.2f} at its best rate, at least {least}"
    for r in flat:
        where = f"{_of(r)}, {FULL}"
        ratio, share = r.ratio(FULL, BASE), r.gain_share(FULL, BASE)
        yield ratio >= SLOWER, f"{where}: not slower by more than {1 - SLOWER:.0%} ({ratio:.3f})"
        yield share >= SHARE_OF_GAIN, f"{where}: {share:.2f} of the gain that could be had"
    for name, one in _named(results):
        error = one.predicted / one.seconds - 1
        yield abs(error) <= OFF, f"{name}: predicted {error:+.1%}"
