"""Model configurations: published ones read exactly, others refused in one sentence, and no file breaks the reader."""

import json
import tomllib
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain_jax.errors import ModelConfigError, RATrainError
from ratrain_jax.models import ModelConfig, builtin_configs, language_model, load_config

PUBLISHED = tomllib.loads(
    (Path(__file__).parent / "published_models.toml").read_text(encoding="utf-8")
)
SMALL = {"layers": 2, "hidden": 16, "ffn": 24, "heads": 4, "kv_heads": 2, "vocab": 32}
ENTRIES = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def read(**entries):
    """What the entries say, those of value ... left out."""
    mapping = {key: value for key, value in (ENTRIES | entries).items() if value is not ...}
    return ModelConfig.from_huggingface(mapping)


def counted(config):
    """Parameters of the model's own abstract state."""
    state = language_model(config, sequence=8).abstract_state()
    return sum(leaf.size for leaf in jax.tree.leaves(state.params))


# Published models.


def test_all_published_models_are_built_in():
    assert set(builtin_configs()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_counted_exactly(name):
    config = load_config(name)
    assert config.name == name
    assert config.parameters == PUBLISHED[name]["parameters"] == counted(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_file_gives_the_built_in_configuration(name, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]["config"]))
    assert load_config(folder) == load_config(folder / "config.json") == load_config(name)


@pytest.mark.parametrize(
    "fields",
    [
        {"qkv_bias": True},
        {"tied_embeddings": True},
        {"head_dim": 6},
        {"positions": "alibi", "kv_heads": 1, "head_dim": 3, "qkv_bias": True},
    ],
    ids=str,
)
def test_parameters_of_other_forms_are_counted_exactly(fields):
    config = ModelConfig("small", **SMALL | fields)
    assert config.parameters == counted(config)


# What a config.json says.


def test_what_is_left_out_is_as_in_the_familys_class():
    assert read(num_key_value_heads=...) == ModelConfig(
        "llama", **SMALL | {"kv_heads": 4}, head_dim=4, max_positions=2048
    )
    assert read(rope_theta=None, head_dim=None, rope_scaling=None, num_experts=None) == read()


def test_the_base_of_the_angles_is_found_in_old_and_new_files():
    assert read(rope_theta=5e5).rope_theta == 5e5
    newer = {"rope_type": "default", "rope_theta": 1e6}
    assert read(rope_parameters=newer).rope_theta == 1e6


def test_qwen2_has_biases_and_mistral_has_none():
    assert read(model_type="qwen2").qkv_bias
    assert not read(model_type="mistral").qkv_bias


@pytest.mark.parametrize(
    ("entries", "longest"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, 4096),
        ({"model_type": "mistral", "sliding_window": None}, 8192),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, 4096),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, 8192),
        ({"model_type": "qwen2", "sliding_window": 4096}, 8192),
    ],
    ids=str,
)
def test_a_window_at_work_bounds_the_sequence(entries, longest):
    assert read(max_position_embeddings=8192, **entries).max_positions == longest


def test_baichuan_models_have_the_positions_of_their_size():
    large = {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40}
    baichuan = {"model_type": "baichuan", "num_key_value_heads": ...}
    assert read(**baichuan, **large, model_max_length=4096).positions == "alibi"
    assert read(**baichuan, **large, max_position_embeddings=4096).positions == "alibi"
    seven = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    found = read(**baichuan, **seven, max_position_embeddings=4096, model_max_length=2048)
    assert (found.positions, found.max_positions) == ("rotary", 4096)


def test_a_model_is_called_by_the_name_of_its_file(tmp_path):
    file = tmp_path / "my-model.json"
    file.write_text(json.dumps(ENTRIES | {"_name_or_path": "somebody/else"}))
    assert load_config(file).name == "my-model"
    assert read(_name_or_path="somebody/else").name == "else"


# What is refused.


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "num_local_experts is 8: mixtures .*'mixtral'"),
        ({"model_type": "qwen2_moe", "num_experts": 60}, "num_experts is 60: mixtures .*'qwen2_moe'"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, "n_routed_experts is 256: mixtures"),
        ({"num_experts": "8"}, "num_experts is '8'; make it a whole number"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2', which is not supported; .* llama, mistral, qwen2"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
        ({"model_type": ...}, "model_type is missing"),
        ({"hidden_size": ...}, "hidden_size is missing; add it"),
        ({"model_type": "qwen2", "num_key_value_heads": ...}, "num_key_value_heads is missing"),
        ({"hidden_size": "16"}, "hidden_size is '16'; make it a whole number from 1 to 16777216"),
        ({"hidden_size": 16.0}, "hidden_size is 16.0; make it a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; make it a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": 2**31}, "vocab_size is 2147483648; .* to 2147483647"),
        ({"vocab_size": 10**5000}, "vocab_size is of type int; make it a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; make it a number"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings is 0; make it true or false"),
        ({"num_attention_heads": 3}, "hidden_size=16 is no multiple of num_attention_heads=3"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"head_dim": 5}, "head_dim=5 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported; give a model with 'silu'"),
        ({"attention_bias": True}, "attention_bias is true, but only q, k and v of Qwen2"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is of type 'linear', .* set it to null"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling is of type None"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters is of type 'yarn'"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; make it null or an object"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window is -1"),
        ({"model_type": "baichuan", "model_max_length": 1e9}, "model_max_length is 1000000000.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)  # fmt: skip
def test_a_refusal_names_the_key_its_value_and_what_to_do(entries, message):
    with pytest.raises(ModelConfigError, match=f"^the mapping: .*{message}") as raised:
        read(**entries)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "name is ''; make it a printable string"),
        ({"hidden": None}, "hidden is None; make it a whole number"),
        ({"hidden": 18}, "hidden=18 is no multiple of heads=4; change one of them, or give head_dim"),
        ({"positions": "learned"}, "positions is 'learned'; make it 'rotary' or 'alibi'"),
        ({"qkv_bias": 1}, "qkv_bias is 1; make it true or false"),
        ({"max_positions": 0}, "max_positions is 0"),
    ],
    ids=str,
)  # fmt: skip
def test_a_configuration_made_in_code_is_checked_too(fields, message):
    with pytest.raises(ModelConfigError, match=f"^{message}"):
        ModelConfig(**{"name": "small"} | SMALL | fields)


# Files.


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "is not valid JSON .*; repair it"),
        (b"\xff\xfe{", "is not valid JSON"),
        (b'{"hidden_size": NaN}', "NaN is no number of JSON"),
        (b'{"hidden_size": 1' + b"0" * 5000 + b"}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[]", r"config.json: it is \[\]; give an object"),
        (b" " * (2**20 + 1), "larger than a configuration can be"),
        (b'{"model_type": "llama"}', "config.json: num_hidden_layers is missing"),
    ],
    ids=lambda x: repr(x[:20]),
)
def test_a_bad_file_is_named(source, message, tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(source)
    with pytest.raises(ModelConfigError, match=message) as raised:
        load_config(file)
    assert str(file) in str(raised.value)


@pytest.mark.parametrize("name", ["llama3-8b", "no/such/config.json", "zero\0byte", "x" * 5000])
def test_what_is_neither_a_name_nor_a_file_is_refused_with_the_names(name):
    with pytest.raises(ModelConfigError, match=r"cannot read .*give one of baichuan2-13b, .* path"):
        load_config(name)


# No file breaks the reader.

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(10**4000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        *ENTRIES,
        *("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "head_dim"),
        *("num_experts", "sliding_window", "use_sliding_window", "tie_word_embeddings"),
        *("hidden_act", "attention_bias", "partial_rotary_factor", "_name_or_path"),
        *("max_position_embeddings", "model_max_length"),
    ]
)
FAMILIES = st.sampled_from(["llama", "mistral", "qwen2", "baichuan"])


@given(FAMILIES, st.dictionaries(KEYS, VALUES, max_size=4), st.sets(KEYS, max_size=2))
def test_any_entries_give_a_configuration_or_a_named_error(family, changes, dropped):
    mapping = ENTRIES | {"model_type": family} | changes
    mapping = {key: value for key, value in mapping.items() if key not in dropped}
    check_outcome(lambda: ModelConfig.from_huggingface(mapping))


@given(VALUES)
def test_any_value_gives_a_configuration_or_a_named_error(value):
    check_outcome(lambda: ModelConfig.from_huggingface(value))


@given(st.data())
def test_any_bytes_give_a_configuration_or_a_named_error(tmp_path_factory, data):
    """Real files with pieces cut out and put in, and bytes of any kind."""
    text = json.dumps(PUBLISHED["llama2-7b"]["config"]).encode()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 12)))
    piece = data.draw(
        st.binary(max_size=8) | st.sampled_from([b"NaN", b"1e999", b"[[", b"-", b"{}"])
    )
    changed = text[:start] + piece + text[end:]
    file = tmp_path_factory.getbasetemp() / "fuzzed.json"
    file.write_bytes(data.draw(st.sampled_from([changed, piece])))
    check_outcome(lambda: load_config(file))


def check_outcome(make):
    try:
        config = make()
    except RATrainError as error:
        assert isinstance(error, ModelConfigError)
        assert "\n" not in str(error)
        str(error).encode()  # whatever was in the file, the message can be printed
    else:
        assert config.parameters > 0
