"""What a kernel is, as data: its text, its entry, and the one struct it takes.

Every kernel takes exactly one parameter, a struct by value::

    extern "C" GLOBAL void barrier(const GRID_CONSTANT BarrierParams p) { ... }

The struct is declared here, once: its C text is put into the generated prelude, and the same
declaration packs the bytes on the host. Fields lie at their natural alignment, which is what every
compiler does with these types; a test compiles ``static_assert``s on each offset with NVRTC and
with g++.

==============  =====  =====  ==================================================
C type          bytes  align  from Python
==============  =====  =====  ==================================================
``u8 .. u64``    1..8   size  ``int``, checked against the range
``i8 .. i64``    1..8   size  ``int``, checked against the range
``f32, f64``     4, 8   size  ``float``
``T*``              8      8  ``int``: a device address, 0 for "none"
==============  =====  =====  ==================================================
"""

from __future__ import annotations

import re
import struct as _struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deepep_cupy.errors import ContractError

__all__ = ["Field", "KernelSpec", "Param", "Struct", "StructLayout"]

_BASE_TYPES = {
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "f32": "f",
    "f64": "d",
}
"""C type -> the one letter that ``struct`` and ``memoryview.cast`` know it by."""

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


@dataclass(frozen=True)
class Param:
    """One field of a parameter struct.

    Attributes:
        name: The C name of the field.
        ctype: ``"u64"``, ``"u8*"``, ``"const u32*"``, … or a ``Struct`` that lies inside this one.
        count: Elements; a number, or the name of a generated constant such as ``"kNumRanks"``.
            ``None`` for a field that is no array.
        doc: Meaning, shape and unit; becomes the comment beside the field.
    """

    name: str
    ctype: str | Struct
    count: int | str | None = None
    doc: str = ""

    def __post_init__(self) -> None:
        if not _IDENTIFIER.match(self.name):
            raise ContractError(f"Param: {self.name!r} is not a C identifier")
        if isinstance(self.ctype, str):
            _letter(self.ctype)
        if isinstance(self.count, int) and self.count < 1:
            raise ContractError(f"Param {self.name!r}: count must be at least 1, got {self.count}")

    @property
    def type_name(self) -> str:
        """The C type as written in the text."""
        return self.ctype.name if isinstance(self.ctype, Struct) else self.ctype


@dataclass(frozen=True)
class Struct:
    """A C struct of ``Param`` fields; usable as the ``ctype`` of a field of another one.

    Attributes:
        name: The C name, e.g. ``"CommParams"``.
        params: The fields in order.
        doc: One line, the comment above the struct.
    """

    name: str
    params: tuple[Param, ...]
    doc: str = ""

    def __post_init__(self) -> None:
        names = [param.name for param in self.params]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ContractError(f"struct {self.name}: field {doubled[0]!r} is declared twice")
        if not names:
            raise ContractError(f"struct {self.name}: a C struct needs at least one field")

    def inner(self) -> Iterator[Struct]:
        """The structs that must be declared before this one, each once, innermost first."""
        seen: set[str] = set()
        for param in self.params:
            if isinstance(param.ctype, Struct):
                for struct in (*param.ctype.inner(), param.ctype):
                    if struct.name not in seen:
                        seen.add(struct.name)
                        yield struct

    def declaration(self) -> str:
        """The C text of this struct alone."""
        lines = [f"// {self.doc}"] if self.doc else []
        lines.append(f"struct {self.name} {{")
        for param in self.params:
            extent = "" if param.count is None else f"[{param.count}]"
            comment = f"  // {param.doc}" if param.doc else ""
            lines.append(f"    {param.type_name} {param.name}{extent};{comment}")
        lines.append("};")
        return "\n".join(lines)

    def offset_asserts(self, constants: Mapping[str, int]) -> str:
        """C text that fails to compile where a compiler lays this struct, or one inside it,
        out differently; it follows the declarations."""
        lines = []
        for struct in (*self.inner(), self):
            layout = struct.layout(constants)
            lines.append(
                f'static_assert(sizeof({struct.name}) == {layout.nbytes}, "sizeof {struct.name}");'
            )
            for param in struct.params:
                offset = layout.param_offset(param.name)
                lines.append(
                    f"static_assert(__builtin_offsetof({struct.name}, {param.name}) == "
                    f'{offset}, "offset of {struct.name}.{param.name}");'
                )
        return "\n".join(lines) + "\n"

    def layout(self, constants: Mapping[str, int]) -> StructLayout:
        """Offsets of all fields, with array lengths looked up in ``constants``."""
        fields: dict[str, Field] = {}
        end, widest = 0, 1
        for param in self.params:
            count = self._count(param, constants)
            if isinstance(param.ctype, Struct):
                element = param.ctype.layout(constants)
                size, align = element.nbytes, element.align
                offset = -(-end // align) * align
                for index in range(count):
                    where = param.name if param.count is None else f"{param.name}[{index}]"
                    for path, field in element.fields.items():
                        fields[f"{where}.{path}"] = field.moved(offset + index * size)
            else:
                size = align = _size(param.ctype)
                offset = -(-end // align) * align
                length = None if param.count is None else count
                fields[param.name] = Field(param.ctype, offset, length)
            end = offset + count * size
            widest = max(widest, align)
        return StructLayout(self.name, fields, -(-end // widest) * widest, widest)

    def _count(self, param: Param, constants: Mapping[str, int]) -> int:
        if param.count is None:
            return 1
        if isinstance(param.count, int):
            return param.count
        try:
            count = constants[param.count]
        except KeyError:
            raise ContractError(
                f"struct {self.name}: the length of {param.name!r} is {param.count}, which is "
                f"no generated constant; there are {', '.join(sorted(constants))}"
            ) from None
        if count < 1:
            raise ContractError(f"struct {self.name}: {param.count} must be at least 1, is {count}")
        return int(count)


@dataclass(frozen=True)
class Field:
    """Where one field lies, and how its bytes are made.

    Attributes:
        ctype: The C type of one element.
        offset: Bytes from the start of the outermost struct.
        count: Elements, ``None`` for a field that is no array.
    """

    ctype: str
    offset: int
    count: int | None

    @property
    def letter(self) -> str:
        """The element as ``struct`` and ``memoryview.cast`` name it."""
        return _letter(self.ctype)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _size(self.ctype)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole field."""
        return self.itemsize * (1 if self.count is None else self.count)

    def moved(self, by: int) -> Field:
        """This field inside a struct that itself lies at ``by``."""
        return Field(self.ctype, self.offset + by, self.count)


@dataclass(frozen=True)
class StructLayout:
    """The bytes of a struct: dotted field path -> ``Field``.

    Attributes:
        name: The C name of the struct.
        fields: In order of offset; a field of an inner struct is named ``"comm.epoch"``.
        nbytes: ``sizeof``.
        align: ``alignof``.
    """

    name: str
    fields: Mapping[str, Field]
    nbytes: int
    align: int

    def param_offset(self, name: str) -> int:
        """Where a member of the struct itself begins: its own field, or the first one in it."""
        return min(
            field.offset
            for path, field in self.fields.items()
            if path == name or path.startswith((f"{name}.", f"{name}["))
        )


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """One kernel: where its text is, how it is entered, what it takes.

    Attributes:
        name: The name everywhere: spec, entry, test, PTX twin.
        source: The ``.cu`` file, relative to ``cuda/``.
        entry: The ``extern "C"`` function.
        params: Fields of its one parameter struct.
        doc: One line for ``kernels list``.
        threads: Threads a block; a number or the name of a generated constant.
        shared_bytes: Dynamic shared memory a block; a number or the name of a generated constant.
        min_arch: The oldest architecture it compiles for, as ``80`` for sm_80.
    """

    name: str
    source: str
    entry: str
    params: tuple[Param, ...]
    doc: str
    threads: int | str = "kNumThreads"
    shared_bytes: int | str = 0
    min_arch: int = 80

    @property
    def struct(self) -> Struct:
        """The parameter struct; ``BarrierParams`` for a kernel named ``barrier``."""
        camel = "".join(word.capitalize() for word in self.name.split("_"))
        return Struct(f"{camel}Params", self.params, f"What {self.entry}() is launched with.")

    def layout(self, constants: Mapping[str, int]) -> StructLayout:
        """The bytes of the parameter struct."""
        return self.struct.layout(constants)

    def param_offsets(self, constants: Mapping[str, int]) -> tuple[int, ...]:
        """Where each parameter of the function begins: there is one, the struct."""
        del constants
        return (0,)

    def num_threads(self, constants: Mapping[str, int]) -> int:
        """Threads a block."""
        return self._number("threads", self.threads, constants)

    def num_shared_bytes(self, constants: Mapping[str, int]) -> int:
        """Bytes of dynamic shared memory a block."""
        return self._number("shared_bytes", self.shared_bytes, constants)

    def _number(self, what: str, value: int | str, constants: Mapping[str, int]) -> int:
        if isinstance(value, int):
            return value
        if value not in constants:
            raise ContractError(
                f"kernel {self.name}: {what} is {value}, which is no generated constant; "
                f"there are {', '.join(sorted(constants))}"
            )
        return int(constants[value])


def _letter(ctype: str) -> str:
    base = ctype.removeprefix("const ").strip()
    if base.endswith("*") and base[:-1] in (*_BASE_TYPES, "void"):
        return "Q"
    if base not in _BASE_TYPES:
        raise ContractError(
            f"Param: unknown C type {ctype!r}; use one of {', '.join(_BASE_TYPES)}, or a pointer "
            "to one of them written 'u8*' or 'const u8*'"
        )
    return _BASE_TYPES[base]


def _size(ctype: str) -> int:
    return _struct.calcsize("=" + _letter(ctype))
