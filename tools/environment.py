"""Makes the environment of a layer: `python tools/environment.py LAYER`.

The layers are listed in tests/tiers.toml. `demo`, `test` and `check` are one environment, .venv,
which grows. Each other layer has its own folder in .venv-layers. It sees the packages of the layer
that it stands on by a .pth file, so it installs only what is missing there. This file uses the
standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "tiers.toml"
MAIN = ROOT / ".venv"
OF_MAIN = ("demo", "test", "check")
#: The services that a package would start at once and at every boot. The tests start their own.
SERVICES = ("munge", "slurmctld", "slurmd")
POLICY = Path("/usr/sbin/policy-rc.d")
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


def read_layers() -> dict[str, dict[str, Any]]:
    return dict(tomllib.loads(TABLE.read_text())["layers"])


def folder_of(layer: str) -> Path:
    """The environment of a layer; one without requirements has that of the layer below."""
    about = read_layers()[layer]
    if not about["requirements"]:
        return folder_of(about["on"])
    return MAIN if layer in OF_MAIN else ROOT / ".venv-layers" / layer


def python_of(layer: str) -> Path:
    return folder_of(layer) / "bin" / "python"


def files_of(layer: str) -> list[str]:
    """The tests that a layer lists."""
    patterns = read_layers()[layer].get("files", [])
    return [str(p.relative_to(ROOT)) for each in patterns for p in sorted(ROOT.glob(each))]


def prepare(layer: str) -> None:
    """Install what a layer needs and does not have yet, with the layer that it stands on."""
    table = read_layers()
    below = table[layer].get("on")
    if below is not None:
        prepare(below)
    _install_commands(layer, table[layer].get("commands", []))
    if not table[layer]["requirements"]:
        return
    folder, stamp = folder_of(layer), folder_of(layer) / f".{layer}"
    files = [ROOT / "requirements" / f"{name}.txt" for name in table[layer]["requirements"]]
    wanted = _digest([ROOT / "pyproject.toml", *files], str(below))
    if stamp.exists() and stamp.read_text() == wanted:
        return
    borrowed = _site_of_torch() if layer == "demo" else None
    if not (folder / ".made").exists():
        _make(folder, borrowed if below is None else _site_of(folder_of(below)))
    words = [word for file in files for word in ("-r", str(file))]
    if borrowed:
        print("Using the torch that is installed already.", flush=True)
        words = []
    # Its entry points may be others than those of the last installation.
    project, installed = _digest([ROOT / "pyproject.toml"], ""), folder / ".holdfast"
    if not installed.exists() or installed.read_text() != project:
        words += ["-e", str(ROOT)]
    _pip(folder, words, f"{folder.relative_to(ROOT)} ({layer})")
    installed.write_text(project)
    stamp.write_text(wanted)


def _digest(files: list[Path], below: str) -> str:
    found = hashlib.sha256(f"{sys.version_info[:2]} {below}".encode())
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()


def _site_of_torch() -> Path | None:
    """The folder of packages that has torch, of the Python that runs this; None without torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return None
    site = Path(found.origin).parents[1]
    return None if site.is_relative_to(MAIN) else site


def _site_of(folder: Path) -> Path:
    (site,) = folder.glob("lib/python*/site-packages")
    return site


def _make(folder: Path, below: Path | None) -> None:
    """Make an environment that sees the packages of the folder `below` too.

    Not by --system-site-packages: made from a virtual environment, it would not see that one.
    """
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if below is not None:
        (_site_of(folder) / "below.pth").write_text(f"{below}\n")
    (folder / ".made").touch()  # last: without it a folder that was cut off is made again


# -- pip, with its progress ----------------------------------------------------------


def _pip(folder: Path, words: list[str], name: str) -> None:
    """Run pip and show what it does; its whole output is shown only when it fails."""
    log = folder / "install.log"
    # Modules are compiled when they are first imported: most of torch never is.
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-compile"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", *words]
    progress = Progress(name)
    with log.open("w") as written:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
        )
        assert process.stdout is not None
        for line in process.stdout:
            written.write(line)
            written.flush()
            progress.read(line)
        status = process.wait()
    progress.end(status == 0)
    if status != 0:
        print(log.read_text(), file=sys.stderr)
        sys.exit(f"pip could not set up {name}: see above, or {log.relative_to(ROOT)}.")


class Progress:
    """What pip is doing: one line that changes in a terminal, else a line for each large step."""

    LARGE_BYTES = 20e6

    def __init__(self, name: str) -> None:
        self._name = name
        self._began = time.monotonic()
        self._packages = 0
        self._is_terminal = sys.stdout.isatty()
        self._show("looking up packages", is_large=True)

    def read(self, line: str) -> None:
        """Take in a line that pip prints."""
        if found := re.match(r"Collecting (\S+)", line):
            self._packages += 1
            self._show(f"package {self._packages}: {found[1]}")
        elif found := re.match(r"\s*(?:Downloading|Processing|Using cached) (.+)", line):
            text = found[1].strip().rpartition("/")[2]
            size = re.search(r"\(([\d.]+) (kB|MB|GB)\)", text)
            is_large = size is not None and float(size[1]) * UNITS[size[2]] > self.LARGE_BYTES
            self._show(f"package {self._packages}: getting {text}", is_large=is_large)
        elif line.startswith("Installing collected packages:"):
            names = line.partition(":")[2].split(",")
            self._show(f"unpacking {len(names)} packages", is_large=True)

    def end(self, has_worked: bool) -> None:
        self._show("ready" if has_worked else "failed", is_large=True)
        if self._is_terminal:
            print(flush=True)

    def _show(self, text: str, *, is_large: bool = False) -> None:
        whole = f"{self._name}: {text} [{time.monotonic() - self._began:.0f} s]"
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{whole[:width]:<{width}}", end="", flush=True)
        elif is_large:
            print(whole, flush=True)


# -- programs of the system ----------------------------------------------------------


def _install_commands(layer: str, commands: list[str]) -> None:
    """Install missing programs by apt-get where that may be done; else say what is missing.

    It never fails: a test that lacks its program skips, and says so.
    """
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    pairs = [each.split(":") for each in commands]
    missing = [package for name, package in pairs if shutil.which(name, path=path) is None]
    if not missing:
        return
    words = " ".join(missing)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"Not installed: {words}. Tests that need it skip.")
        return
    print(f"{layer}: apt-get installs {words}", flush=True)
    new = [name for name in SERVICES if not Path("/etc/init.d", name).exists()]
    has_policy = POLICY.exists()
    if not has_policy:  # Debian asks this program before it starts a service.
        POLICY.write_text("#!/bin/sh\nexit 101\n")
        POLICY.chmod(0o755)
    try:
        # The package lists of a fresh image are empty or old.
        if not _apt("install", *missing) and not (_apt("update") and _apt("install", *missing)):
            print(f"apt-get could not install {words}. Tests that need it skip.")
    finally:
        if not has_policy:
            POLICY.unlink()
    for name in new:  # Only new ones: a service that was here before stays as it is.
        if Path("/etc/init.d", name).exists():
            subprocess.run(["update-rc.d", name, "disable"], capture_output=True, check=False)
            helper = ["deb-systemd-helper", "disable", f"{name}.service"]
            if shutil.which(helper[0]):
                subprocess.run(helper, capture_output=True, check=False)


def _apt(*words: str) -> bool:
    command = ["apt-get", "-y", "-qq", "--no-install-recommends", *words]
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    return subprocess.run(command, env=env, capture_output=True, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the environment of a layer.")
    parser.add_argument("layer", choices=sorted(read_layers()))
    layer = parser.parse_args().layer
    try:
        prepare(layer)
    except KeyboardInterrupt:
        sys.exit("\nInterrupted. The same command goes on with what is missing.")


if __name__ == "__main__":
    main()
