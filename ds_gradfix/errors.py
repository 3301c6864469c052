"""What ds-gradfix raises. A training job may catch :class:`GradfixError` for all of it."""

from __future__ import annotations


class GradfixError(RuntimeError):
    """Base of every error that ds-gradfix raises on purpose."""


class SettingsError(GradfixError, ValueError):
    """A setting has a name or a value that is not allowed; the message names both and what is."""


class PlanError(GradfixError):
    """A patch that was asked for by name, or any patch in strict mode, cannot act on this install."""


class RewriteError(GradfixError):
    """A rewrite did not match the installed source exactly as often as it says."""


class SlotError(GradfixError):
    """A place in a live module is held by somebody else, or is not there."""


class AuditError(GradfixError):
    """In strict mode: the first step's gradients or their norm are wrong, or can't be audited."""


class SelfCheckError(GradfixError):
    """A measurement on this engine's own process groups broke an invariant, or the ranks differ."""
