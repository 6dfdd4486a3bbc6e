"""What the keys of a Hugging Face `config.json` say, as fields of `ModelConfig`.

Terms.
    A **family** is what `model_type` names. What is not in the table is refused by name.
    A key that is left out has the value that the family's class in the library `transformers` gives it, if every
    model of that family can live with it; otherwise it is missing.
"""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Mapping
from typing import Any

from ratrain_jax.errors import ModelConfigError
from ratrain_jax.models.fields import (
    RANGES,
    Range,
    check,
    default_head_dim,
    flag,
    is_name,
    number,
    shown,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """What is not said in a file of a family.

    Attributes:
        qkv_bias: Whether q, k and v have biases.
        max_positions: The longest sequence where a file names none.
        grouped: Whether `num_key_value_heads` must be given; otherwise there are as many as query heads unless it is.
    """

    qkv_bias: bool = False
    max_positions: int = 2048
    grouped: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(max_positions=131_072, grouped=True),
    "qwen2": Family(qkv_bias=True, max_positions=32_768, grouped=True),
    "baichuan": Family(max_positions=4096),
}
"""The families that can be read, by `model_type`."""

KEYS: Mapping[str, str] = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "vocab": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
}
"""The key of each field whose key has another name."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Keys that count the experts of a mixture."""

_BAICHUAN_13B = (5120, 40)
"""Hidden size and layers of the Baichuan models that have ALiBi; both generations have the same `model_type`."""


def read_fields(mapping: Any, name: str | None) -> dict[str, Any]:
    """The fields of `ModelConfig`.

    Args:
        mapping: The parsed file.
        name: What to call the model, or None to take its own name.

    Raises:
        ModelConfigError: A key is missing or has a bad value, or the model is refused.
    """
    if not isinstance(mapping, Mapping):
        raise ModelConfigError(f"it is {shown(mapping)}; give an object of keys and values.")
    _refuse_mixtures(mapping)
    kind = mapping.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        what = (
            f"is {shown(kind)}, which is not supported" if "model_type" in mapping else "is missing"
        )
        raise ModelConfigError(f"model_type {what}; give a model of one of {', '.join(FAMILIES)}.")
    family = FAMILIES[kind]
    _refuse_variants(mapping, kind)
    fields: dict[str, Any] = {
        field: _needed(mapping, KEYS[field])
        for field in ("layers", "hidden", "ffn", "heads", "vocab")
    }
    fields["kv_heads"] = (
        _needed(mapping, KEYS["kv_heads"])
        if family.grouped
        else _given(mapping, KEYS["kv_heads"], fields["heads"])
    )
    head_dim = _given(mapping, "head_dim", None)
    if head_dim is None:
        head_dim = default_head_dim(fields["hidden"], fields["heads"], KEYS)
    fields |= {
        "name": name or _own_name(mapping, kind),
        "head_dim": head_dim,
        "qkv_bias": family.qkv_bias,
        "positions": _positions(mapping, kind, fields),
        "rope_theta": _rope_theta(mapping),
        "norm_eps": _given(mapping, KEYS["norm_eps"], 1e-6),
        "tied_embeddings": _given(mapping, KEYS["tied_embeddings"], False),
        "max_positions": _max_positions(mapping, kind, family),
    }
    check(fields, KEYS)
    return fields


def _needed(mapping: Mapping[str, Any], key: str) -> Any:
    if key not in mapping:
        raise ModelConfigError(f"{key} is missing; add it.")
    return mapping[key]


def _given(mapping: Mapping[str, Any], key: str, default: Any) -> Any:
    """A key's value; the default where it is left out or null, which mean the same in these files."""
    value = mapping.get(key)
    return default if value is None else value


def _refuse_mixtures(mapping: Mapping[str, Any]) -> None:
    for key in EXPERTS:
        count = number(key, _given(mapping, key, 0), Range(0, 2**31 - 1))
        if count > 1:
            raise ModelConfigError(
                f"{key} is {count}: mixtures of experts ({shown(mapping.get('model_type'))}) are not supported;"
                " give a dense model."
            )


def _refuse_variants(mapping: Mapping[str, Any], kind: str) -> None:
    """Refuses what changes the model in a way that it cannot follow."""
    activation = _given(mapping, "hidden_act", "silu")
    if activation != "silu":
        raise ModelConfigError(
            f"hidden_act is {shown(activation)}, which is not supported; give a model with 'silu'."
        )
    # In a Qwen2 model these keys mean nothing.
    for key in ("attention_bias", "mlp_bias") if kind != "qwen2" else ():
        if flag(key, _given(mapping, key, False)):
            raise ModelConfigError(
                f"{key} is true, but only q, k and v of Qwen2 models can have biases; give a model without."
            )
    rotated = _given(mapping, "partial_rotary_factor", 1)
    if rotated != 1:
        raise ModelConfigError(
            f"partial_rotary_factor is {shown(rotated)}, which is not supported; give a model that turns all features."
        )
    for key in ("rope_scaling", "rope_parameters"):
        _refuse_scaling(key, _given(mapping, key, {}))


def _refuse_scaling(key: str, entries: Any) -> None:
    """Newer files keep the base of the angles beside their stretching, in `rope_parameters`."""
    if not isinstance(entries, Mapping):
        raise ModelConfigError(f"{key} is {shown(entries)}; make it null or an object.")
    unsaid = "default" if "factor" not in entries else None
    kind = _given(entries, "rope_type", _given(entries, "type", unsaid))
    if kind != "default":
        raise ModelConfigError(
            f"{key} is of type {shown(kind)}, but stretched rotary positions are not supported;"
            " set it to null and keep to the sequences that the model was made for."
        )


def _rope_theta(mapping: Mapping[str, Any]) -> Any:
    inner = _given(mapping, "rope_parameters", {})
    return _given(inner, "rope_theta", _given(mapping, "rope_theta", 10_000.0))


def _positions(mapping: Mapping[str, Any], kind: str, fields: Mapping[str, Any]) -> str:
    """Baichuan models of 7B have rotary positions, those of 13B ALiBi.

    No key says so, but only the class of the former has `max_position_embeddings`, which tells models of other
    sizes apart.
    """
    if kind != "baichuan":
        return "rotary"
    large = (fields["hidden"], fields["layers"]) == _BAICHUAN_13B
    return "alibi" if large or KEYS["max_positions"] not in mapping else "rotary"


def _max_positions(mapping: Mapping[str, Any], kind: str, family: Family) -> Any:
    """The longest sequence; one that an attention window at work does not cut, where there is a window."""
    allowed = RANGES["max_positions"]
    longest = family.max_positions
    if kind == "baichuan":
        longest = number("model_max_length", _given(mapping, "model_max_length", longest), allowed)
    key = KEYS["max_positions"]
    longest = number(key, _given(mapping, key, longest), allowed)
    # A Qwen2 model's window is at work only where another key says so.
    windowed = kind == "mistral"
    if kind == "qwen2":
        windowed = flag("use_sliding_window", _given(mapping, "use_sliding_window", False))
    if not windowed:
        return longest
    window = _given(mapping, "sliding_window", longest)
    return min(longest, number("sliding_window", window, allowed))


def _own_name(mapping: Mapping[str, Any], kind: str) -> str:
    """The last part of where the model was loaded from, if the file says so."""
    path = mapping.get("_name_or_path")
    name = posixpath.basename(path.rstrip("/")) if isinstance(path, str) else ""
    return name if is_name(name) else kind
