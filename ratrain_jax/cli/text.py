"""Tokens of a text file: its bytes."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np

from ratrain_jax.errors import OptionError

BYTES = 256


def read_tokens(path: str, vocabulary: int) -> tuple[np.ndarray, str]:
    """Reads a file as tokens: its bytes, or where the vocabulary has less than 256, the numbers of its distinct bytes.

    Args:
        path: the file.
        vocabulary: tokens that the model knows.

    Returns:
        The tokens, shape (bytes,), uint8; and what they are, in words.

    Raises:
        OptionError: the vocabulary is too small for the file.
    """
    found = np.frombuffer(pathlib.Path(path).read_bytes(), np.uint8)
    if vocabulary == BYTES:
        return found, "tokens are bytes"
    if vocabulary > BYTES:
        return found, f"tokens are bytes: 256 of the vocabulary's {vocabulary:,} are used"
    distinct = np.unique(found)
    if len(distinct) > vocabulary:
        raise OptionError(
            f"{path} has {len(distinct)} distinct bytes and the model's vocabulary {vocabulary} tokens; take a text"
            " with fewer, or a model with a vocabulary of 256."
        )
    number_of = np.zeros(BYTES, np.uint8)
    number_of[distinct] = np.arange(len(distinct))
    words = f"tokens are the text's {len(distinct)} distinct bytes, numbered from 0 in their order"
    return number_of[found], words


def passages(
    tokens: np.ndarray, rows: int, length: int, seed: int, skipped: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Draws passages without end.

    Args:
        tokens: the text, shape (tokens,).
        rows: passages of a batch.
        length: tokens of a passage.
        seed: equal seeds give equal batches.
        skipped: how many batches are left out at the beginning.

    Returns:
        Batches of `inputs` and, one token on, `targets`: both (rows, length), int32.

    Raises:
        OptionError: the text is shorter than a passage.
    """
    if len(tokens) <= length:
        raise OptionError(
            f"the text has {len(tokens)} tokens, and a passage needs {length + 1}; take a longer text, or a shorter"
            " --sequence."
        )
    return _drawn(tokens, rows, length, seed, skipped)


def _drawn(
    tokens: np.ndarray, rows: int, length: int, seed: int, skipped: int
) -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    for _ in range(skipped):
        rng.integers(0, len(tokens) - length, rows)
    offsets = np.arange(length + 1)
    while True:
        starts = rng.integers(0, len(tokens) - length, rows)
        drawn = tokens[starts[:, None] + offsets].astype(np.int32)
        yield {"inputs": drawn[:, :-1], "targets": drawn[:, 1:]}
