"""What a decoder of the LLaMA family is: its widths, its positions, its biases; and where to read it from."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import os
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from ratrain_jax.errors import ModelConfigError
from ratrain_jax.models.fields import check, default_head_dim, is_name
from ratrain_jax.models.huggingface import read_fields

_PACKAGE: Final = "ratrain_jax.models"
_LARGEST: Final = 2**20
"""Bytes of a file that is read as a configuration; real ones have a thousand or two."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, grouped heads, SwiGLU, no biases but those of q, k and v.

    Attributes:
        name: What to call it.
        layers: Decoder layers.
        hidden: Width of the model.
        ffn: Width of the feed-forward part.
        heads: Query heads.
        kv_heads: Key and value heads; they divide the query heads.
        vocab: Tokens.
        head_dim: Features of a head; hidden / heads unless given.
        qkv_bias: Whether the projections to q, k and v have biases.
        positions: "rotary", or "alibi" for biases of the scores that fall with the distance.
        rope_theta: Base of the rotary angles; without meaning for "alibi".
        norm_eps: Added to the mean square in each norm.
        tied_embeddings: Whether the embedding is also the head.
        max_positions: The longest sequence that the model is for.

    Raises:
        ModelConfigError: A value is of the wrong kind or out of range, or two contradict each other.

    Example:
        >>> ModelConfig("tiny", layers=2, hidden=16, ffn=32, heads=4, kv_heads=2, vocab=64).parameters
        6736
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = None  # pyright: ignore[reportAssignmentType]  # None is gone after __post_init__
    qkv_bias: bool = False
    positions: str = "rotary"
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tied_embeddings: bool = False
    max_positions: int = 4096

    def __post_init__(self) -> None:
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", default_head_dim(self.hidden, self.heads))
        check({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (queries + keys)  # q and out, k and v
        biases = queries + 2 * keys if self.qkv_bias else 0
        return attention + biases + 3 * self.hidden * self.ffn + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, exactly."""
        tables = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return tables + self.layers * self.layer_parameters + self.hidden

    @classmethod
    def from_huggingface(
        cls, mapping: Mapping[str, Any], *, name: str | None = None, origin: str = "the mapping"
    ) -> ModelConfig:
        """Reads what a Hugging Face `config.json` says of a LLaMA-, Mistral-, Qwen2- or Baichuan-style model.

        A window of attention (`sliding_window`) that is at work bounds `max_positions`: no shorter sequence meets it.

        Args:
            mapping: The parsed file.
            name: What to call the model; its `_name_or_path`, or its type, unless given.
            origin: Where the mapping came from, for messages.

        Returns:
            The configuration.

        Raises:
            ModelConfigError: A key is missing or has a bad value, or the model is of another kind (a mixture of
                experts, another activation, stretched rotary positions).

        Example:
            >>> entries = {"model_type": "qwen2", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32}
            >>> entries |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
            >>> ModelConfig.from_huggingface(entries).qkv_bias
            True
        """
        try:
            return cls(**read_fields(mapping, name))
        except ModelConfigError as error:
            raise ModelConfigError(f"{origin}: {error}") from None


def builtin_configs() -> tuple[str, ...]:
    """Names of the configurations that come with the package.

    Example:
        >>> builtin_configs()
        ('baichuan2-13b', 'llama2-13b', 'llama2-70b', 'llama2-7b', 'qwen2.5-32b')
    """
    files = importlib.resources.files(_PACKAGE).joinpath("data").iterdir()
    names = (file.name for file in files)
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def load_config(name_or_path: str | os.PathLike[str]) -> ModelConfig:
    """Loads a configuration by the name of a built-in one or from a Hugging Face `config.json`.

    Args:
        name_or_path: A name out of `builtin_configs()`, or the path of a `config.json` or of the folder that holds it.

    Returns:
        The configuration.

    Raises:
        ModelConfigError: There is no such file, it is not a JSON object, or as in `ModelConfig.from_huggingface`.

    Example:
        >>> load_config("llama2-70b").parameters
        68976648192
    """
    if isinstance(name_or_path, str) and name_or_path in builtin_configs():
        return _builtin(name_or_path)
    path = pathlib.Path(name_or_path)
    try:
        path = path / "config.json" if path.is_dir() else path
        with path.open("rb") as file:
            source = file.read(_LARGEST + 1)
    except (OSError, ValueError) as error:  # ValueError: the path has a zero byte
        known = ", ".join(builtin_configs())
        raise ModelConfigError(
            f"cannot read {str(path)!r} ({error}); give one of {known}, or the path of a config.json."
        ) from error
    if len(source) > _LARGEST:
        raise ModelConfigError(
            f"{path}: it is larger than a configuration can be ({_LARGEST} bytes); give the model's config.json."
        )
    return ModelConfig.from_huggingface(_parse(source, path), name=_name(path), origin=str(path))


@functools.cache
def _builtin(name: str) -> ModelConfig:
    file = importlib.resources.files(_PACKAGE).joinpath("data", f"{name}.toml")
    return ModelConfig(**tomllib.loads(file.read_text(encoding="utf-8")))


def _name(path: pathlib.Path) -> str | None:
    """The file's name, or its folder's where the file has the name that all have; None if it cannot be printed."""
    name = path.stem if path.name != "config.json" else path.absolute().parent.name
    return name if is_name(name) else None


def _parse(source: bytes, path: pathlib.Path) -> Any:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no number of JSON")

    try:
        return json.loads(source, parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # of syntax, encoding, length of a number, depth
        raise ModelConfigError(f"{path} is not valid JSON ({error}); repair it.") from error
