"""Set-up: the files that describe it agree, and bootstrap.py does it once and wholly."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))


def dependencies() -> list[Requirement]:
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    every = [Requirement(line) for group in groups for line in group]
    return [requirement for requirement in every if requirement.name != PROJECT["name"]]


def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


# The files agree ----------------------------------------------------------------------------


@pytest.mark.parametrize("requirement", dependencies(), ids=str)
def test_each_dependency_is_pinned_inside_its_range(requirement):
    names = {canonicalize_name(pin.name): pin.specifier for pin in pins()}
    (pin,) = names[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pin.version)


def test_constraints_are_exact_sorted_and_without_local_builds():
    names = [pin.name.lower() for pin in pins()]
    assert names == sorted(set(names))
    for pin in pins():
        (specifier,) = pin.specifier
        assert specifier.operator == "==" and "*" not in specifier.version
        assert Version(specifier.version).local is None, f"{pin} exists on one machine only"


def test_conda_installs_the_same_through_pip():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    *conda, pip = environment["dependencies"]
    assert pip == {"pip": ["-c constraints.txt", "-e .[dev]"]}
    python, tool = map(Requirement, conda)
    assert (python.name, tool.name) == ("python", "pip")
    supported = SpecifierSet(PROJECT["requires-python"])
    allowed = [f"3.{minor}" for minor in range(40) if python.specifier.contains(f"3.{minor}")]
    assert allowed and all(supported.contains(version) for version in allowed)


def test_bootstrap_needs_the_python_that_the_package_needs():
    bootstrap = load_bootstrap()
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(
        f">={bootstrap.MINIMUM[0]}.{bootstrap.MINIMUM[1]}"
    )
    assert f"sys.version_info < {bootstrap.MINIMUM}" in MAKEFILE


def test_continuous_integration_runs_make_test_and_nothing_else():
    script = ROOT / ".ci" / "run"
    lines = script.read_text(encoding="utf-8").splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["make test"]
    assert os.name == "nt" or os.access(script, os.X_OK)


def test_every_make_target_explains_itself():
    phony = set(re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)[1].split())
    explained = set(re.findall(r"^([a-z]+):.*## \S", MAKEFILE, re.MULTILINE))
    assert phony == TARGETS == explained


def test_commands_that_the_documents_name_exist():
    from infer_lab.cli import build_parser

    text = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z]+)\b", code(text)))
    assert {"lab", "demo", "test"} <= named <= TARGETS
    subcommands = set(re.findall(r"\binfer-lab ([a-z][a-z-]+)", code(text)))
    known = set(build_parser()._subparsers._group_actions[0].choices)
    assert {"doctor", "fetch", "generate"} <= subcommands <= known


def code(markdown: str) -> str:
    """What stands in code blocks and between backticks."""
    blocks = re.findall(r"^```.*?^```", markdown, re.MULTILINE | re.DOTALL)
    return "\n".join([*blocks, *re.findall(r"`[^`\n]+`", markdown)])


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_to_files_that_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    missing = [link for link in links if not (ROOT / link).exists()]
    assert links and not missing


def test_the_map_of_the_repository_is_true_and_whole():
    listing = re.search(r"^## Map\n.*?^```\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[1]
    named = {line.split()[0].rstrip("/") for line in listing.splitlines() if line.strip()}
    missing = sorted(name for name in named if not (ROOT / name).exists())
    assert not missing, f"README's map names {missing}"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode == 0:  # not in a downloaded archive
        modules = {
            "/".join(path.split("/")[:2]) if path.startswith("infer_lab/") else path.split("/")[0]
            for path in tracked.stdout.splitlines()
            if not path.startswith(".git")
        }
        unnamed = modules - named - {"infer_lab/__init__.py", "infer_lab/py.typed", "README.md"}
        assert not unnamed, f"README's map lacks {sorted(unnamed)}"


def test_the_index_lists_only_chapters_that_there_are_in_their_order():
    """It may lag behind: adding a chapter must not need a change elsewhere."""
    from infer_lab.course.discovery import chapters

    listed = re.findall(r"\]\((\w+/\d\d_\w+)/\d\d_\w+\.ipynb\)", README)
    there = [str(chapter) for chapter in chapters(ROOT)]
    assert listed and listed == [place for place in there if place in listed]


# bootstrap.py -------------------------------------------------------------------------------


def load_bootstrap():
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """bootstrap.py in a directory of its own; `commands` collects what it would have run."""
    bootstrap = load_bootstrap()
    for name in bootstrap.INPUTS:
        (tmp_path / name).write_text(name, encoding="utf-8")
    commands = []

    def run(command, venv, locked):
        commands.append("venv" if "venv" in command else "pip")
        if commands[-1] == "venv":
            python = bootstrap.python_of(venv)
            python.parent.mkdir(parents=True)
            python.touch()
            version = ".".join(map(str, sys.version_info[:3]))
            (venv / "pyvenv.cfg").write_text(f"version = {version}\n", encoding="utf-8")
        elif bootstrap.killed:
            raise KeyboardInterrupt

    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "run", run)
    bootstrap.killed = False

    def start(*arguments):
        commands.clear()
        monkeypatch.setattr(sys, "argv", ["bootstrap.py", "--venv", str(tmp_path / ".venv")])
        sys.argv += arguments
        bootstrap.main()
        return list(commands)

    start.bootstrap = bootstrap
    start.venv = tmp_path / ".venv"
    return start


def test_what_is_set_up_is_not_set_up_again(setup, capsys):
    assert setup() == ["venv", "pip"]
    capsys.readouterr()
    assert setup() == []
    assert capsys.readouterr().out == ""


def test_other_constraints_are_installed_into_the_same_environment(setup):
    setup()
    (setup.bootstrap.ROOT / "constraints.txt").write_text("torch==9\n", encoding="utf-8")
    assert setup() == ["pip"]
    assert setup() == []


def test_an_interrupted_set_up_starts_from_nothing(setup):
    setup.bootstrap.killed = True
    with pytest.raises(KeyboardInterrupt):
        setup()
    half = setup.venv / "lib" / "half-unpacked"
    half.mkdir(parents=True)
    setup.bootstrap.killed = False
    assert setup() == ["venv", "pip"]
    assert not half.exists()
    assert setup() == []


def test_an_interrupted_change_starts_from_nothing_too(setup):
    setup()
    (setup.bootstrap.ROOT / "pyproject.toml").write_text("changed", encoding="utf-8")
    setup.bootstrap.killed = True
    with pytest.raises(KeyboardInterrupt):
        setup()
    setup.bootstrap.killed = False
    assert setup() == ["venv", "pip"]


def test_an_environment_whose_python_is_gone_is_made_anew(setup):
    setup()
    setup.bootstrap.python_of(setup.venv).unlink()
    assert setup() == ["venv", "pip"]


def test_a_moved_repository_gets_an_environment_of_its_own(setup):
    setup()
    state = setup.venv / "installed.json"
    content = json.loads(state.read_text(encoding="utf-8"))
    state.write_text(json.dumps({**content, "root": "/elsewhere"}), encoding="utf-8")
    assert setup() == ["venv", "pip"]


def test_another_python_is_taken_only_when_it_is_named(setup):
    setup()
    config = setup.venv / "pyvenv.cfg"
    config.write_text("version = 3.99.0\n", encoding="utf-8")
    assert setup() == []
    assert setup("--this-python") == ["venv", "pip"]
    assert setup("--this-python") == []


def test_two_set_ups_at_once_wait_for_each_other(setup, capsys):
    bootstrap = setup.bootstrap
    path = bootstrap.ROOT / ".setup.lock"
    with bootstrap.lock(path):
        waiting = bootstrap.lock(path)
        with path.open("a+") as waiting.file:
            assert not waiting.acquire(wait=False)
    with bootstrap.lock(path):
        assert capsys.readouterr().out == ""


@pytest.mark.skipif(os.name == "nt", reason="locks aren't inherited there")
def test_a_killed_set_up_keeps_the_lock_until_its_pip_has_ended(tmp_path):
    code = (
        "import runpy, sys; from pathlib import Path\n"
        f"bootstrap = runpy.run_path({str(ROOT / 'bootstrap.py')!r})\n"
        f"here = Path({str(tmp_path)!r})\n"
        "pip = 'import pathlib, time; pathlib.Path(\"started\").touch(); time.sleep(2)'\n"
        "bootstrap['run'].__globals__['ROOT'] = here  # where it starts its children\n"
        "with bootstrap['lock'](here / 'lock') as locked:\n"
        "    bootstrap['run']([sys.executable, '-c', pip], here, locked)\n"
    )
    bootstrap = load_bootstrap()
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        while not (tmp_path / "started").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
    second = bootstrap.lock(tmp_path / "lock")
    with second.path.open("a+") as second.file:
        assert not second.acquire(wait=False)
        assert second.acquire(wait=True)


def test_a_python_that_is_too_old_is_refused_with_what_to_do(setup, monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    with pytest.raises(SystemExit):
        setup()
    error = capsys.readouterr().err
    assert "Python >= 3.11 is needed" in error and "is 3.9.1" in error and "PYTHON=" in error
    assert not setup.venv.exists()


def test_a_python_without_venv_is_refused_with_what_to_do(setup, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    with pytest.raises(SystemExit):
        setup()
    assert "apt install python3-venv" in capsys.readouterr().err


def test_a_failing_install_shows_why_and_fails(tmp_path, capsys):
    bootstrap = load_bootstrap()
    code = "print('ERROR: no matching distribution'); raise SystemExit(1)"
    with bootstrap.lock(tmp_path / "lock") as locked, pytest.raises(SystemExit):
        bootstrap.run([sys.executable, "-c", code], tmp_path, locked)
    error = capsys.readouterr().err
    assert "no matching distribution" in error and "install.log" in error
