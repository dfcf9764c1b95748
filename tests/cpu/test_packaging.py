"""What is shipped, and where it is found: a wheel, an sdist, an editable install, a checkout.

``ptx/`` lies outside the package and is mapped into it, so that a build can lose it without a
word. Everything here is built from a copy of the tree, offline, by the setuptools of this Python.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import deepep_cupy

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "deepep_cupy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SHIPPED = (".py", ".cu", ".cuh", ".ptx", ".toml", ".typed")
FIND = (
    "from deepep_cupy import _resources as r\n"
    "print(r.__file__)\nprint(r.kernel_dir())\nprint(r.ptx_dir())\n"
)


def run(*command, cwd, **environment):
    """Run a command to its good end; return what it printed."""
    child = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert child.returncode == 0, f"{command}:\n{child.stdout}\n{child.stderr}"
    return child.stdout


def shipped_files():
    """The files of the tree that a wheel must hold, by their path in the wheel."""
    wanted = set()
    for folder, prefix in ((PACKAGE, "deepep_cupy"), (ROOT / "ptx", "deepep_cupy/_ptx")):
        for path in folder.rglob("*"):
            if path.suffix in SHIPPED and "__pycache__" not in path.parts:
                wanted.add(f"{prefix}/{path.relative_to(folder).as_posix()}")
    return wanted


def wheel_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


# -------------------------------------------------------------------------------- the build, once


@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    """A copy of all that belongs to a build, so that none of its products land in the checkout."""
    copy = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("deepep_cupy", "ptx", "docs", "examples", "scripts", "tests", ".ci"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, copy / path.name)
    return copy


@pytest.fixture(scope="session")
def built(tree, tmp_path_factory):
    """The sdist, and the wheel made from that sdist, as an index would hold them."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree, cwd=out)
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """Make an empty environment that borrows NumPy and ml_dtypes from this one."""

    def make(name, wheel):
        home = tmp_path_factory.mktemp(name)
        venv.create(home, with_pip=False, symlinks=True)
        python = home / "bin" / "python"
        pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
        run(*pip, "--no-deps", "--no-index", wheel, cwd=home)
        site = Path(
            run(
                python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home
            ).strip()
        )
        (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        return python, site

    return make


# ------------------------------------------------------------------------------- what is shipped


def test_the_wheel_holds_every_file_of_the_tree(built):
    _, wheel = built
    got, wanted = wheel_files(wheel), shipped_files()
    assert got == wanted, f"missing: {sorted(wanted - got)}, too much: {sorted(got - wanted)}"
    assert {"deepep_cupy/_ptx/manifest.toml", "deepep_cupy/py.typed"} <= got
    assert any(name.endswith(".cu") for name in got)
    assert any(name.endswith(".ptx") for name in got)


def test_the_sdist_keeps_the_shape_of_the_tree(built):
    sdist, _ = built
    with tarfile.open(sdist) as archive:
        got = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {re.sub("^deepep_cupy/_ptx/", "ptx/", name) for name in shipped_files()}
    assert wanted <= got, f"missing: {sorted(wanted - got)}"
    assert {"pyproject.toml", "README.md", "LICENSE"} <= got
    # And what is needed to test it, to read about it and to build its pages.
    wanted = {
        path.relative_to(ROOT).as_posix()
        for folder in ("docs", "examples", "scripts", "tests", ".ci")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    wanted |= {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "mkdocs.yml", "ptx/README.md"}
    assert wanted <= got, f"missing: {sorted(wanted - got)}"
    assert not [name for name in got if name.endswith(".pyc")]


def test_the_wheel_says_what_it_is(built):
    _, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
        licences = [n for n in archive.namelist() if n.endswith("licenses/LICENSE")]
    assert "License-Expression: MIT" in metadata
    assert "Requires-Python: >=3.11" in metadata
    plain = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert plain == ["numpy", "ml_dtypes"]
    assert licences


def test_the_list_of_packages_is_the_folders():
    folders = {p.parent for p in PACKAGE.rglob("*.py")}
    packages = {p.relative_to(ROOT).as_posix().replace("/", ".") for p in folders}
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert set(listed) == packages | {"deepep_cupy._ptx"}
    assert listed == sorted(listed)
    bare = [p for p in sorted(folders) if not (p / "__init__.py").is_file()]
    assert not bare, f"no __init__.py in {bare}"


# -------------------------------------------------------------------------------- where it is found


def found(python, cwd, **environment):
    module, kernels, ptx = map(Path, run(python, "-c", FIND, cwd=cwd, **environment).split())
    assert (ptx / "manifest.toml").is_file()
    assert list(kernels.rglob("*.cu"))
    return module.parent, kernels, ptx


def test_resources_are_found_in_a_wheel(built, environment, tmp_path):
    python, site = environment("wheel", built[1])
    package, kernels, ptx = found(python, tmp_path)
    assert package == site / "deepep_cupy"
    assert (kernels, ptx) == (package / "cuda", package / "_ptx")


def test_resources_are_found_in_an_editable_install(tree, environment, tmp_path):
    hook = (
        "import sys, setuptools.build_meta as backend\n"
        "print(backend.build_editable(sys.argv[1]).strip())\n"
    )
    wheel = run(sys.executable, "-c", hook, tmp_path, cwd=tree).split()[-1]
    python, _ = environment("editable", tmp_path / wheel)
    package, kernels, ptx = found(python, tmp_path)
    assert package == tree / "deepep_cupy"
    assert (kernels, ptx) == (package / "cuda", tree / "ptx")


def test_resources_are_found_in_a_checkout(tree, tmp_path):
    package, kernels, ptx = found(sys.executable, tmp_path, PYTHONPATH=str(tree))
    assert package == tree / "deepep_cupy"
    assert (kernels, ptx) == (package / "cuda", tree / "ptx")


def test_missing_modules_are_named(tree, tmp_path):
    """A folder ``ptx`` that merely lies beside the installed package is not taken for ours."""
    shutil.copytree(tree / "deepep_cupy", tmp_path / "deepep_cupy")
    shutil.copytree(tree / "ptx", tmp_path / "ptx")
    program = (
        "from deepep_cupy import _resources, errors\n"
        "try:\n    _resources.ptx_dir()\nexcept errors.PlatformError as error:\n    print(error)\n"
    )
    said = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert str(tmp_path / "deepep_cupy" / "_ptx") in said
    assert str(tmp_path / "ptx") in said


# ----------------------------------------------------------------------------- versions and extras


def test_one_version_everywhere(built):
    """It stands in ``_version.py``; the build reads it there, and the changelog begins with it."""
    version = deepep_cupy.__version__
    assert f'"{version}"' in (PACKAGE / "_version.py").read_text()
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert [path.name.split("-")[1].removesuffix(".tar.gz") for path in built] == [version] * 2
    released = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == version


@pytest.mark.parametrize(
    ("distribution", "tool"),
    [("nvidia-cuda-nvcc", "ptxas"), ("nvidia-cuda-nvdisasm", "nvdisasm")],
)
def test_the_extra_test_brings_its_tools(distribution, tool):
    """A tool on PATH must not hide that the wheel lost it."""
    assert any(
        word.startswith(distribution)
        for word in PROJECT["project"]["optional-dependencies"]["test"]
    )
    files = importlib.metadata.files(distribution) or []
    program = next(file.locate() for file in files if file.name == tool)
    assert tool in run(program, "--version", cwd=ROOT)


def test_an_extra_is_of_one_cuda_major():
    extras = PROJECT["project"]["optional-dependencies"]
    assert not [word for word in extras["cuda13"] if "12" in word]
    assert not [word for word in extras["cuda12"] if "13" in word and "<13" not in word]
