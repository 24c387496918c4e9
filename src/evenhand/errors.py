"""Every error a user can meet: what happened, why it matters, what to type instead; never a data value."""

from __future__ import annotations

from pathlib import Path


class EvenhandError(Exception):
    """Base of all errors raised on purpose; the command line turns it into one message and an exit code."""

    exit_code = 1
    reported = False
    """Whether another process of the run says it: it is printed once."""


class UsageError(EvenhandError, ValueError):
    """An argument, flag or file cannot be used. Nothing was spent."""

    exit_code = 2


class DataError(UsageError):
    """The data do not have the declared form. Nothing was spent."""


class ForeignLoaderError(UsageError):
    """Rows come from a sampler whose inclusion probabilities the accountant cannot bound (law 7)."""


class UnsupportedModelError(UsageError):
    """A module or loss for which per-record gradients are undefined or cannot be computed exactly."""


class CoupledError(UnsupportedModelError):
    """Records or state were found to be coupled after steps had run: nothing of the run may be released.

    ``cause`` is what the ledger says: "records" or "state".
    """

    def __init__(self, message: str, cause: str = "records") -> None:
        super().__init__(message)
        self.cause = cause


class CalibrationError(UsageError):
    """No noise level meets the asked privacy; the message names the nearest that can."""


class PlanMismatchError(UsageError):
    """A run folder belongs to another plan; its ledger cannot be continued with this one."""


class BatchReuseError(UsageError):
    """A batch was skipped, repeated or made elsewhere, so the sampling would not be the sampling accounted."""


class BudgetExhausted(EvenhandError):  # noqa: N818 - the name users see in design.md
    """The next step would spend more than was promised. Nothing was released."""

    exit_code = 3


class AuditError(EvenhandError):
    """An audit certified more epsilon than was promised, so the run is blocked. Nothing was released."""


class LedgerError(EvenhandError):
    """The ledger is damaged, was shortened, or is in use by another process."""


class ProcessError(EvenhandError):
    """A process of a run in several processes is gone, or does something else than the others. All of them stop."""


class StorageError(EvenhandError, OSError):
    """A file cannot be read or written: the disk is full or read-only, a folder was moved, there are too many files.

    ``advice`` is the part of the message that says what is charged and what to type.
    """

    def __init__(
        self, message: str, *, code: int | None = None, file: Path | None = None, advice: str | None = None
    ) -> None:
        super().__init__(message)
        self.advice = advice
        if code is not None:
            self.errno = code
        if file is not None:
            self.filename = str(file)

    def __str__(self) -> str:
        return str(self.args[0])


class OutOfMemory(EvenhandError, MemoryError):  # noqa: N818 - torch calls it so too
    """The machine has no memory left for what was asked. What is charged stays charged; the run can be resumed."""


class VerificationError(EvenhandError):
    """A file of the run folder does not match its ledger, plan or statement."""
