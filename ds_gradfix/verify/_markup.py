"""HTML and SVG as text, in which nothing stands unescaped that is not an element itself."""

from __future__ import annotations

from html import escape

_WITHOUT_END = ("link", "meta")


class Markup(str):
    """Text that is markup already: what `element` made, or a constant of ours."""


def element(tag: str, *content: str, **attributes: str | float) -> Markup:
    """One element around its content. `class_` is the attribute `class`, and any other `_` in a name a `-`."""
    named = "".join(f' {_name(key)}="{_text(value)}"' for key, value in attributes.items())
    if tag in _WITHOUT_END:
        return Markup(f"<{tag}{named}>")
    return Markup(f"<{tag}{named}>{''.join(map(_text, content))}</{tag}>")


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _text(value: str | float) -> str:
    if isinstance(value, Markup):
        return value
    return escape(value if isinstance(value, str) else f"{value:.6g}")
