"""The config preprocessor: runs where DeepSpeed builds its configuration, on what it is given.

It reads the ``"ds_gradfix"`` section and hands the configuration on as it is. What can't be read
is not reported here: DeepSpeed is about to say so in its own words.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import os
from collections.abc import Mapping
from typing import Any

from ds_gradfix.settings import SECTION, read_section


def read_config(config: Any) -> Mapping[str, Any]:
    """The configuration as a mapping, from every form that ``deepspeed.initialize`` accepts: a dict,
    the path of a JSON (or Hjson) file, or base64 text of one. Empty if it is none of these."""
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str | os.PathLike):
        return {}
    try:
        if os.path.exists(config):
            with open(config, encoding="utf-8") as file:
                return _parse(file.read())
        return _parse(base64.urlsafe_b64decode(str(config)).decode("utf-8"))
    except (OSError, ValueError, RecursionError, binascii.Error):
        return {}


def _parse(text: str) -> Mapping[str, Any]:
    # DeepSpeed's own requirement, and its own parser for configurations; it has no type stubs.
    parsed = importlib.import_module("hjson").loads(text)
    return parsed if isinstance(parsed, Mapping) else {}


def section_of(config: Any) -> dict[str, Any]:
    """The checked ``"ds_gradfix"`` section of a configuration in any form, {} if it has none.

    Raises SettingsError for an unknown key or a value that is not allowed.
    """
    read = read_config(config)
    return read_section(read[SECTION]) if SECTION in read else {}
