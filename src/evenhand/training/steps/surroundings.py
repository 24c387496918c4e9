"""Hand over where a run belongs to a process on another machine: the ledger of datasets, data, caches, folder."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from evenhand import durable
from evenhand.data.sources.base import VARIABLE, cache_folder, data_folder
from evenhand.errors import StorageError, UsageError
from evenhand.runs.dataset_ledger import state_folder


@dataclass(frozen=True)
class Surroundings:
    """Folders of the process that starts a run elsewhere, by the variables that name them, and a file that proves them.

    Keys are not handed over: each run draws its own where it is trained.
    """

    variables: Mapping[str, str]
    folder: str
    proof: str

    @classmethod
    @contextmanager
    def shared(cls) -> Iterator[Surroundings]:
        """Yield those of this process, while a file in the state folder shows to others that they share it."""
        state = state_folder()
        durable.make_folder(state, private=True, parents=True)
        proof = state / f"shared-{secrets.token_hex(8)}"
        durable.write(proof, b"", durable.PRIVATE)
        variables = {
            "EVENHAND_STATE": str(state),
            VARIABLE: str(data_folder().absolute()),
            "XDG_CACHE_HOME": str(cache_folder().parent.absolute()),
        }
        try:
            yield cls(variables, str(Path.cwd()), str(proof))
        finally:
            with suppress(OSError):
                proof.unlink()

    def take(self) -> None:
        """Let this process use them.

        Raises:
          UsageError: this machine does not see the state folder, so runs would be counted in a ledger of its own.
        """
        if not Path(self.proof).exists():
            raise UsageError(
                f"This machine does not see {Path(self.proof).parent}, where runs on the same data are added up: set "
                "EVENHAND_STATE to a folder that all machines share, as they share --out. Nothing was spent."
            )
        os.environ.update(self.variables)
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise StorageError(
                f"This machine does not see {self.folder}, where the runs were started ({error.strerror}): start them "
                "in a folder that all machines share. Nothing was spent."
            ) from None
