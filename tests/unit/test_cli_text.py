"""What `ratrain train` makes of a text: its tokens, and passages of it."""

import pytest

from ratrain_jax.cli.text import passages, read_tokens
from ratrain_jax.errors import OptionError


def test_tokens_are_bytes_or_numbers_of_distinct_bytes(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"hello\xff")
    tokens, words = read_tokens(str(path), 256)
    assert bytes(tokens) == b"hello\xff" and words == "tokens are bytes"
    tokens, words = read_tokens(str(path), 1000)
    assert bytes(tokens) == b"hello\xff" and "1,000" in words
    tokens, words = read_tokens(str(path), 5)
    assert tokens.tolist() == [1, 0, 2, 2, 3, 4] and "5 distinct" in words
    with pytest.raises(OptionError, match="5 distinct bytes"):
        read_tokens(str(path), 4)


def test_passages_are_drawn_from_the_text_with_targets_one_on(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(10)))
    tokens, _ = read_tokens(str(path), 256)
    batch = next(passages(tokens, 50, 8, 0))
    assert batch["inputs"].shape == (50, 8)
    assert (batch["targets"] == batch["inputs"] + 1).all()
    assert set(batch["inputs"][:, 0].tolist()) == {0, 1}
    with pytest.raises(OptionError, match="shorter"):
        next(passages(tokens, 1, 10, 0))
