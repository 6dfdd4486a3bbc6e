"""A LLaMA-style model of the package, trained as a pipeline: it takes a configuration and no code.

    python examples/llama.py --stages 2 --data-parallel 2 --microbatches 4

`load_config("llama2-7b")`, or `load_config` of a model's `config.json`, gives the configuration of a published model.
"""

import jax
import optax
from text_data import VOCABULARY
from train_gpt import parse_arguments, run

from ratrain_jax.models import ModelConfig, language_model

CONFIG = ModelConfig(
    "small-llama", layers=4, hidden=64, ffn=192, heads=4, kv_heads=2, vocab=VOCABULARY
)

if __name__ == "__main__":
    arguments = parse_arguments("Trains a byte-level LLaMA as a pipeline.")
    model = language_model(
        CONFIG,
        sequence=arguments.length,
        dtype="float32",
        optimizer=optax.adamw(2e-3),
        scan=False,  # the state is handed back as it lies on the stages
    )
    run(model.step, model.init(jax.random.key(0)), arguments)
