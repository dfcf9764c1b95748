"""Environment variables: defaults, choices, what mpirun says, what a child gets."""

import pytest

from deepep_cupy import env
from deepep_cupy.errors import ContractError


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    for name in ("PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_defaults():
    assert env.loads() == "auto"
    assert env.path() == "auto"
    assert env.log_level() == "info"
    assert env.assert_cached() is False


@pytest.mark.parametrize("variable", env.VARIABLES, ids=lambda variable: variable.name)
def test_table(variable, monkeypatch):
    assert variable.name.startswith("DEEPEP_CUPY_")
    assert variable.doc.endswith(".")
    assert env.read(variable.name) == variable.default
    for choice in variable.choices:
        monkeypatch.setenv(variable.name, f" {choice.upper()} ")
        assert env.read(variable.name) == choice
    if variable.choices:
        assert variable.default in variable.choices
        monkeypatch.setenv(variable.name, "nonsense")
        with pytest.raises(ContractError, match=f"{variable.name} must be one of .*'nonsense'"):
            env.read(variable.name)
    monkeypatch.setenv(variable.name, "")
    assert env.read(variable.name) == variable.default


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / ".cache" / "deepep_cupy"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative is ignored")
    assert env.cache_dir() == tmp_path / ".cache" / "deepep_cupy"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert env.cache_dir() == tmp_path / "xdg" / "deepep_cupy"
    monkeypatch.setenv("DEEPEP_CUPY_CACHE_DIR", "~/mine")
    assert env.cache_dir() == tmp_path / "mine"


def test_cache_dir_without_a_home(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(env.Path, "home", no_home)
    assert env.cache_dir().is_absolute()


def test_launcher(monkeypatch):
    assert (env.launcher_size(), env.launcher_rank()) == (1, 0)
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("PMI_RANK", "3")
    assert (env.launcher_size(), env.launcher_rank()) == (4, 3)
    monkeypatch.setenv("PMI_SIZE", "unknown")
    assert env.launcher_size() == 1
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert env.launcher_size() == 2


def test_child_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("GONE", "1")
    monkeypatch.setenv("PYTHONPATH", "/before")
    child = env.child_environment({"GONE": None, "NEW": "2"}, tmp_path)
    assert child["KEPT"] == "1"
    assert child["NEW"] == "2"
    assert "GONE" not in child
    assert child["PYTHONPATH"] == f"{tmp_path}:/before"
