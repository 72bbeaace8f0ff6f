"""`infer-lab lab`: JupyterLab as a child process, watched until it answers.

    start the child -> read the address it wrote down -> ask it until it answers -> print the URL

Jupyter's own messages go to a file, so that the URL is the last line on the terminal. The child is
in a process group of its own: Ctrl-C reaches us alone, and we end it and its kernels in order.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import webbrowser
from pathlib import Path
from types import FrameType
from typing import IO, Any

from infer_lab.course.discovery import chapters, course_root

START_SECONDS = 120.0  # a cold disk in a small container
STOP_SECONDS = 20.0


def serve(
    notebook: str | Path | None = None,
    *,
    ip: str = "localhost",
    port: int | None = None,
    browser: bool = True,
    verbose: bool = False,
) -> int:
    """Serve a notebook until Ctrl-C; returns an exit status.

    notebook: a file or a chapter's directory; default: the first chapter.
    ip, port: where to listen; without a port 8888, or the next one that is free.
    browser: open one, if this machine has a screen.
    verbose: show Jupyter's messages instead of keeping them in a file.

    Raises ValueError for a notebook that isn't there, OSError when Jupyter doesn't start.
    """
    root, path = _locate(notebook)
    command = _command(root, ip, port)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        print(f"Starting JupyterLab in {root}", flush=True)
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=None if verbose else log,
            stderr=None if verbose else subprocess.STDOUT,
            env=os.environ | {"JUPYTER_CONFIG_PATH": _config_path()},
            **_OWN_GROUP,
        )
        previous = {number: signal.signal(number, _interrupt) for number in _ENDINGS}
        try:
            server = _wait_until_it_answers(child, log)
            url = _url(server, f"lab/tree/{path}")
            print("Ctrl-C here ends it, with its kernels. Open:", flush=True)
            if browser and _has_screen():
                webbrowser.open(url)
            print(f"\n  {url}", flush=True)
            return child.wait()
        except KeyboardInterrupt:
            print("\nStopping JupyterLab", flush=True)
            return 0
        finally:
            _stop(child)
            for number, handler in previous.items():
                signal.signal(number, handler)


def _locate(notebook: str | Path | None) -> tuple[Path, str]:
    """The directory to serve and the notebook's path in it, as a URL has it."""
    root = course_root()
    path = chapters(root)[0].notebook if notebook is None else Path(notebook).resolve()
    if path.is_dir():
        path = path / f"{path.name}.ipynb"
    if not path.is_file():
        known = {chapter.name: chapter.notebook for chapter in chapters(root)}
        if str(notebook) not in known:
            places = ", ".join(map(str, chapters(root)))
            raise ValueError(
                f"notebook must be a file or a chapter ({places}), got {str(notebook)!r}"
            )
        path = known[str(notebook)]
    root = root if path.is_relative_to(root) else path.parent
    return root, path.relative_to(root).as_posix()


def _command(root: Path, ip: str, port: int | None) -> list[str]:
    options = [f"--ServerApp.root_dir={root}", f"--ServerApp.ip={ip}", "--no-browser"]
    # No look for news or newer releases: the lab works without a network.
    options += ["--LabApp.news_url=None"]
    options += [
        "--LabApp.check_for_updates_class=jupyterlab.handlers.announcements.NeverCheckForUpdate"
    ]
    if port is not None:
        options += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options += ["--allow-root"]  # Jupyter refuses root, the only user of many containers
    return [sys.executable, "-m", "jupyterlab", *options]


def _config_path() -> str:
    """Where Jupyter looks for settings: also at ours, which keep it from asking about news."""
    ours = str(Path(__file__).parent / "course" / "jupyter")
    return os.pathsep.join(filter(None, (os.environ.get("JUPYTER_CONFIG_PATH"), ours)))


def _wait_until_it_answers(child: subprocess.Popen[bytes], log: IO[str]) -> dict[str, Any]:
    """What the server wrote about itself (url, token ...), once it answers there."""
    from jupyter_core.paths import jupyter_runtime_dir

    notes = Path(jupyter_runtime_dir()) / f"jpserver-{child.pid}.json"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and child.poll() is None:
        try:
            server: dict[str, Any] = json.loads(notes.read_text(encoding="utf-8"))
            if not server["secure"]:  # a certificate of the user's own could not be checked here
                direct.open(_url(server, "api/status"), timeout=5).close()
            return server
        except urllib.error.HTTPError:  # it answers, and wants the user's password
            return server
        except (OSError, ValueError):  # not yet: no file, half a file, nobody listening
            time.sleep(0.1)
    why = "ended" if child.poll() is not None else f"did not answer in {START_SECONDS:.0f} s"
    log.seek(0)
    raise OSError(f"JupyterLab {why}.\n{''.join(log.readlines()[-5:])}")


def _url(server: dict[str, Any], path: str) -> str:
    """An address on the server that a browser on this machine can open, token included."""
    base: str = server["url"]
    if server["hostname"] in ("", "0.0.0.0", "::"):  # it listens everywhere
        base = f"http{'s' * server['secure']}://localhost:{server['port']}{server['base_url']}"
    query = f"?token={server['token']}" if server["token"] else ""  # none: the user has a password
    return base + urllib.parse.quote(path) + query


def _has_screen() -> bool:
    if "SSH_CONNECTION" in os.environ:
        return False
    if sys.platform in ("darwin", "win32"):
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Ask the server to end its kernels and itself; insist after a while."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


# A closed terminal and a plain `kill` end us like Ctrl-C does.
_ENDINGS = [getattr(signal, n) for n in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, n)]
_OWN_GROUP: dict[str, Any] = (
    {"creationflags": getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)}
    if os.name == "nt"
    else {"start_new_session": True}
)
