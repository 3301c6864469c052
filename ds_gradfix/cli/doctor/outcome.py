"""What a check of the doctor is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ds_gradfix.cli._job import CannotLook
from ds_gradfix.errors import GradfixError

if TYPE_CHECKING:
    from ds_gradfix.cli.doctor.look import Look

OK, ACT, UNKNOWN = "ok", "act", "unknown"
EXIT_STATUS = {OK: 0, ACT: 1, UNKNOWN: 2}


@dataclass(frozen=True)
class Outcome:
    """What a check found: in one sentence, in more lines, what to do about it, and the same as plain data.

    ``listing`` is shown in place of ``details`` where every item is asked for.
    """

    status: str
    summary: str
    details: Sequence[str] = ()
    to_do: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    listing: Sequence[str] = ()


@dataclass(frozen=True)
class Check:
    """A check: what it looks at, in one line, and the function that looks."""

    purpose: str
    look: Callable[[Look], Outcome]
    of_a_job: bool = False


def examine(check: Check, look: Look) -> Outcome:
    """Run one check. Whatever it raises is its finding: what ds-gradfix refuses is to be acted on."""
    try:
        return check.look(look)
    except CannotLook as reason:
        return Outcome(UNKNOWN, str(reason))
    except GradfixError as refusal:
        return Outcome(ACT, str(refusal))
    except Exception as error:
        return Outcome(UNKNOWN, f"This check failed: {type(error).__name__}: {error}")
