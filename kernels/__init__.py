"""The machine and its kernels: memory hierarchy, tiling, GEMM and attention with their cost."""

from .machine import Accelerator as Accelerator
from .machine import Latencies as Latencies
from .machine import Link as Link
from .machine import Machine as Machine
from .machine import Memory as Memory
from .machine import Overlap as Overlap
from .machine_file import builtin_machines as builtin_machines
from .machine_file import load_machine as load_machine
from .machine_file import parse_machine as parse_machine
