"""Corrects known gradient defects of an unmodified DeepSpeed at run time.

Importing this package imports nothing else: interpreter start-up may do it in every process of a job, and only some of
those ever import DeepSpeed.
"""

__all__ = ["__version__", "disable", "enable", "report", "status"]
__version__ = "0.1.0"

TYPE_CHECKING = False  # typing's own would cost an import of typing
if TYPE_CHECKING:
    from ds_gradfix.activation import disable, enable, report, status


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ds_gradfix import activation

    return getattr(activation, name)


def __dir__() -> list[str]:
    return sorted(__all__)
