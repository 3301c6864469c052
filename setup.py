"""What pyproject.toml cannot say of the packaging: the start-up files, and `patches/` as `ds_gradfix.patches`."""

import base64
import hashlib
import zipfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
STARTUP = ("ds_gradfix_startup.pth", "ds_gradfix_startup.start")


class BuildPy(build_py):
    """Puts the start-up files at the root of the wheel, hence of site-packages."""

    def run(self):
        super().run()
        if not self.editable_mode:
            for name in STARTUP:
                self.copy_file(str(ROOT / name), str(Path(self.build_lib) / name), preserve_mode=False)

    def get_outputs(self, include_bytecode=1):
        outputs = super().get_outputs(include_bytecode)
        # A strict editable build links every output into the work tree, and these files have no place there.
        return outputs if self.editable_mode else outputs + [str(Path(self.build_lib) / name) for name in STARTUP]


class EditableWheel(editable_wheel):
    """Adds the start-up files to an editable wheel, which setuptools builds without asking build_py for them."""

    def run(self):
        super().run()
        for wheel in Path(self.dist_dir).glob("*editable*.whl"):
            _add_startup_files(wheel)


def _add_startup_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        members = [(member, archive.read(member)) for member in archive.infolist()]
    record = "".join(_record_row(name, (ROOT / name).read_bytes()) for name in STARTUP).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in STARTUP:
            archive.write(ROOT / name, name)
        for member, data in members:
            # Listed in RECORD, they are removed with the rest on uninstall.
            archive.writestr(member, record + data if member.filename.endswith(".dist-info/RECORD") else data)


def _record_row(name, data):
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


setup(
    packages=[
        *find_packages(include=["ds_gradfix", "ds_gradfix.*"]),
        "ds_gradfix.patches",
        *(f"ds_gradfix.patches.{name}" for name in find_packages("patches")),
    ],
    package_dir={"ds_gradfix.patches": "patches"},
    cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel},
)
