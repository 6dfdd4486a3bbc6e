"""The colours of every picture and report: one meaning, one colour, told apart with colour-blind eyes too.

Ops take the colours of Okabe and Ito (https://jfly.uni-koeln.de/color/) with two of Paul Tol's in place of the two that
deuteranopes see as grey; bytes take Tol's muted set (https://personal.sron.nl/~pault/), so that no picture gives an op and a
kind of bytes the same colour. The greys of small bytes are equal on purpose: they are drawn as one.
"""

from __future__ import annotations

from typing import Final

from ratrain_jax.lowering.program import Kind

COLOURS: Final[dict[str, str]] = {
    "forward": "#56B4E9",
    "recovery": "#F0E442",
    "backward": "#009E73",
    "transfer": "#0072B2",
    "sync": "#D55E00",
    "update": "#AA3377",
    "prefetch": "#E69F00",
    "other": "#A8A8A8",
    "idle": "#EFEFEF",
    "exposed": "#000000",
}
"""Colours of bars by kind, of a compute lane that is idle, and of the outline of exposed communication."""

SMALL: Final = "#C4C4C4"
"""The colour of the kinds of bytes that are small in every step."""

MEMORY: Final[dict[Kind, str]] = {
    Kind.PARAMETERS: "#332288",
    Kind.OPTIMIZER: "#88CCEE",
    Kind.REPLICATED: SMALL,
    Kind.VIEW: "#44AA99",
    Kind.OPERAND: "#117733",
    Kind.BOUNDARY: "#DDCC77",
    Kind.RESIDUALS: "#CC6677",
    Kind.COTANGENT: "#999933",
    Kind.ACCUMULATOR: "#882255",
    Kind.GRADIENT: "#AA4499",
    Kind.PARTIALS: SMALL,
    Kind.SCALARS: SMALL,
    Kind.LOSS: SMALL,
    Kind.METRICS: SMALL,
}
"""Colours of bytes by kind."""


def ink_on(colour: str) -> str:
    """Black or white, whichever is better read on a colour.

    Args:
        colour: `#RRGGBB`.

    Example:
        >>> ink_on("#F0E442"), ink_on("#332288")
        ('#000000', '#FFFFFF')
    """
    red, green, blue = (int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5))
    luminance = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2
    # Where the contrasts with black and with white, as WCAG 2 defines them, are equal.
    return "#000000" if luminance > 0.18 else "#FFFFFF"
