"""The machine and its kernels: memory hierarchy, tiling, GEMM and attention with their cost."""

from ratrain_jax.kernels.attention import vmac_attention as vmac_attention
from ratrain_jax.kernels.attention_plan import Attention as Attention
from ratrain_jax.kernels.attention_plan import AttentionPlan as AttentionPlan
from ratrain_jax.kernels.attention_search import cost_attention as cost_attention
from ratrain_jax.kernels.attention_search import plan_attention as plan_attention
from ratrain_jax.kernels.cost import KernelCost as KernelCost
from ratrain_jax.kernels.cost import cost_gemm as cost_gemm
from ratrain_jax.kernels.dot_general import Arithmetic as Arithmetic
from ratrain_jax.kernels.dot_general import gemm_of as gemm_of
from ratrain_jax.kernels.dot_general import vmac_dot_general as vmac_dot_general
from ratrain_jax.kernels.emulator import emulate_gemm as emulate_gemm
from ratrain_jax.kernels.gemm_plan import plan_gemm as plan_gemm
from ratrain_jax.kernels.machine import Accelerator as Accelerator
from ratrain_jax.kernels.machine import Latencies as Latencies
from ratrain_jax.kernels.machine import Link as Link
from ratrain_jax.kernels.machine import Machine as Machine
from ratrain_jax.kernels.machine import Memory as Memory
from ratrain_jax.kernels.machine import Overlap as Overlap
from ratrain_jax.kernels.machine_file import builtin_machines as builtin_machines
from ratrain_jax.kernels.machine_file import load_machine as load_machine
from ratrain_jax.kernels.machine_file import machine_of as machine_of
from ratrain_jax.kernels.machine_file import parse_machine as parse_machine
from ratrain_jax.kernels.tiles import Gemm as Gemm
from ratrain_jax.kernels.tiles import TilePlan as TilePlan
from ratrain_jax.kernels.tiles import check_plan as check_plan
