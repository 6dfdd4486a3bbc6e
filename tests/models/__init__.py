"""Small models with ordinary train steps, shared by the tests."""

from .case import MAX_NORM as MAX_NORM
from .case import OPTIMIZERS as OPTIMIZERS
from .case import Case as Case
from .encoder_decoder import ENCODER_DECODER_CASE, ENCODER_DECODER_UNTIED_CASE
from .gpt import GPT_CASE
from .images import MIXER_CASE, UNET_CASE, VIT_CASE
from .llama import LLAMA_CASE
from .lstm import LSTM_CASE
from .mlp import EQUAL_MLP_CASE, SKIP_MLP_CASE, TIED_MLP_CASE
from .nnx_model import NNX_CASE

CASES = {
    case.name: case
    for case in (
        GPT_CASE,
        LLAMA_CASE,
        VIT_CASE,
        ENCODER_DECODER_CASE,
        ENCODER_DECODER_UNTIED_CASE,
        SKIP_MLP_CASE,
        EQUAL_MLP_CASE,
        TIED_MLP_CASE,
        UNET_CASE,
        MIXER_CASE,
        LSTM_CASE,
        NNX_CASE,
    )
}
"""Every case by its name."""
