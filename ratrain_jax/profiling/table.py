"""A profile as a table to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from ratrain_jax.profiling.keys import SEPARATOR
from ratrain_jax.tables import render

if TYPE_CHECKING:
    from ratrain_jax.profiling.profile import Profile


def profile_table(profile: Profile) -> str:
    """What was measured, line by line, then the fits and the slowdowns.

    Args:
        profile: the profile.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("op", "code", "devices", "ms", "spread", "×"):
        left = name in ("op", "code")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for m in profile.measured:
        spread = f"{m.spread / m.seconds:.0%}" if m.seconds else ""
        shown = _short(m.code)
        table.add_row(m.kind, shown, str(m.devices), f"{m.seconds * 1e3:.3f}", spread, str(m.count))
    lines = [
        f"{line.kind} on {line.devices}: {line.latency * 1e6:.0f} µs + bytes / {line.bandwidth / 1e9:.2f} GB/s"
        for line in profile.lines
    ]
    slow = ", ".join(f"{busy}: ×{factor:.2f}" for busy, factor in profile.slowdowns)
    head = (
        f"{profile.device_count} {profile.device_kind} devices on {profile.cores} cores, JAX {profile.jax_version},"
        f" {profile.date}"
    )
    notes = [f"busy devices {slow}", f"to launch an op {profile.launch_seconds * 1e6:.0f} µs"]
    if profile.busy_elsewhere is not None:
        notes.append(f"other processes used {profile.busy_elsewhere:.2f} cores meanwhile")
    return "\n".join([head, render(table), "", *lines, *notes])


def _short(code: str) -> str:
    """A unit's code with a few letters of each layer's fingerprint."""
    layers, _, after = code.partition("/")
    if SEPARATOR not in layers and len(layers) < 16:
        return code
    return SEPARATOR.join(part[:4] for part in layers.split(SEPARATOR)) + (after and f"/{after}")
