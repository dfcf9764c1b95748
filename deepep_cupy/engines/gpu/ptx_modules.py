"""The hand-written PTX modules of ``ptx/``: their manifest, their text, and loading them.

A module is a whole ``.ptx`` file that the driver translates for the GPU at hand. The manifest lists
what each entry takes, so that it can be launched with the same checks as a compiled kernel, and a
lint compares the manifest with the text both ways. ``ptx/README.md`` explains how to write one.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepep_cupy._resources import ptx_dir
from deepep_cupy.engines.gpu.kernels import list_kernels
from deepep_cupy.errors import CompileError, ContractError, PlatformError
from deepep_cupy.jit.compile import Loaded, load
from deepep_cupy.jit.inspect import find_tool
from deepep_cupy.jit.spec import Param, Struct, StructLayout

__all__ = [
    "HEADINGS",
    "PtxEntry",
    "PtxModule",
    "PtxParam",
    "PtxText",
    "assemble",
    "get_module",
    "list_modules",
    "load_entry",
    "parse_ptx",
    "verify",
]

HEADINGS = ("purpose", "signature", "launch", "registers", "ordering", "twin")
"""What the header block of a module must explain, each as ``// word: ...``."""

_MODULE_KEYS = {"file", "target", "ptx_version", "min_cc", "twin", "doc", "entry"}
_ENTRY_KEYS = {"name", "max_threads", "static_smem", "params", "constants"}
_PARAM_KEYS = {"name", "type", "shape", "unit"}
_SHARED = re.compile(r"\.shared\b[^;{]*\.[a-z](\d+)\s+\w+\s*(?:\[(\d+)\])?\s*;")
_FORWARD = (80, 90, 100, 120)
"""A module without an architecture suffix must assemble for all of these from its target on."""


@dataclass(frozen=True)
class PtxParam:
    """One parameter of an entry, as the manifest has it.

    Attributes:
        name: As in the PTX.
        type: A C type (``"u64"``, ``"u8*"``), an array of it by value (``"u8*[8]"``), or the
            parameter struct of the twin (``"BarrierParams"``).
        shape: Of what a pointer points to; empty for values.
        unit: Bytes, rows, nanoseconds, ….
    """

    name: str
    type: str
    shape: str
    unit: str


@dataclass(frozen=True)
class PtxEntry:
    """One entry of a module.

    Attributes:
        name: Of the ``.visible .entry``.
        params: In order.
        max_threads: Most threads a block, of ``.maxntid`` or ``.reqntid``.
        static_smem: Bytes of static shared memory a block.
        constants: What the twin's constants are in this text, e.g. ``{"kNumRanks": 8}``.
        twin: The kernel that does the same.
    """

    name: str
    params: tuple[PtxParam, ...]
    max_threads: int
    static_smem: int
    constants: Mapping[str, int]
    twin: str

    def param_offsets(self, constants: Mapping[str, int]) -> tuple[int, ...]:
        """Where each parameter begins in the packed arguments."""
        layout = self.layout(constants)
        return tuple(layout.param_offset(param.name) for param in self.params)

    def layout(self, constants: Mapping[str, int]) -> StructLayout:
        """The parameters as one struct; those of a struct are named ``"p.field"``."""
        del constants
        params = tuple(self._param(param) for param in self.params)
        return Struct(f"{self.name}_arguments", params).layout(self.constants)

    def num_threads(self, constants: Mapping[str, int]) -> int:
        """Threads a block: the most there may be."""
        del constants
        return self.max_threads

    def num_shared_bytes(self, constants: Mapping[str, int]) -> int:
        """Modules use static shared memory only."""
        del constants
        return 0

    def param_bytes(self, param: PtxParam) -> int:
        """Bytes of one parameter."""
        return Struct("one", (self._param(param),)).layout(self.constants).nbytes

    def _param(self, param: PtxParam) -> Param:
        for spec in list_kernels():
            if spec.name == self.twin and spec.struct.name == param.type:
                return Param(param.name, spec.struct)
        array = re.fullmatch(r"(.+?)\[(\d+)\]", param.type)
        if array:
            return Param(param.name, array[1], int(array[2]))
        return Param(param.name, param.type)


@dataclass(frozen=True)
class PtxModule:
    """One module of the manifest.

    Attributes:
        file: In ``ptx/``.
        target: Its ``.target``.
        ptx_version: Its ``.version``.
        min_cc: The oldest GPU it runs on, 80 for compute capability 8.0.
        twin: The CUDA kernel that does the same; empty where there is none.
        doc: One line.
        entries: All its entries.
    """

    file: str
    target: str
    ptx_version: str
    min_cc: int
    twin: str
    doc: str
    entries: tuple[PtxEntry, ...]

    @property
    def name(self) -> str:
        """``peer_barrier`` for ``peer_barrier.sm_80.ptx``."""
        return self.file.split(".")[0]

    @property
    def path(self) -> Path:
        """The file."""
        return ptx_dir() / self.file

    def entry(self, name: str) -> PtxEntry:
        """Return one entry.

        Raises:
            ContractError: There is none of that name.
        """
        for entry in self.entries:
            if entry.name == name:
                return entry
        names = ", ".join(entry.name for entry in self.entries)
        raise ContractError(f"ptx/{self.file} has no entry {name!r}; there are: {names}")


@dataclass(frozen=True)
class PtxText:
    """What a lint needs to know of a ``.ptx`` file.

    Attributes:
        version: Of ``.version``.
        target: Of ``.target``.
        address_size: Of ``.address_size``.
        header: The comment block at the top.
        entries: Entry -> (parameter, bytes) in order.
        max_threads: Entry -> product of ``.maxntid`` or ``.reqntid``; absent without one.
        static_smem: Entry -> bytes of the ``.shared`` variables in its body.
    """

    version: str
    target: str
    address_size: str
    header: str
    entries: Mapping[str, tuple[tuple[str, int], ...]]
    max_threads: Mapping[str, int]
    static_smem: Mapping[str, int]


def list_modules(folder: Path | None = None) -> tuple[PtxModule, ...]:
    """Return all modules of the manifest. Local; needs neither CuPy nor MPI.

    Raises:
        ContractError: The manifest is not well formed; the message names the place.
        PlatformError: There is no ``ptx`` folder in this installation.
    """
    path = (ptx_dir() if folder is None else folder) / "manifest.toml"
    try:
        manifest = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ContractError(f"{path}: {error}") from None
    _keys(f"{path}", manifest, required=set(), optional={"module"})
    return tuple(
        _module(f"{path}: module {i}", m) for i, m in enumerate(manifest.get("module", []))
    )


def get_module(name: str) -> PtxModule:
    """Return one module by its name or its file name.

    Raises:
        ContractError: There is none; the message lists those there are.
    """
    modules = list_modules()
    for module in modules:
        if name in (module.name, module.file):
            return module
    names = ", ".join(module.name for module in modules) or "none"
    raise ContractError(f"no PTX module is named {name!r}; there are: {names}")


def load_entry(module: PtxModule, entry: str) -> tuple[Loaded, PtxEntry]:
    """Load a module on the current device; ``launch.Launch`` takes both parts of the answer.

    Raises:
        ContractError: There is no such entry.
        CompileError: The driver does not take the module.
        PlatformError: CuPy is not installed.
    """
    found = module.entry(entry)
    return load(module.path.read_bytes(), found.name, module.path.name), found


def parse_ptx(text: str) -> PtxText:
    """Read the directives of a PTX text that a manifest lists."""
    header = re.match(r"(?:[ \t]*//[^\n]*\n|[ \t]*\n)*", text)
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)

    def directive(name: str) -> str:
        found = re.search(rf"^\s*\.{name}\s+([^\s;]+)", code, re.MULTILINE)
        return found[1] if found else ""

    entries: dict[str, tuple[tuple[str, int], ...]] = {}
    threads: dict[str, int] = {}
    shared: dict[str, int] = {}
    starts = list(re.finditer(r"\.entry\s+(\w+)\s*(?:\(([^)]*)\))?([^{]*)\{", code))
    ends = [found.start() for found in starts[1:]] + [len(code)]
    for found, end in zip(starts, ends, strict=True):
        name, params, rest = found.groups()
        body = code[found.end() : end]
        variables = re.findall(_SHARED, body)
        shared[name] = sum(int(bits) // 8 * int(count or 1) for bits, count in variables)
        entries[name] = tuple(_declared(params or ""))
        bound = re.search(r"\.(?:maxntid|reqntid)\s+([\d\s,]+)", rest)
        if bound:
            threads[name] = 1
            for number in bound[1].split(","):
                threads[name] *= int(number)
    return PtxText(
        directive("version"),
        directive("target"),
        directive("address_size"),
        header[0] if header else "",
        entries,
        threads,
        shared,
    )


def verify(folder: Path | None = None) -> list[str]:
    """Compare manifest and files both ways; return what is wrong, nothing if all is well.

    Raises:
        ContractError: The manifest is not well formed.
    """
    where = ptx_dir() if folder is None else folder
    modules = list_modules(where)
    listed = [module.file for module in modules]
    problems = [f"{file}: listed twice" for file in set(listed) if listed.count(file) > 1]
    unlisted = sorted(path.name for path in where.glob("*.ptx") if path.name not in listed)
    problems += [f"{file}: not in the manifest" for file in unlisted]
    for module in modules:
        path = where / module.file
        if not path.is_file():
            problems.append(f"{module.file}: in the manifest, but there is no such file")
            continue
        text = path.read_text(encoding="utf-8")
        problems += [
            f"{module.file}: {problem}" for problem in _differences(module, parse_ptx(text))
        ]
        problems += [f"{module.file}: {problem}" for problem in _beyond_ascii(text)]
    return problems


def _beyond_ascii(text: str) -> Iterator[str]:
    """Characters, in comments too, that drivers of CUDA 13.0 and before do not take."""
    for number, line in enumerate(text.splitlines(), 1):
        strange = sorted({char for char in line if not char.isascii()})
        if strange:
            yield f"line {number} holds {' '.join(strange)}, which older drivers refuse: use ASCII"


def assemble(path: Path, target: str) -> list[str]:
    """Assemble a module with ``ptxas`` for its target, and for newer ones where it may run there.

    Returns:
        The complaints of ``ptxas``; none if all is well.

    Raises:
        PlatformError: There is no ``ptxas``.
    """
    tool = find_tool("ptxas")
    if tool is None:
        raise PlatformError(
            "assembling PTX needs ptxas, which is neither in this environment nor on PATH; "
            "pip install nvidia-cuda-nvcc"
        )
    plain = re.fullmatch(r"sm_(\d+)", target)
    newer = [f"sm_{arch}" for arch in _FORWARD if plain and arch > int(plain[1])]
    problems = []
    for arch in (target, *newer):
        with tempfile.TemporaryDirectory(prefix="deepep_cupy-") as folder:
            output = str(Path(folder) / "out.cubin")
            command = [str(tool), "-v", f"-arch={arch}", "-o", output, str(path)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr
        if done.returncode:
            problems.append(f"ptxas -arch={arch}: {said.strip()}")
        elif re.search(r"[1-9]\d* bytes spill", said):
            problems.append(f"ptxas -arch={arch}: registers are spilled: {said.strip()}")
    return problems


def _differences(module: PtxModule, text: PtxText) -> Iterator[str]:
    """What the manifest and the text of one module disagree about."""
    pairs = [
        (".version", text.version, module.ptx_version),
        (".target", text.target, module.target),
        (".address_size", text.address_size, "64"),
    ]
    for name, is_, wanted in pairs:
        if is_ != wanted:
            yield f"{name} is {is_ or 'missing'}, the manifest says {wanted}"
    if not module.file.endswith(f".{module.target}.ptx"):
        yield f"the name must end in .{module.target}.ptx"
    if module.min_cc < int(re.sub(r"\D", "", module.target) or 0):
        yield f"min_cc {module.min_cc} is older than its target {module.target}"
    if module.twin and module.twin not in [spec.name for spec in list_kernels()]:
        yield f"its twin {module.twin!r} is no kernel of the registry"
    yield from _header_problems(module, text.header)
    names = [entry.name for entry in module.entries]
    yield from (
        f"entry {name} is not in the manifest" for name in text.entries if name not in names
    )
    for entry in module.entries:
        if entry.name not in text.entries:
            yield f"entry {entry.name} is in the manifest, not in the file"
            continue
        wanted_params = tuple((param.name, entry.param_bytes(param)) for param in entry.params)
        if text.entries[entry.name] != wanted_params:
            yield (
                f"entry {entry.name}: parameters are {_named(text.entries[entry.name])}, the "
                f"manifest says {_named(wanted_params)}"
            )
        if text.static_smem[entry.name] != entry.static_smem:
            yield (
                f"entry {entry.name}: {text.static_smem[entry.name]} bytes of .shared variables, "
                f"the manifest says {entry.static_smem}"
            )
        threads = text.max_threads.get(entry.name, 0)
        if threads != entry.max_threads:
            yield (
                f"entry {entry.name}: .maxntid or .reqntid is {threads or 'missing'}, the manifest "
                f"says {entry.max_threads}"
            )


def _header_problems(module: PtxModule, header: str) -> Iterator[str]:
    said = {
        found[1].lower(): found[2].strip()
        for found in re.finditer(r"^\s*//\s*(\w+):(.*)$", header, re.MULTILINE)
    }
    missing = [heading for heading in HEADINGS if heading not in said]
    if missing:
        yield f"the header block lacks {', '.join(f'// {heading}:' for heading in missing)}"
    if "twin" in said and module.twin and module.twin not in re.findall(r"\w+", said["twin"]):
        yield f"the header block's twin is {said['twin']!r}, the manifest says {module.twin!r}"
    for entry in module.entries:
        for name in (entry.name, *(param.name for param in entry.params)):
            if not re.search(rf"\b{re.escape(name)}\b", header):
                yield f"the header block does not mention {name}"


def _declared(params: str) -> Iterator[tuple[str, int]]:
    """(name, bytes) of each ``.param`` of an entry."""
    for declaration in filter(None, (part.strip() for part in params.split(","))):
        found = re.search(r"\.[a-z](\d+)\s+(?:\.ptr\b.*\s)?(\w+)\s*(?:\[(\d+)\])?\s*$", declaration)
        if found is None:
            raise CompileError(f"PTX: cannot read the parameter {declaration!r}")
        yield found[2], int(found[1]) // 8 * int(found[3] or 1)


def _named(params: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name} ({nbytes} bytes)" for name, nbytes in params) or "none"


def _module(where: str, table: Mapping[str, Any]) -> PtxModule:
    _keys(where, table, required=_MODULE_KEYS, optional=set())
    twin = str(table["twin"])
    entries = []
    for raw in table["entry"]:
        place = f"{where} ({table['file']}), entry {raw.get('name', '?')}"
        _keys(place, raw, required=_ENTRY_KEYS - {"constants"}, optional={"constants"})
        for param in raw["params"]:
            _keys(f"{place}, param {param.get('name', '?')}", param, _PARAM_KEYS, set())
        params = tuple(PtxParam(**param) for param in raw["params"])
        constants = {str(name): int(value) for name, value in raw.get("constants", {}).items()}
        entries.append(
            PtxEntry(
                str(raw["name"]),
                params,
                int(raw["max_threads"]),
                int(raw["static_smem"]),
                constants,
                twin,
            )
        )
    return PtxModule(
        str(table["file"]),
        str(table["target"]),
        str(table["ptx_version"]),
        int(table["min_cc"]),
        twin,
        str(table["doc"]),
        tuple(entries),
    )


def _keys(where: str, table: Mapping[str, Any], required: set[str], optional: set[str]) -> None:
    missing = sorted(required - set(table))
    unknown = sorted(set(table) - required - optional)
    if missing or unknown:
        told = [f"lacks {', '.join(missing)}"] if missing else []
        told += [f"has the unknown {', '.join(unknown)}"] if unknown else []
        raise ContractError(f"{where} {' and '.join(told)}")
