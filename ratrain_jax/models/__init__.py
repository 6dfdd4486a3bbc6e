"""Models to train and to plan for: decoders of the LLaMA family, from configurations that are published."""

from ratrain_jax.models.config import ModelConfig as ModelConfig
from ratrain_jax.models.config import builtin_configs as builtin_configs
from ratrain_jax.models.config import load_config as load_config
from ratrain_jax.models.language import LanguageModel as LanguageModel
from ratrain_jax.models.language import language_model as language_model
from ratrain_jax.models.llama import Llama as Llama
