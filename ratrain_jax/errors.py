"""The one hierarchy of errors that a user of RATrain can meet, and the one of warnings.

Every message says what is wrong, where, and what to do about it. This module imports nothing of the
project, so that every folder may raise from it.
"""


class RATrainError(Exception):
    """Base of all errors raised on purpose by this package."""


class StepError(RATrainError, ValueError):
    """The train step is not of a form that can be lowered."""


class LossError(StepError, TypeError):
    """The loss is no real scalar; also a `TypeError`, which JAX raises for it."""


class UnsupportedError(StepError):
    """The train step uses a construct that is refused by name."""


class OptionError(RATrainError, ValueError):
    """An argument of a public function is out of range or contradicts another."""


class BatchError(RATrainError, ValueError):
    """The batch cannot be cut into data-parallel ranks and microbatches."""


class LayoutError(RATrainError, ValueError):
    """The layers, stages, boundaries or devices asked for do not fit each other."""


class MemoryLimitError(RATrainError):
    """No choice of recovery brings a stage under its memory limit."""


class StateError(RATrainError, ValueError):
    """A state handed to a compiled step is not the state it was compiled for."""


class CheckpointError(RATrainError):
    """A checkpoint cannot be written or read, is damaged or of another model, or its folder is in use."""


class ProgramError(RATrainError, ValueError):
    """A program is malformed or wrong."""


class VerificationError(ProgramError):
    """A program breaks a rule of the lifecycle: order, life, completeness or memory."""


class ProgramFormatError(ProgramError):
    """A text or JSON form of a program cannot be read back."""


class MachineError(RATrainError, ValueError):
    """A machine description, or a tile plan for one, is malformed or does not fit."""


class PlanError(RATrainError, ValueError):
    """A plan is malformed, is for another model or batch, or is for what the runtime does not run."""


class InfeasibleError(RATrainError):
    """No configuration that was searched fits the machine's memory."""


class SimulationError(RATrainError, ValueError):
    """A program cannot be simulated: its ops wait for each other, or a cost is missing."""


class ProfileError(RATrainError, ValueError):
    """A profile is malformed, or was measured on devices of another kind."""


class ModelConfigError(RATrainError, ValueError):
    """A model's configuration is malformed, contradicts itself, or describes a model that is refused by name."""


class DistributedError(RATrainError):
    """The processes of a run did not find each other, do not agree, or one of them was lost."""


class RATrainWarning(UserWarning):
    """Base of all warnings given by this package."""


class RandomKeyWarning(RATrainWarning):
    """A random key gives every rank and microbatch the same numbers."""


class LossReductionWarning(RATrainWarning):
    """The loss is not the mean, or the sum, over examples that its reduction says."""
