"""What is built and installed: the wheel, the sdist and the editable install, without network."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import setuptools

import ds_gradfix

ROOT = Path(__file__).resolve().parents[1]
STARTUP = {"ds_gradfix_startup.pth", "ds_gradfix_startup.start"}
ALONE = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation")
BUILT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project, since building leaves its traces in it."""
    return Path(shutil.copytree(ROOT, tmp_path_factory.mktemp("project") / "ds-gradfix", ignore=BUILT))


@pytest.fixture(scope="module")
def wheel(project, tmp_path_factory):
    return build_wheel(project, tmp_path_factory.mktemp("wheel"))


def build_wheel(source, directory):
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", *ALONE, "--wheel-dir", directory, source)
    (built,) = directory.glob("*.whl")
    return built


def run(*command, **options):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Environment:
    """A virtual environment that holds what is installed into it, and setuptools on the side to build with."""

    def __init__(self, directory):
        venv.create(directory / "env", symlinks=True)
        self.bin = directory / "env" / "bin"
        self.site_packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(directory / "env")}))
        self.build_tools = directory / "build-tools"
        self.build_tools.mkdir()
        third_party = Path(setuptools.__file__).parents[1]
        for path in (*third_party.glob("setuptools*"), third_party / "_distutils_hack"):
            (self.build_tools / path.name).symlink_to(path)

    def pip(self, command, *arguments):
        asked = ["--yes"] if command == "uninstall" else []
        self._run("pip", "--python", self.bin / "python", "--disable-pip-version-check", command, *asked, *arguments)

    def uv(self, command, *arguments):
        self._run("uv", "pip", command, "--python", self.bin / "python", "--no-cache", *arguments)

    def _run(self, installer, *arguments):
        run(sys.executable, "-m", installer, *arguments, env={**environment(), "PYTHONPATH": str(self.build_tools)})

    def evaluate(self, code, **variables):
        return run(self.bin / "python", "-c", code, env=environment(**variables), cwd=self.bin).strip()

    def files(self):
        everything = (path for folder in (self.bin, self.site_packages) for path in folder.rglob("*"))
        return {path for path in everything if path.is_file() and "__pycache__" not in path.parts}


def environment(**variables):
    """This process's environment, without what would start ds-gradfix or lead to another copy of it."""
    unwanted = ("DS_GRADFIX", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if not any(word in name for word in unwanted)} | variables


def contents(wheel):
    """By name, the lines of each file, in any order: those of RECORD have none."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: sorted(archive.read(name).splitlines()) for name in archive.namelist()}


def test_the_wheel_holds_the_package_and_the_start_up_files_and_nothing_else(wheel):
    source = {path.relative_to(ROOT) for path in (ROOT / "ds_gradfix").rglob("*.py")} | {Path("ds_gradfix/py.typed")}
    patches = {path.relative_to(ROOT) for suffix in ("py", "json") for path in (ROOT / "patches").rglob(f"*.{suffix}")}
    expected = {str(path) for path in source} | {str("ds_gradfix" / path) for path in patches} | STARTUP
    found = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert found == expected


def test_the_wheel_says_what_it_is_and_what_it_needs(wheel):
    with zipfile.ZipFile(wheel) as archive:
        read = {
            name.split("/")[-1]: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name
        }
    headers = read["METADATA"].split("\n\n")[0]
    assert f"\nVersion: {ds_gradfix.__version__}\n" in headers
    assert "\nRequires-Python: >=3.10\n" in headers
    required = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", headers, re.MULTILINE)
    assert sorted(required) == ["packaging", "rich", "wrapt"]
    assert read["top_level.txt"].split() == ["ds_gradfix"]
    assert "ds-gradfix = ds_gradfix.cli:main" in read["entry_points.txt"]
    assert STARTUP <= {row.split(",")[0] for row in read["RECORD"].splitlines()}


def test_the_sdist_builds_the_same_wheel(project, wheel, tmp_path):
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, tmp_path, cwd=project)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert STARTUP | {"setup.py", "pyproject.toml", "Makefile", "constraints.txt", "tests/test_packaging.py"} <= names
    assert contents(build_wheel(sdist, tmp_path / "wheel")) == contents(wheel)


def test_beside_deepspeed_nothing_else_is_installed_or_replaced(wheel):
    """As pip would do it here, where DeepSpeed and torch are: whatever else it wanted, it would have to look for."""
    report = run(sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--quiet", "--report", "-", wheel)
    assert [planned["metadata"]["name"] for planned in json.loads(report)["install"]] == ["ds-gradfix"]


needs_uv = pytest.mark.skipif(importlib.util.find_spec("uv") is None, reason="needs uv, of the extra 'test'")


@pytest.mark.parametrize("installer", ["pip", pytest.param("uv", marks=needs_uv)])
@pytest.mark.parametrize("editable", [False, True], ids=["wheel", "editable"])
def test_installed_it_starts_and_uninstalled_it_leaves_nothing(installer, editable, project, wheel, tmp_path):
    env = Environment(tmp_path)
    before = env.files()
    packages = getattr(env, installer)
    packages("install", *ALONE, *(["--editable", project] if editable else [wheel]))
    assert STARTUP <= {path.name for path in env.files()}

    marker = "import sys; print(getattr(sys, '_ds_gradfix_boot', None))"
    assert env.evaluate(marker) == "None"
    assert env.evaluate(marker, DS_GRADFIX="1") == "start-up file"
    assert env.evaluate(marker, PYTHON_DS_GRADFIX="1") == "start-up file"
    assert env.evaluate("import ds_gradfix.patches; print(ds_gradfix.__version__)") == ds_gradfix.__version__
    assert env.evaluate("import importlib.util; print(importlib.util.find_spec('patches'))") == "None"

    packages("uninstall", "ds-gradfix")
    assert env.files() == before
