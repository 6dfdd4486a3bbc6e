"""What the tables of `reproduce_paper.py` plan with: models, the space that is searched, and the published figures.

Confidence of a figure: *stated* in the paper's abstract, axes or captions; *secondary*, from a summary of the paper and
consistent with the others; *derived*, arithmetic on those.
"""

from __future__ import annotations

import ratrain_jax as rt
from ratrain_jax.kernels import Machine
from ratrain_jax.models import language_model, load_config
from ratrain_jax.planning.planner import MARGIN, workload
from ratrain_jax.planning.search import Candidate, search
from ratrain_jax.planning.space import Space
from ratrain_jax.planning.workload import Workload

MACHINE = rt.machines.load("mt3000")
LIMIT = int(MACHINE.usable_bytes * (1 - MARGIN))
ALLOCATIONS = (8, 16, 32, 64, 96, 128)
UNPUBLISHED = (192, 256)
"""Numbers of clusters that a row is computed for where the paper's is not published."""
SEQUENCE = 2048
TOKENS_A_CLUSTER = 2**14
"""Of LLaMA-2-7B's steps (derived): 2^22 at 256 clusters, and the batch grows with them."""

# Secondary: the fewest clusters, their pipeline depth, and the peak in GB of a cluster.
MINIMUM = {
    "llama2-7b": (8, 2, 19.57),
    "baichuan2-13b": (16, 8, 19.06),
    "qwen2.5-32b": (64, 16, 18.14),
    "llama2-70b": (96, 48, 19.46),
}
# Tokens a second of LLaMA-2-7B; 1,024 stated, the others secondary.
SCALING = {256: 29069.73, 512: 57558.07, 768: 85465.01, 1024: 112790.55}
# Secondary: seconds of a step as the paper's planner predicts it, and as measured. Only the first has a number of clusters
# and of tokens.
PREDICTED = {
    "llama2-7b": (140.92, 144.28),
    "baichuan2-13b": (268.74, 276.61),
    "qwen2.5-32b": (441.83, 455.21),
}
# Secondary: seconds of a step of 2^23 tokens (derived); that full-save runs out of memory is stated.
OUT_OF_MEMORY = float("inf")
STRATEGIES = {
    "llama2-13b": {
        "ratrain": 688.09,
        "tp-heavy": 826.53,
        "zero3-heavy": 717.93,
        "backward-checkpoint": 937.04,
        "tuned-pp-dp-zero": 945.84,
        "full-save": OUT_OF_MEMORY,
    },
    "qwen2.5-32b": {
        "ratrain": 1592.51,
        "tp-heavy": 1922.66,
        "zero3-heavy": 1798.78,
        "backward-checkpoint": 2162.54,
        "full-save": OUT_OF_MEMORY,
    },
}
# Stated: Qwen2.5-32B without a mechanism, step and tail over those of the full system.
ABLATION = {
    "forward recovery": (1.33, 1.00),
    "update-prefetch": (1.01, 2.31),
    "layerwise state": (1.03, 4.59),
}


def work_of(name: str, batch: int, machine: Machine, sequence: int = SEQUENCE) -> Workload:
    """A model's train step, to plan for.

    Args:
        name: of the model.
        batch: examples of a step.
        machine: what it is to run on.
        sequence: tokens of an example.
    """
    lm = language_model(load_config(name), sequence=sequence)
    return workload(lm.step, (lm.abstract_state(), lm.abstract_batch(1)), machine, batch)


def best(work: Workload, devices: int, **choices: tuple) -> Candidate | None:
    """The fastest configuration with microbatches of one or two examples; None where none fits.

    Args:
        work: the step.
        devices: clusters.
        **choices: of `Space`, in place of all.
    """
    options = {"rows": (1, 2), "zeros": (2, 1), **choices}
    layers = len(work.table(1).rows)
    space = Space(devices=devices, global_batch=work.global_batch, layers=layers, **options)
    return search(space, work.table, work.machine, LIMIT).best


def step_of(work: Workload, devices: int, **choices: tuple) -> float:
    """Seconds of the fastest step; `OUT_OF_MEMORY` where none fits. See `best`."""
    found = best(work, devices, **choices)
    return OUT_OF_MEMORY if found is None or found.seconds is None else found.seconds.step


def depths(work: Workload, devices: int, tensor: int = 1) -> tuple[int, ...]:
    """The pipeline depths whose groups divide the batch: 4,096 examples do not divide by 3, so of 192 clusters few do.

    Args:
        work: the step.
        devices: clusters.
        tensor: tensor-parallel ranks.
    """
    most = len(work.table(1).rows)
    found = []
    for stages in range(1, most + 1):
        group, rest = divmod(devices, stages * tensor)
        if not rest and work.global_batch % group == 0:
            found.append(stages)
    return tuple(found)
