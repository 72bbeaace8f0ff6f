"""Make .venv and install the course into it. Standard library only; the Makefile calls this.

    python bootstrap.py             # Windows: py bootstrap.py

What was installed is remembered in .venv/installed.json as a hash of pyproject.toml and
constraints.txt, so calling this again does nothing until they change. While it works, the mark
.venv/unfinished stands: a run that was killed is started anew, from an empty .venv, since pip
cannot tell a half-unpacked package from a whole one.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

MINIMUM = (3, 11)
ROOT = Path(__file__).resolve().parent
INPUTS = ("pyproject.toml", "constraints.txt")
EXTRAS = "dev"


def main():
    parser = argparse.ArgumentParser(description="Make .venv and install the course into it.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument(
        "--this-python", action="store_true", help="make .venv anew if it is of another Python"
    )
    options = parser.parse_args()
    check_python()
    venv = options.venv.absolute()
    with lock(ROOT / ".setup.lock") as locked:
        if not is_done(venv, options.this_python):
            set_up(venv, options.this_python, locked)


def check_python():
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < MINIMUM:
        fail(
            f"Python >= {MINIMUM[0]}.{MINIMUM[1]} is needed, but {sys.executable} is {found}.\n"
            "Install a newer one and name it: make PYTHON=/path/to/python3.12 ..."
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        fail(
            f"{sys.executable} has no module {error.name}, which makes virtual environments.\n"
            "On Debian and Ubuntu: apt install python3-venv"
        )


def is_done(venv, this_python):
    return installed(venv) == wanted() and works(venv, this_python)


def installed(venv):
    """What `wanted` said when set-up was last finished; nothing if it was interrupted since."""
    try:
        state = json.loads((venv / "installed.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {} if (venv / "unfinished").exists() else state


def wanted():
    """What a finished set-up has installed; `root`, since scripts in .venv hold their own path."""
    content = b"".join((ROOT / name).read_bytes() for name in INPUTS)
    return {"root": str(ROOT), "extras": EXTRAS, "sha256": hashlib.sha256(content).hexdigest()}


def works(venv, this_python):
    """Whether the environment is in its place, its Python too (that may be gone), and is ours."""
    if installed(venv).get("root", str(ROOT)) != str(ROOT):
        return False
    if not python_of(venv).exists() or not (venv / "pyvenv.cfg").is_file():
        return False
    version = ".".join(map(str, sys.version_info[:2]))
    config = (venv / "pyvenv.cfg").read_text(encoding="utf-8")
    return not this_python or re.search(rf"^version = {re.escape(version)}\b", config, re.M)


def set_up(venv, this_python, locked):
    began = time.monotonic()
    unfinished = venv / "unfinished"
    if venv.exists() and (unfinished.exists() or not works(venv, this_python)):
        say(f"Removing {venv}: interrupted set-up, moved directory or another Python.")
        remove(venv)
    venv.mkdir(parents=True, exist_ok=True)
    unfinished.touch()
    if not python_of(venv).exists():
        say(f"Making {venv} with Python {sys.version.split()[0]}")
        run([sys.executable, "-m", "venv", str(venv)], venv, locked)
    say("Installing the course and what it needs: 0.4 GB of downloads (on Linux about 3 GB, unless")
    say("the CPU build of torch is chosen: see README.md). This takes some minutes, once.")
    pip = [str(python_of(venv)), "-m", "pip", "--disable-pip-version-check", "install"]
    run([*pip, "-c", "constraints.txt", "-e", f".[{EXTRAS}]"], venv, locked)
    (venv / "installed.json").write_text(json.dumps(wanted()), encoding="utf-8")
    unfinished.unlink()
    say(f"Installed in {time.monotonic() - began:.0f} s.")


def remove(venv):
    """Rename first: a removal that is interrupted must not leave half a .venv in its place."""
    old = venv.with_name(venv.name + ".removed")
    if old.exists():
        shutil.rmtree(old)
    venv.rename(old)
    shutil.rmtree(old)


def python_of(venv):
    return venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def run(command, venv, locked):
    """Run a command, its output in install.log and the essence of it on the terminal.

    It inherits the lock: should we be killed, the next set-up waits until pip has ended too.
    """
    log = venv / "install.log"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            pass_fds=() if os.name == "nt" else (locked.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        lines, found = [], 0
        for line in process.stdout:
            file.write(line)
            lines = [*lines[-19:], line]
            found += line.startswith(("Collecting ", "Processing "))
            show(line.strip(), found)
    status = process.wait()
    if status != 0:
        fail(
            "\n".join(map(str.rstrip, lines))
            + f"\n\nSet-up failed (exit status {status}); the lines above are the last of {log}.\n"
            "Put right what they name, then run the same command again."
        )


def show(line, found):
    """Signs of life: every thirtieth package, large downloads, and what the long silence is."""
    size = re.search(r"\(([\d.]+) (MB|GB)\)", line)
    if line.startswith("Downloading") and size and (size[2] == "GB" or float(size[1]) >= 10):
        name = line.split()[1].rsplit("/", 1)[-1].split("-")[0]
        say(f"  downloading {name} ({size[1]} {size[2]})")
    elif line.startswith(("Collecting ", "Processing ")) and found % 30 == 0:
        say(f"  {found} packages found")
    elif line.startswith("Installing collected packages:"):
        say(f"  unpacking {line.count(',') + 1} packages (a minute or two)")


class lock:
    """An exclusive lock on a file; the operating system frees it if we are killed."""

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        self.file = self.path.open("a+")
        if not self.acquire(wait=False):
            say("Another set-up is running; waiting for it.")
            self.acquire(wait=True)
        return self.file

    def __exit__(self, *_):
        self.file.close()

    def acquire(self, *, wait):
        if os.name == "nt":
            import msvcrt

            while True:
                try:
                    self.file.seek(0)
                    msvcrt.locking(self.file.fileno(), msvcrt.LK_NBLCK, 1)
                    return True
                except OSError:
                    if not wait:
                        return False
                    time.sleep(1)
        import fcntl

        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True


def say(message):
    print(message, flush=True)


def fail(message):
    print(message, file=sys.stderr, flush=True)
    sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("\nInterrupted; the same command starts set-up anew.")
