"""The command `infer-lab`: what each subcommand promises, and how errors end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

from infer_lab import cli, doctor

PARIS = ["generate", "The capital of France is", "--max-tokens", "8", "--temperature", "0"]


@pytest.fixture
def command(default_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run `infer-lab` on the default model; returns status, output and errors."""
    monkeypatch.delenv("INFER_LAB_MODEL", raising=False)

    def run(*arguments: str) -> SimpleNamespace:
        status = cli.main(arguments)
        captured = capsys.readouterr()
        return SimpleNamespace(status=status, out=captured.out, err=captured.err)

    return run


def python(code: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], text=True, timeout=120, **options)


# Errors and endings -------------------------------------------------------------------------


def test_the_help_is_there_without_loading_torch():
    code = "import sys; from infer_lab.cli import build_parser as b; b(); print(*sys.modules)"
    loaded = python(code, stdout=subprocess.PIPE, check=True).stdout.split()
    assert "infer_lab.cli" in loaded
    assert not {"torch", "transformers", "numpy", "jupyter_core"} & set(loaded)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", ""], "prompt must not be empty"),
        (["generate", "a", "--max-tokens", "0"], "max_tokens must be >= 1, got 0"),
        (["generate", "a", "--temperature", "-1"], "temperature must be"),
        (["generate", "a", "--model", "no/such/model"], "name_or_path must be"),
        (["generate", "a", "--dtype", "int3"], "dtype must be"),
        (["generate", "a", "--device", "abacus"], "device must be"),
        (["fetch", "/no/such/model"], "name_or_path must be"),
        (["lab", "/no/such/notebook.ipynb"], "notebook must be"),
        (["lab", "beginner/99"], "beginner/02_sampling"),
    ],
)
def test_an_error_of_the_user_is_one_line_and_status_2(command, arguments, message):
    result = command(*arguments)
    assert result.status == 2
    assert result.out == ""
    assert result.err.startswith("infer-lab: error: ") and message in result.err
    assert result.err.count("\n") == 1


def test_an_error_of_ours_keeps_its_traceback(command, monkeypatch):
    def buggy(args):
        raise KeyError("ours")

    monkeypatch.setattr(cli, "fetch", buggy)
    with pytest.raises(KeyError):
        command("fetch")


def test_traceback_shows_where_an_error_of_the_user_comes_from(command):
    with pytest.raises(ValueError, match="name_or_path"):
        command("--traceback", "fetch", "/no/such/model")


def test_ctrl_c_is_quiet_and_status_130(command, monkeypatch):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "fetch", interrupted)
    result = command("fetch")
    assert (result.status, result.out, result.err) == (130, "", "")


def test_a_reader_that_leaves_early_is_no_error():
    code = (
        "from infer_lab import cli\n"
        "cli.fetch = lambda args: print('x' * 10**6) or 0\n"
        "raise SystemExit(cli.main(['fetch']))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    result = python(code, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


# generate, fetch, demo ----------------------------------------------------------------------


def test_the_capital_of_france_is_paris(command):
    result = command(*PARIS)
    assert result.status == 0
    assert result.out.startswith(" Paris")
    assert result.err == ""


def test_streamed_text_is_the_same_text(command):
    assert command(*PARIS, "--stream").out == command(*PARIS).out


def test_a_prompt_can_come_from_standard_input(command, monkeypatch):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(read=lambda: PARIS[1]))
    assert command(PARIS[0], "-", *PARIS[2:]).out == command(*PARIS).out


def test_chat_answers_and_stops_by_itself(command):
    result = command("generate", "What is the capital of France?", "--chat")
    assert result.out == "The capital of France is Paris.\n"


def test_fetch_prints_where_the_model_is(command, default_dir):
    assert command("fetch").out == f"{default_dir}\n"


def test_the_demo_shows_every_stage_and_ends_with_the_answer(command):
    out = command("demo").out
    stages = ["<|im_start|>user", "'<|im_start|>':1", "prefill  37 in", "decode    1 in", "Paris"]
    places = [out.index(stage) for stage in stages]
    assert places == sorted(places)
    assert out.rstrip().endswith("The capital of France is Paris.")
    rows = [line.split() for line in out.splitlines() if re.match(r" +\d+ +(prefill|decode)", line)]
    assert [row[1] for row in rows] == ["prefill"] + ["decode"] * (len(rows) - 1)
    assert len(rows) == 8
    for row in rows:
        predicted, measured = row[-2:]
        assert predicted == measured


# doctor -------------------------------------------------------------------------------------


def test_a_sound_installation_gets_status_0_and_its_facts_named(command, default_dir):
    result = command("doctor", "--verify")
    assert result.status == 0, result.out
    for name in ("python", "torch", "transformers", "cpu", "device", "dtype", "cache", "memory"):
        assert re.search(rf"^{name} +\S", result.out, re.MULTILINE), name
    assert str(default_dir) in result.out and "hashes right" in result.out
    assert "Nothing is wrong." in result.out


def test_doctor_says_what_to_do_about_a_missing_model_and_fetches_nothing(
    command, monkeypatch, tmp_path
):
    monkeypatch.setenv("INFER_LAB_HOME", str(tmp_path / "home"))
    result = command("doctor")
    assert result.status == 1
    assert "The default model is not here.\n       Run `infer-lab fetch`." in result.out
    assert not (tmp_path / "home").exists()


def test_doctor_finds_a_damaged_model(command, monkeypatch, tmp_path):
    (tmp_path / "models" / "SmolLM2-135M-Instruct").mkdir(parents=True)
    monkeypatch.setenv("INFER_LAB_HOME", str(tmp_path))
    for arguments in (["doctor"], ["doctor", "--verify"]):
        result = command(*arguments)
        assert result.status == 1
        assert "The default model is damaged: " in result.out


def test_doctor_finds_a_model_that_the_environment_misnames(command, monkeypatch):
    monkeypatch.setenv("INFER_LAB_MODEL", "/no/such/model")
    result = command("doctor")
    assert result.status == 1
    assert "'/no/such/model'" in result.out


def test_doctor_finds_packages_that_are_missing_or_out_of_range(monkeypatch):
    wanted = [Requirement("numpy<1"), Requirement("no-such-package>=1")]
    monkeypatch.setattr(doctor, "requirements", lambda: iter(wanted))
    problems = "\n".join(doctor.examine().problems)
    assert "must be <1" in problems
    assert "no-such-package is not installed" in problems


def test_doctor_warns_of_little_memory(monkeypatch):
    memory = SimpleNamespace(available=10**8, total=4 * 10**9)
    monkeypatch.setattr(doctor.psutil, "virtual_memory", lambda: memory)
    assert any("0.1 GB free of 4.0 GB" in problem for problem in doctor.examine().problems)


def test_doctor_survives_a_torch_that_does_not_load(monkeypatch):
    def broken(name):
        raise OSError("libtorch.so: cannot open shared object file")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    assert any("torch cannot be imported" in problem for problem in doctor.examine().problems)


# lab ----------------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_lab_serves_the_notebook_prints_its_url_last_and_ends_on_ctrl_c(tmp_path):
    notebook = tmp_path / "a lesson.ipynb"
    content = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    notebook.write_text(json.dumps(content), encoding="utf-8")
    own = {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    with subprocess.Popen(
        [sys.executable, "-m", "infer_lab", "lab", str(notebook), "--no-browser"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **own},
    ) as process:
        try:
            lines = [process.stdout.readline() for _ in range(4)]
            url = lines[-1].strip()
            assert re.fullmatch(
                r"http://localhost:\d+/lab/tree/a%20lesson\.ipynb\?token=\w+", url
            ), lines
            assert urllib.request.urlopen(url, timeout=30).status == 200
            contents = url.replace("/lab/tree/", "/api/contents/")
            assert json.load(urllib.request.urlopen(contents, timeout=30))["type"] == "notebook"
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(contents.split("?")[0], timeout=30)
            (written,) = (tmp_path / "RUNTIME").glob("jpserver-*.json")
            server = json.loads(written.read_text(encoding="utf-8"))["pid"]
            process.send_signal(signal.SIGINT)
            assert process.stdout.read() == "\nStopping JupyterLab\n"
            assert process.wait(60) == 0
            assert not _is_running(server)
        finally:
            process.terminate()  # it ends Jupyter on its way out


def _is_running(pid: int) -> bool:
    for _ in range(50):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    return True
