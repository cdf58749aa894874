#!/usr/bin/env python3
"""Builds the wheel `kvasir-kv`: the Python package with the library inside, for `pip install`.

    build_wheel.py [--library FILE] [--out FOLDER]

Without `--library` it builds `libkvasir_kv` first (`cargo build --profile capi -p kvstore-capi`). The wheel needs no Python module to be
built and none but the standard library to be used; it is the same for each Python 3.10 or later. Its platform tag names the least
glibc that the library asks for. Two builds of one library give the same bytes. Prints the wheel's path.
"""

import argparse
import base64
import hashlib
import os
import platform
import re
import subprocess
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
NAME = "kvasir_kv"
INSIDE = "libkvasir_kv.so.0"
# What each glibc system has (PEP 600 allows these): anything else would have to be in the wheel, too.
SYSTEM = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1", "ld-linux")
FIXED_TIME = (1980, 1, 1, 0, 0, 0)


def field(name: str) -> str:
    """A text of `[project]` in pyproject.toml."""
    found = re.search(rf'^{name} = "(.*)"$', (HERE / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None, f"pyproject.toml has no {name}"
    return found[1]


def build_library() -> Path:
    subprocess.run(["cargo", "build", "--profile", "capi", "-p", "kvstore-capi"], cwd=ROOT, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    return target / "capi" / "libkvasir_kv.so"


def platform_tag(library: bytes, path: Path) -> str:
    """The tag of systems that the library runs on."""
    if platform.libc_ver()[0] != "glibc":
        return f"linux_{platform.machine()}"
    versions = [tuple(map(int, found.split(b"."))) for found in re.findall(rb"\0GLIBC_(\d+\.\d+)", library)]
    dynamic = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    others = [name for name in needed if not name.startswith(SYSTEM)]
    if others or not versions:
        raise SystemExit(f"{path} needs {', '.join(others) or 'no glibc'}, which a wheel for all systems may not")
    major, minor = max(versions)
    return f"manylinux_{major}_{minor}_{platform.machine()}"


def contents(library: bytes, tag: str) -> dict[str, bytes]:
    """The wheel's files by their names (PyPA's binary distribution format 1.0)."""
    about = f"{NAME}-{field('version')}.dist-info"
    files = {f"{NAME}/{path.name}": path.read_bytes() for path in sorted((HERE / NAME).glob("*.py"))}
    files[f"{NAME}/{INSIDE}"] = library
    files[f"{about}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {field('name')}\nVersion: {field('version')}\nSummary: {field('description')}\n"
        f"License: Apache-2.0\nRequires-Python: {field('requires-python')}\nDescription-Content-Type: text/markdown\n\n"
        f"{(HERE / 'README.md').read_text()}"
    ).encode()
    files[f"{about}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: build_wheel\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n".encode()
    files[f"{about}/entry_points.txt"] = f"[vllm.general_plugins]\n{NAME} = {NAME}.plugin:register\n".encode()
    files[f"{about}/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    record = f"{about}/RECORD"
    lines = [f"{name},sha256={digest(data)},{len(data)}" for name, data in files.items()]
    files[record] = "".join(f"{line}\n" for line in [*lines, f"{record},,"]).encode()
    return files


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def write(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, FIXED_TIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if name.endswith(INSIDE) else 0o644) << 16
            wheel.writestr(entry, data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", type=Path, help="a libkvasir_kv.so that is there already")
    parser.add_argument("--out", type=Path, default=ROOT / "target" / "wheel")
    options = parser.parse_args()
    path = options.library or build_library()
    library = path.read_bytes()
    tag = platform_tag(library, path)
    options.out.mkdir(parents=True, exist_ok=True)
    wheel = options.out / f"{NAME}-{field('version')}-py3-none-{tag}.whl"
    write(wheel, contents(library, tag))
    print(wheel)


if __name__ == "__main__":
    sys.exit(main())
