"""The checks of this installation and its environment."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ds_gradfix import __version__, _boot
from ds_gradfix.cli.doctor.look import START_UP_FILE, Look, Probe, site_folders
from ds_gradfix.cli.doctor.outcome import ACT, OK, UNKNOWN, Outcome
from ds_gradfix.errors import GradfixError
from ds_gradfix.installed import distribution_version
from ds_gradfix.registry import Entry, Verdict
from ds_gradfix.settings import VARIABLE_PREFIX, Settings, read_environment


def check_installed(look: Look) -> Outcome:
    """What is installed, and from where."""
    installed = look.installed
    own = Path(_boot.__file__).parent
    found: dict[str, tuple[str | None, Path | None]] = {
        "Python": (platform.python_version(), Path(sys.executable)),
        "ds-gradfix": (__version__, own),
        "DeepSpeed": (installed.deepspeed, installed.deepspeed_path),
        "torch": (installed.torch, _folder("torch")),
        "wrapt": (distribution_version("wrapt"), _folder("wrapt")),
    }
    details = [f"{name} {version or 'of no known version'}: {path}" for name, (version, path) in found.items() if path]
    data = {name: {"version": version, "path": path and str(path)} for name, (version, path) in found.items()}
    missing = [name for name, (_, path) in found.items() if path is None]
    if "DeepSpeed" in missing:
        return Outcome(UNKNOWN, "DeepSpeed is not installed in this environment", details, data=data)
    if missing:
        return Outcome(ACT, f"Missing: {' and '.join(missing)}", details, [f"install {' and '.join(missing)}"], data)
    return Outcome(OK, f"DeepSpeed {installed.deepspeed}, ds-gradfix {__version__}", details, data=data)


def _folder(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # an importer that blocks it, or a stand-in without a spec
        return None
    return Path(spec.origin).parent if spec and spec.origin else None


def check_environment(look: Look) -> Outcome:
    """Whether DS_GRADFIX is on here, and whether every DS_GRADFIX_* variable means something."""
    ours = {name: value for name, value in os.environ.items() if name.startswith(VARIABLE_PREFIX)}
    data = {"on": _boot.requested(), "variables": {**_switches(), **ours}}
    details = [f"{name}={value}" for name, value in ours.items()]
    wrong = [text for name, value in ours.items() if (text := _refused({name: value}))]
    if not wrong and look.refusal is not None:
        wrong = [str(look.refusal)]
    if wrong:
        summary = f"{_on_or_off()} With these settings it refuses to start."
        return Outcome(ACT, summary, wrong, ["correct or unset the variable"], data)
    return Outcome(OK, _on_or_off(), details, data=data)


def _switches() -> dict[str, str]:
    return {name: os.environ[name] for name in (_boot.VARIABLE, _boot.ALIAS) if name in os.environ}


def _on_or_off() -> str:
    switches = _switches()
    if not switches:
        return f"{_boot.VARIABLE} is not set: ds-gradfix is off unless a job asks for it itself."
    name, value = next(iter(switches.items()))
    return f"{name}={value}: ds-gradfix is {'on' if _boot.requested() else 'off'}."


def _refused(variables: Mapping[str, str]) -> str | None:
    try:
        read_environment(variables)
    except GradfixError as error:
        return str(error)
    return None


def check_patches(look: Look) -> Outcome:
    """Each patch on this DeepSpeed: verdict, action and reason."""
    entries = look.plan.entries
    data = {"patches": [{"id": e.patch.id, "verdict": e.verdict.value, "action": "correct" if e.act else "leave",
                         "reason": e.reason} for e in entries]}  # fmt: skip
    if look.installed.deepspeed_path is None:
        return Outcome(UNKNOWN, "Without DeepSpeed there is nothing to correct", data=data)
    groups: dict[str, list[Entry]] = {name: [] for name in (*_NAMED, *_COUNTED)}
    for entry in entries:
        groups[_group(entry, look.settings)].append(entry)
    details = [f"{name}: {', '.join(e.patch.id for e in groups[name])}" for name in _NAMED if groups[name]]
    counted = [f"{name}: {len(groups[name])}" for name in _COUNTED if groups[name]]
    details += [f"{', '.join(counted)} (--all lists each)"] if counted else []
    listing = [f"{e.patch.id}: {name}; {e.reason}" for name, found in groups.items() for e in found]
    strange = groups["unrecognised"]
    if strange:
        summary = f"{_patches(len(strange))} can't tell whether this DeepSpeed has the defect"
        to_do = "look for a newer ds-gradfix, and measure your job: ds-gradfix verify CONFIG.json"
        return Outcome(ACT, summary, details, [to_do], data, listing)
    summary = f"{len(groups['corrected here'])} of {_patches(len(entries))} would correct this DeepSpeed"
    return Outcome(OK, summary, details, data=data, listing=listing)


_NAMED = ("corrected here", "unrecognised", "left out")
_COUNTED = ("fixed in this release", "absent")


def _group(entry: Entry, settings: Settings) -> str:
    if entry.act:
        return "corrected here"
    if entry.verdict is Verdict.FIXED:
        return "fixed in this release"
    if entry.verdict is Verdict.ABSENT:
        return "absent"
    return "unrecognised" if settings.selects(entry.patch.id) else "left out"


def _patches(count: int) -> str:
    return f"{count} patch" if count == 1 else f"{count} patches"


def check_start_up(look: Look) -> Outcome:
    """Whether DS_GRADFIX=1 really starts ds-gradfix in a fresh interpreter: an installation without its start-up file
    looks healthy and corrects nothing."""
    probe, copies = look.probe, _copies()
    left = [folder / START_UP_FILE for folder in site_folders()
            if (folder / START_UP_FILE).is_file() and not _copies([str(folder)])]  # fmt: skip
    data = {**asdict(probe), "copies": copies, "left_over": list(map(str, left))}
    details = [f"{path} is left over from a ds-gradfix that is gone" for path in left]
    to_do = [f"remove {path}" for path in left]
    if len({copy["version"] for copy in copies}) > 1:
        details += [f"ds-gradfix {copy['version']} is installed in {copy['folder']}" for copy in copies]
        to_do.append("keep one version of ds-gradfix, and uninstall the others")
    if not probe.starts:
        details += _why_not(probe)
        to_do.append("install ds-gradfix anew with pip into this environment, or start jobs with: ds-gradfix run")
        return Outcome(ACT, f"{_boot.VARIABLE}=1 does not start this ds-gradfix", details, to_do, data)
    summary = f"{_boot.VARIABLE}=1 starts ds-gradfix in a fresh interpreter"
    return Outcome(ACT if to_do else OK, summary, details, to_do, data)


def _copies(folders: Sequence[str] | None = None) -> list[dict[str, str]]:
    """Every installed ds-gradfix in these folders, or on the whole path: its version and its folder."""
    found = importlib.metadata.distributions(name="ds-gradfix", path=sys.path if folders is None else list(folders))
    copies = {str(Path(str(copy.locate_file(""))).resolve()): copy.version for copy in found}
    return [{"version": version, "folder": folder} for folder, version in copies.items()]


def _why_not(probe: Probe) -> list[str]:
    details = [f"It wrote: {probe.stderr.splitlines()[-1]}"] if probe.stderr else []
    if probe.started_by:
        details.append(f"It starts another copy of ds-gradfix: {probe.boot_file}")
    elif probe.start_up_files:
        details += [f"Its start-up file is in {folder}" for folder in probe.start_up_files]
        details.append("Python reads start-up files in its site directories only, not in those of PYTHONPATH")
    else:
        details.append(f"No start-up file ({START_UP_FILE}) is installed")
    return details
