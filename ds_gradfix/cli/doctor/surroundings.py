"""The checks of what lies around ds-gradfix: DeepSpeed's launcher, and other tools that change DeepSpeed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ds_gradfix import _boot, launcher
from ds_gradfix.cli._job import CannotLook
from ds_gradfix.cli.doctor import live
from ds_gradfix.cli.doctor.look import START_UP_FILE, Look, ask_an_interpreter, start_up_files
from ds_gradfix.cli.doctor.outcome import ACT, OK, Outcome

_IMPORT_SECONDS = 180
_FILES_READ = 3000


def check_launcher(look: Look) -> Outcome:
    """What the deepspeed launcher carries to the ranks of a job on several nodes: its environment file outranks the
    environment that it is started in."""
    paths, carried, details, to_do = [], {}, [], []
    for path in _environment_files():
        paths.append(str(path))
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            name, is_one, value = line.partition("=")
            if not is_one:
                details.append(f"{path}, line {number}: {line!r} sets no variable, and the launcher stops at it")
                to_do.append(f"remove line {number} from {path}: each line must be NAME=VALUE")
            elif name.startswith((_boot.VARIABLE, _boot.ALIAS)):
                carried[name] = (value, f"{path}, line {number}")
    for name, (value, place) in carried.items():
        here = os.environ.get(name)
        if here != value:
            stands = "not set" if here is None else here
            details.append(f"{place}: every rank on several nodes gets {name}={value}; here it is {stands}")
            to_do.append(f"make {name} in {place.rpartition(',')[0]} what it is here, or remove it there")
    data = {"files": paths, "carried": {name: value for name, (value, _) in carried.items()}}
    if to_do:
        summary = "the launcher's environment file stands in the way"
        return Outcome(ACT, summary, details, list(dict.fromkeys(to_do)), data)
    ours = launcher.exported()
    if not ours:
        return Outcome(OK, "ds-gradfix is off here: there is nothing to carry to other nodes", data=data)
    return Outcome(OK, f"the deepspeed launcher carries {', '.join(ours)} to every node", data=data)


def _environment_files() -> list[Path]:
    """Where the launcher looks, in its order: what stands in a later file outranks what stands in an earlier one."""
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    paths = [os.path.join(folder, name) for folder in (os.path.expanduser("~"), ".")]
    found = {os.path.realpath(path): Path(path) for path in paths if os.path.isfile(path)}
    return list(found.values())


def check_other_tools(look: Look) -> Outcome:
    """Whether DeepSpeed's functions are its own, where ds-gradfix corrects them, in an interpreter that has imported
    it; and which other tools begin with every interpreter and know DeepSpeed."""
    if look.installed.deepspeed_path is None:
        raise CannotLook("Without DeepSpeed there is no telling whether another tool changes it")
    targets = sorted({str(f.target) for entry in look.plan.entries for f in entry.findings if f.function})
    seen = live_places(targets)
    places, unseen = seen["places"], seen["not_importable"]
    starters = [{"file": str(file), "package": package} for file, package in _starters() if _knows_deepspeed(package)]
    details = [f"{p['target']} is {'replaced' if p['replaced'] else 'wrapped'} by {p['by']}" for p in places]
    details += [f"{target} is in a module that can't be imported here" for target in unseen]
    details += [f"{s['file']} runs with every interpreter, and {s['package']} knows DeepSpeed" for s in starters]
    data = {"looked_at": len(targets), **seen, "start_up": starters}
    replaced = [p for p in places if p["replaced"]]
    if replaced:
        summary = f"{len(replaced)} of {len(targets)} functions that patches correct are another tool's"
        to_do = "turn that tool off where you want ds-gradfix: what is replaced is not corrected"
        return Outcome(ACT, summary, details, [to_do], data)
    if places:
        summary = f"{len(places)} of {len(targets)} functions are wrapped by another tool; the self-check measures both"
        return Outcome(OK, summary, details, data=data)
    own = len(targets) - len(unseen)
    return Outcome(OK, f"all {own} functions that patches correct are DeepSpeed's own", details, data=data)


def live_places(targets: list[str]) -> dict[str, list[Any]]:
    """What `live.look` finds, in an interpreter of its own: this one imports neither DeepSpeed nor torch."""
    code = f"from {live.__name__} import main; main()"
    _, found = ask_an_interpreter(code, json.dumps(targets), on=False, seconds=_IMPORT_SECONDS)
    return dict(found)


def _starters() -> Iterator[tuple[Path, str]]:
    """The packages that start-up files of other tools name in their code, each with its file."""
    for file in start_up_files():
        if file.stem == Path(START_UP_FILE).stem or file.name.startswith("__editable__"):
            continue
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
        code = [line for line in lines if file.suffix == ".start" or line.startswith(("import ", "import\t"))]
        for word in sorted({word for line in code for word in re.findall(r"\w+", line)} - sys.stdlib_module_names):
            yield file, word


def _knows_deepspeed(package: str) -> bool:
    """Whether there is such a package and it names DeepSpeed anywhere in its source. It is not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None or not spec.origin:
        return False
    origin = Path(spec.origin)
    sources = origin.parent.rglob("*.py") if spec.submodule_search_locations else [origin]
    return any(b"deepspeed" in path.read_bytes().lower() for path in islice(sources, _FILES_READ))
