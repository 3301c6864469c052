"""DeepSpeed's releases from the package index, each in a folder of its own to put in PYTHONPATH.

    python tools/releases.py [RELEASE ...]      fetch these, or every release from 0.14.0 on; prints their folders

A source distribution is downloaded, checked against the index's hash and unpacked as an installation would lay it out,
without its C++ sources. Nothing of it is imported or run. Folders are kept in the ignored `.cache/releases`, or where
GRADFIX_RELEASES says, and are never fetched twice.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.version import Version

from ds_gradfix.installed import Installed

FOLDER = Path(os.environ.get("GRADFIX_RELEASES") or Path(__file__).resolve().parents[1] / ".cache" / "releases")
OLDEST = Version("0.14.0")

# Where an installation has what lies beside the package in a source distribution.
_MOVED = {"op_builder": "deepspeed/ops/op_builder", "accelerator": "deepspeed/accelerator"}


class Unavailable(Exception):
    """The index, or one release on it, can't be reached from here."""


@cache
def published() -> dict[str, dict[str, Any]]:
    """Every release from 0.14.0 on that the package index has a source distribution of: version -> its file there."""
    page = _read(f"{_index().rstrip('/')}/deepspeed/", {"Accept": "application/vnd.pypi.simple.v1+json"})
    files = {}
    for file in json.loads(page)["files"]:
        name = str(file["filename"])
        if name.startswith("deepspeed-") and name.endswith(".tar.gz"):
            version = Version(name.removeprefix("deepspeed-").removesuffix(".tar.gz"))
            if version >= OLDEST and not version.is_prerelease:
                files[str(version)] = file
    return dict(sorted(files.items(), key=lambda item: Version(item[0])))


def folder_of(release: str) -> Path:
    """The folder of one release, fetched if it is not there yet. Raises Unavailable where it can't be."""
    folder = FOLDER / release
    if not (folder / "deepspeed").is_dir():
        file = published().get(release)
        if file is None:
            raise Unavailable(f"the package index has no source distribution of DeepSpeed {release}")
        archive = _read(file["url"], {})
        if hashlib.sha256(archive).hexdigest() != file["hashes"]["sha256"]:
            raise Unavailable(f"DeepSpeed {release} does not have the hash that the package index gives")
        part = FOLDER / f".{release}.{os.getpid()}"
        _unpack(archive, part, release)
        try:
            part.rename(folder)
        except OSError:  # another process was quicker
            shutil.rmtree(part)
    return folder


def as_installed(release: str) -> Installed:
    """One release as the plan sees an installation of it."""
    return Installed(release, folder_of(release) / "deepspeed", torch=None, ds_gradfix=None)


def all_folders() -> dict[str, Path]:
    """The folder of every release that the package index has; of those that are here, where it can't be reached."""
    try:
        releases = list(published())
    except Unavailable:
        here = [folder.name for folder in FOLDER.glob("[0-9]*") if (folder / "deepspeed").is_dir()]
        releases = sorted(here, key=Version)
    with ThreadPoolExecutor(8) as threads:
        return dict(zip(releases, threads.map(folder_of, releases), strict=True))


def _index() -> str:
    """The index that pip uses: its setting, or its own default."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    configured = os.environ.get("PIP_INDEX_URL") or subprocess.run(command, capture_output=True, text=True).stdout
    if configured.strip():
        return configured.strip()
    from pip._internal.models.index import PyPI

    return str(PyPI.simple_url)


def _read(url: str, headers: dict[str, str]) -> bytes:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=120) as answer:
            return bytes(answer.read())
    except OSError as error:
        raise Unavailable(f"the package index can't be reached: {error}") from error


def _unpack(archive: bytes, folder: Path, release: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            _, *path = PurePosixPath(member.name).parts
            if not member.isfile() or ".." in path or "csrc" in path or not path:
                continue
            if path == ["PKG-INFO"]:
                path = [f"deepspeed-{release}.dist-info", "METADATA"]
            elif path[0] in _MOVED:
                path[0] = _MOVED[path[0]]
            elif path[0] != "deepspeed":
                continue
            target = folder.joinpath(*path)
            target.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            assert content is not None
            target.write_bytes(content.read())
    # What DeepSpeed's setup writes: the version, and that no operator was compiled ahead of use.
    (folder / "deepspeed" / "git_version_info_installed.py").write_text(
        f"version='{release}'\ngit_hash='unknown'\ngit_branch='unknown'\ninstalled_ops={{}}\naccelerator_name='cpu'\n"
        "torch_info={'version': '0.0', 'bf16_support': False, 'cuda_version': '0.0', 'nccl_version': '0.0',"
        " 'hip_version': '0.0'}\n"
    )


if __name__ == "__main__":
    for one in sys.argv[1:] or published():
        print(folder_of(one))
