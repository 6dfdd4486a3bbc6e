"""Byte-level batches of real text that every machine has: the sources of Python's library."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

VOCABULARY = 256


def read_sources(limit: int = 2_000_000) -> np.ndarray:
    """Reads the standard library's modules, in order of their names.

    Args:
        limit: Bytes to stop at.

    Returns:
        The bytes, shape (at most `limit`,), uint8.

    Raises:
        FileNotFoundError: This Python came without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise FileNotFoundError(f"No Python sources in {folder}; pass another text to batches().")
    return np.frombuffer(bytes(text[:limit]), np.uint8)


def batches(
    text: np.ndarray, *, batch_size: int, length: int, seed: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Draws passages without end.

    Args:
        text: The bytes, shape (bytes,).
        batch_size: Passages in a batch.
        length: Tokens in a passage.
        seed: Seed of the draws; equal seeds give equal batches.

    Yields:
        `inputs` and, one byte on, `targets`: both (batch_size, length), int32.
    """
    rng = np.random.default_rng(seed)
    offsets = np.arange(length + 1)
    while True:
        starts = rng.integers(0, len(text) - length, batch_size)
        passages = text[starts[:, None] + offsets].astype(np.int32)
        yield {"inputs": passages[:, :-1], "targets": passages[:, 1:]}
