"""Rules of the whole repository that no linter knows: who may import, name and read what.

Each rule has a counter-example beside it that it must catch, so that a rule cannot go blind.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepep_cupy import env

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "deepep_cupy"
CUDA = PACKAGE / "cuda"
MAX_CODE_LINES = 500

GPU_LIBRARIES = {"cupy", "cupyx", "cupy_backends", "cuda"}
ABOVE_JIT = ("api", "bench", "cli", "engines", "inspect", "litmus", "memory", "ranks", "testing")
ABOVE_PROTOCOL = (*ABOVE_JIT, "jit", "reference")
FORBIDDEN_IMPORTS = {
    "protocol": GPU_LIBRARIES | {"mpi4py", *(f"deepep_cupy.{room}" for room in ABOVE_PROTOCOL)},
    "reference": GPU_LIBRARIES | {"mpi4py"},
    "jit": {"mpi4py", *(f"deepep_cupy.{room}" for room in (*ABOVE_JIT, "protocol"))},
    "ranks": {f"deepep_cupy.{room}" for room in ABOVE_JIT},
    "memory": {f"deepep_cupy.{room}" for room in ABOVE_JIT if room != "ranks"},
    "engines": {
        f"deepep_cupy.{room}" for room in ("api", "bench", "cli", "inspect", "litmus", "testing")
    },
    "inspect": GPU_LIBRARIES
    | {"mpi4py", *(f"deepep_cupy.{room}" for room in ABOVE_JIT if room != "inspect")},
    "api": {f"deepep_cupy.{room}" for room in ("bench", "cli", "inspect", "litmus", "testing")},
    "testing": {f"deepep_cupy.{room}" for room in ("bench", "cli", "inspect", "litmus")},
}
"""Sub-package → top-level names and modules that none of its files imports."""

NAMED_ONLY_IN = {
    "RawModule": {"jit/compile.py", "engines/gpu/ptx_modules.py"},
    "nvrtc": {"jit/compile.py"},
    "mpi4py": {"ranks/mpi.py"},
    "environ": {"env.py"},
    "getenv": {"env.py"},
    "environb": {"env.py"},
    "putenv": {"env.py"},
}
"""Name in code (an import, a variable, an attribute; not a text) → the files that may use it."""

TOP_LEVEL = {
    ".ci",
    ".gitignore",
    ".pre-commit-config.yaml",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "SECURITY.md",
    "deepep_cupy",
    "docs",
    "examples",
    "mkdocs.yml",
    "ptx",
    "pyproject.toml",
    "scripts",
    "tests",
}


# ------------------------------------------------------------------------------- reading the code


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def kernel_files() -> list[Path]:
    return sorted([*CUDA.rglob("*.cu"), *CUDA.rglob("*.cuh")])


def kept_files() -> list[Path]:
    """The files git keeps; all files but hidden ones and build products where git is not there."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0 and listed.stdout:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        folders = [ROOT / name for name in sorted(TOP_LEVEL)]
        paths = [p for f in folders for p in ([f] if f.is_file() else f.rglob("*"))]
    return [p for p in paths if p.is_file() and "__pycache__" not in p.parts]


def relative(path: Path, to: Path = ROOT) -> str:
    return path.relative_to(to).as_posix()


@functools.cache
def imports(source: str) -> set[str]:
    """Dotted names of all that is imported, at the top, in a function or for types alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            found.add(str(node.args[0].value))
    return found


def covers(module: str, imported: str) -> bool:
    """Tell whether importing ``imported`` imports from ``module``."""
    return imported == module or imported.startswith(module + ".")


@functools.cache
def names(source: str) -> set[str]:
    """Every identifier of the code: variables, attributes, parts of imported names."""
    tree = ast.parse(source)
    found = {part for name in imports(source) for part in name.split(".")}
    found |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return found


_CUDA_NOISE = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\])*\"", re.DOTALL)


def cuda_code(source: str) -> str:
    """CUDA text without comments and string literals, line numbers kept."""
    return _CUDA_NOISE.sub(lambda noise: re.sub(r"[^\n]", " ", noise[0]), source)


def lines_with(pattern: str, path: Path, text: str) -> list[str]:
    return [
        f"{relative(path)}:{number}: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line)
    ]


# ---------------------------------------------------------------------------------- import rules


@pytest.mark.parametrize("layer", sorted(FORBIDDEN_IMPORTS))
def test_a_layer_does_not_import_what_lies_above_it(layer):
    above = FORBIDDEN_IMPORTS[layer] - {f"deepep_cupy.{layer}"}
    wrong = [
        f"{relative(path)} imports {name}"
        for path in sorted((PACKAGE / layer).rglob("*.py"))
        for name in sorted(imports(path.read_text()))
        if any(covers(module, name) for module in above)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_reference_imports_nothing_else_of_the_package():
    wrong = [
        f"{relative(path)} imports {name}"
        for path in sorted((PACKAGE / "reference").rglob("*.py"))
        for name in sorted(imports(path.read_text()))
        if covers("deepep_cupy", name) and not covers("deepep_cupy.reference", name)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", sorted(NAMED_ONLY_IN))
def test_a_name_is_used_only_where_it_belongs(name):
    wrong = [
        relative(path)
        for path in python_files()
        if relative(path, PACKAGE) not in NAMED_ONLY_IN[name] and name in names(path.read_text())
    ]
    allowed = ", ".join(sorted(NAMED_ONLY_IN[name]))
    assert not wrong, f"only {allowed} may name {name}, and these do: {wrong}"


def test_the_rules_see_every_way_to_import():
    source = (
        "import cupy.cuda as c\nfrom cupy.cuda import nvrtc\nimport importlib\n"
        "def f():\n    from deepep_cupy import memory\n"
        "    importlib.import_module('mpi4py.MPI')\n    return c.os.environ\n"
        "x = 'RawModule in a text'  # RawModule in a comment\n"
    )
    assert {"cupy.cuda", "cupy.cuda.nvrtc", "deepep_cupy.memory", "mpi4py.MPI"} <= imports(source)
    assert {"nvrtc", "environ", "mpi4py"} <= names(source)
    assert "RawModule" not in names(source)
    assert covers("deepep_cupy.api", "deepep_cupy.api.Buffer")
    assert not covers("deepep_cupy.api", "deepep_cupy.apiary")


def importing_program() -> Iterator[str]:
    """The modules that must work where neither CuPy nor MPI can be imported."""
    yield "deepep_cupy"
    for layer in ("protocol", "reference"):
        for path in sorted((PACKAGE / layer).rglob("*.py")):
            dotted = relative(path.with_suffix(""), ROOT).replace("/", ".")
            yield dotted.removesuffix(".__init__")


def test_protocol_and_reference_work_without_cupy_and_mpi():
    program = (
        "import importlib, sys\n"
        "for name in ('cupy', 'mpi4py', 'cuda'):\n"
        "    sys.modules[name] = None\n"  # an import of it raises ImportError
        f"for name in {list(importing_program())!r}:\n"
        "    importlib.import_module(name)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr


# ----------------------------------------------------------------------------------- kernel text


def test_instructions_stand_in_asm_alone():
    wrong = [
        line
        for path in kernel_files()
        if (CUDA / "asm") not in path.parents
        for line in lines_with(r"\b(asm|__asm|__asm__)\b", path, cuda_code(path.read_text()))
    ]
    assert not wrong, "write a wrapper in cuda/asm/ for:\n" + "\n".join(wrong)


def test_shared_memory_is_reached_through_the_accessor():
    wrong = [
        line
        for path in kernel_files()
        if (CUDA / "asm") not in path.parents
        for line in lines_with(r"\b__shared__\b", path, cuda_code(path.read_text()))
    ]
    assert not wrong, "shared memory is one struct behind one accessor:\n" + "\n".join(wrong)


def test_comments_and_texts_of_kernels_are_not_code():
    text = 'a; // asm\n/* __shared__\n asm */ "asm" b; asm volatile("x");\n'
    path = ROOT / "x.cu"
    assert lines_with(r"\basm\b", path, cuda_code(text)) == ["x.cu:3: b; asm volatile(   );"]
    assert not lines_with("__shared__", path, cuda_code(text))


def test_ptx_is_a_folder_of_modules_and_no_package():
    assert not list((ROOT / "ptx").rglob("*.py"))


# ----------------------------------------------------------------------------------- environment


def variables(text: str) -> set[str]:
    return set(re.findall(r"\bDEEPEP_CUPY_[A-Z][A-Z0-9_]*\b", text))


def test_every_variable_is_explained_where_callers_look_and_read_in_env():
    read = {variable.name for variable in env.VARIABLES}
    assert read == variables((PACKAGE / "env.py").read_text())
    rows = (ROOT / "docs" / "calling.md").read_text().splitlines()
    missing = [row for row in map(table_row, env.VARIABLES) if row not in rows]
    assert not missing, "docs/calling.md lacks:\n" + "\n".join(missing)
    used = {
        name: relative(path)
        for path in kept_files()
        if path.suffix in (".py", ".md", ".cu", ".cuh", ".ptx", ".toml")
        and path.parent != ROOT / "tests" / "cpu"
        for name in variables(path.read_text())
    }
    unknown = {name: path for name, path in used.items() if name not in read}
    assert not unknown, f"named, and not known to env.py: {unknown}"


def table_row(variable: env.Variable) -> str:
    """The row of docs/calling.md that explains a variable."""
    values = r" \| ".join(f"`{choice}`" for choice in variable.choices) or "text"
    default = f"`{variable.default}`" if variable.default else "unset"
    return f"| `{variable.name}` | {values} | {default} | {variable.doc} |"


# -------------------------------------------------------------------------------- README and CI


def readme_commands() -> list[str]:
    text = (ROOT / "README.md").read_text()
    return re.findall(r"^```sh\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_readme_begins_with_its_two_commands():
    """``.ci/run`` takes them from there and runs them as they stand."""
    shows, tests = readme_commands()[:2]
    assert "examples/01_hello_roundtrip.py" in shows
    assert "mpirun -n 4" in shows
    for word in ("ruff check", "ruff format --check", "mypy", "-m pytest"):
        assert word in tests, word


def test_the_readme_names_extras_that_exist():
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command in readme_commands():
        for extras in re.findall(r"\.\[([\w,]+)\]", command):
            assert set(extras.split(",")) <= set(known), command


def test_the_ci_script_is_bash():
    path = ROOT / ".ci" / "run"
    checked = subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


# ------------------------------------------------------------------------------------------ pages

MOST_LINES = {"README.md": 150, "CONTRIBUTING.md": 120}
_FENCED = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^()\s>]+)>?[^()]*\)")
_OF_OURS = re.compile(r"(?:deepep_cupy|docs|examples|ptx|scripts|tests|\.ci)/[\w./*-]*")


def pages() -> list[Path]:
    return [path for path in kept_files() if path.suffix == ".md"]


def anchors(text: str) -> set[str]:
    """What ``#...`` in a link may name: the headings of a page, as GitHub spells them."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6}[ \t]+(.+?)[ \t#]*$", _FENCED.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        again = sum(1 for each in found if re.fullmatch(rf"{re.escape(name)}(-\d+)?", each))
        found.add(f"{name}-{again}" if again else name)
    return found


def broken_links(path: Path, text: str) -> list[str]:
    """Links of a page to files or headings that are not there; the web is not asked."""
    wrong = []
    for link in _LINK.findall(_CODE.sub("", _FENCED.sub("", text))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if target != path and not (target.exists() and target.is_relative_to(ROOT)):
            wrong.append(f"{relative(path)}: {link}: there is no such file")
        elif anchor and anchor not in anchors(text if target == path else target.read_text()):
            wrong.append(f"{relative(path)}: {link}: there is no such heading")
    return wrong


def lost_paths(path: Path, text: str) -> list[str]:
    """Paths from the root in `code` of a page that lead to nothing; ``*`` stands for any name."""
    spans = [span.strip("`") for span in re.findall(r"`[^`\n]+`", _FENCED.sub("", text))]
    named = [span for span in spans if _OF_OURS.fullmatch(span)]
    return [f"{relative(path)}: {name}" for name in named if not any(ROOT.glob(name.rstrip("/")))]


_FILE = re.compile(r"(?<![\w/.{}-])(?:[\w*]+/)+[\w*]+\.(?:cuh?|md|ptx|py|toml)\b")
_NO_FILES = {"generated/prelude.cuh", "folder/file.cuh", "tests/gpu/worker_NAME.py"}
"""What the compiler is given from memory, and what stands for any name."""


def lost_files(path: Path, text: str) -> list[str]:
    """Files named in comments, docstrings and includes that are not there, seen from the root, the
    package, its kernels, or the file itself."""
    bases = (ROOT, PACKAGE, CUDA, path.parent, path.parent.parent)
    return [
        f"{relative(path)}: {name}"
        for name in _FILE.findall(text)
        if name not in _NO_FILES and not any(any(base.glob(name)) for base in bases)
    ]


def test_files_that_the_code_speaks_of_are_there():
    texts = [*python_files(), *kernel_files(), *sorted((ROOT / "tests" / "gpu").glob("*.py"))]
    wrong = [line for path in texts for line in lost_files(path, path.read_text())]
    assert not wrong, "\n".join(wrong)


def test_lost_files_are_found():
    text = "see ``api/buffer.py``, cuda/common/*.cuh, buffer.py, api/nothing.py\n// comm/lost.cuh\n"
    path = PACKAGE / "x.py"
    lost = ["deepep_cupy/x.py: api/nothing.py", "deepep_cupy/x.py: comm/lost.cuh"]
    assert lost_files(path, text) == lost


@pytest.mark.parametrize("path", pages(), ids=relative)
def test_what_a_page_points_to_is_there(path):
    text = path.read_text()
    wrong = [*broken_links(path, text), *lost_paths(path, text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", MOST_LINES)
def test_a_page_for_everybody_is_short(name):
    assert len((ROOT / name).read_text().splitlines()) <= MOST_LINES[name]


def test_broken_links_and_lost_paths_are_found():
    page = (
        "# A page: of `links`, twice\n## Twice\n## Twice\n"
        "[a](README.md), [b](#twice-1), [c](#a-page-of-links-twice), [d](https://nowhere.invalid/x)\n"
        "![e](examples/pictures/none.png), [`f`](#thrice), [g\nh](README.md#no-such-heading)\n"
        "[i](../outside.md) `[j](in_code.md)`\n```\n# Thrice\n[k](fenced.md)\n```\n"
        "`deepep_cupy/api/`, `tests/cpu/test_*.py`, `tests/cpu/test_nothing*.py`, `ptx/none.ptx`\n"
    )
    path = ROOT / "x.md"
    assert [line.split(": ")[1] for line in broken_links(path, page)] == [
        "examples/pictures/none.png",
        "#thrice",
        "README.md#no-such-heading",
        "../outside.md",
    ]
    lost = ["x.md: tests/cpu/test_nothing*.py", "x.md: ptx/none.ptx"]
    assert lost_paths(path, page) == lost


# ---------------------------------------------------------------------------------- size and form


def code_lines(source: str) -> int:
    """Lines of Python that hold code: no blank lines, no comments, no docstrings."""
    words: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            words |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in words
        for number, line in enumerate(source.splitlines(), 1)
    )


def cuda_lines(source: str) -> int:
    """The same for CUDA text."""
    return sum(bool(line.strip()) for line in cuda_code(source).splitlines())


def test_no_file_is_too_long_to_read():
    long = {
        relative(path): count
        for path in [*python_files(), *kernel_files()]
        if (count := (code_lines if path.suffix == ".py" else cuda_lines)(path.read_text()))
        > MAX_CODE_LINES
    }
    assert not long, f"split these files, the limit is {MAX_CODE_LINES} lines of code: {long}"


def test_docstrings_and_comments_are_no_code():
    source = (
        '"""What\nit is."""\n\nx = 1  # why\n# a note\ndef f():\n    """Text."""\n    return x\n'
    )
    assert code_lines(source) == 3
    assert cuda_lines("// a\nint x; /* b\n c */\n\n") == 1


def test_nothing_else_lies_at_the_top():
    kept = {relative(path).split("/")[0] for path in kept_files()}
    assert kept <= TOP_LEVEL, f"not of this project: {sorted(kept - TOP_LEVEL)}"


# Written with a class of one letter where the rule would otherwise find itself.
FOREIGN = (
    r"\.\./share[d]|/work[/]|\b[l]ent (?:machine|host|node|device|accelerator|GPU|H\d)"
    r"|\b[Ii]ssues? #?\d|\b(?:design|style|cases|cuda_facts|deepep_facts|measured)\.m[d]\b"
)


def test_the_repository_speaks_of_itself_alone():
    """No file cites what a reader of this repository cannot open."""
    wrong = [
        line
        for path in kept_files()
        if path.suffix != ".png"
        for line in lines_with(FOREIGN, path, path.read_text(errors="replace"))
    ]
    assert not wrong, "\n".join(wrong)


FOREIGN_EXAMPLES = (
    "see ../share" + "d",
    "/wor" + "k/main",
    "a len" + "t machine",
    "in issu" + "e 2",
    "Issue" + "s #3",
    "by style.m" + "d 5",
)


@pytest.mark.parametrize("text", FOREIGN_EXAMPLES)
def test_foreign_words_are_found(text):
    assert lines_with(FOREIGN, ROOT / "x", text)


def test_every_python_file_says_what_it_is():
    silent = [
        relative(path)
        for path in python_files()
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not silent, f"no docstring: {silent}"
