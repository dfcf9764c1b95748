"""Hand-written PTX as one more kernel of the simulator: its text becomes C++ that calls the engine.

Registers become locals, labels stay labels, and each access, fence, barrier and bulk copy becomes
one call of ``engine/device.h`` that carries its line of PTX. Loops that look at the clock pause as
the compiled kernels do, so that a thread that polls in vain lets time pass. Only the instructions
that the modules of ``ptx/`` use are known; a text with any other is refused.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepep_cupy.engines.gpu.ptx_modules import get_module
from simulator.build import build_ptx

__all__ = ["PtxError", "PtxKernel", "params_of", "ptx_kernel", "text_of"]

_INFIX = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^", "rem": "%", "div": "/"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_SPECIAL = {
    "%tid.x": "sim::thread_index()",
    "%ntid.x": "sim::num_threads()",
    "%ctaid.x": "sim::block_index()",
    "%nctaid.x": "sim::num_blocks()",
    "%smid": "sim::sm_index()",
    "%globaltimer": "sim::global_timer(SIM_HERE)",
}
_ORDERS = ("relaxed", "acquire", "release", "acq_rel")
_HINTS = {"L2::evict_first": 1, "L2::evict_normal": 2}

_PRELUDE = """#include "engine/device.h"
using sim::u32;
using sim::u64;
extern "C" { u32 ptx_hints[2][3]; }  // bulk loads, bulk stores: none, evict_first, evict_normal
static u32 word_of(const u32* words, int i) { return words[i]; }
template <class T> static T param_at(const void* params, u64 offset) {
    T value;
    __builtin_memcpy(&value, static_cast<const char*>(params) + offset, sizeof value);
    return value;
}
static void* at(u64 address) { return reinterpret_cast<void*>(address); }
static void* in_shared(u64 offset) { return static_cast<char*>(sim::shared_base()) + offset; }
"""


class PtxError(Exception):
    """The text has something that this translator does not know."""


@dataclass(frozen=True)
class PtxKernel:
    """An entry, compiled for the simulator.

    Attributes:
        library: What the engine loads.
        params: Parameter -> offset in the packed parameters.
        num_shared: Bytes of its static shared variables; dynamic shared memory begins behind them.
    """

    library: Path
    params: Mapping[str, int]
    num_shared: int

    def hints(self) -> list[list[int]]:
        """How many bulk loads and bulk stores had no hint, evict_first and evict_normal, ever."""
        counts = (ctypes.c_uint32 * 6).in_dll(ctypes.CDLL(str(self.library)), "ptx_hints")
        return [list(counts[:3]), list(counts[3:])]


@functools.cache
def text_of(module: str) -> str:
    """The text of a module of ``ptx/``."""
    return get_module(module).path.read_text(encoding="utf-8")


@functools.lru_cache(maxsize=64)
def ptx_kernel(module: str, text: str | None = None) -> PtxKernel:
    """The first entry of a module, with its own text or with another one in its place."""
    found = _Translation(text_of(module) if text is None else text, get_module(module).path.name)
    return PtxKernel(build_ptx(found.cpp), found.params, found.num_shared)


def params_of(text: str) -> dict[str, int]:
    """Parameter -> offset, as the text's first entry declares them."""
    return _Translation(text, "text.ptx").params


class _Translation:
    """One entry on its way from PTX to C++."""

    def __init__(self, text: str, name: str) -> None:
        text = re.sub(r"//[^\n]*", "", text)
        entry = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)[^{]*\{", text)
        if entry is None:
            raise PtxError(f"{name} has no entry")
        self._head = text[: entry.start()]
        self._body = text[entry.end() : text.rindex("}")]
        first_line = text.count("\n", 0, entry.end()) + 1
        self.params = _lay_out_params(entry[1])
        self._symbols = dict(self.params)
        self.num_shared = self._lay_out_shared()
        self._bits = self._read_registers()
        lines = self._translate(first_line, name)
        self.cpp = "\n".join([_PRELUDE, *lines, ""])

    # ----------------------------------------------------------------------------- declarations

    def _lay_out_shared(self) -> int:
        end = 0
        pattern = r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.[a-z](\d+)\s+(\w+)\[(\d+)\];"
        for align, bits, name, count in re.findall(pattern, self._body):
            unit = max(int(align or 1), int(bits) // 8)
            self._symbols[name] = -(-end // unit) * unit
            end = self._symbols[name] + int(bits) // 8 * int(count)
        end = -(-end // 128) * 128
        for name in re.findall(r"\.extern\s+\.shared[^;]*\s(\w+)\[\];", self._head):
            self._symbols[name] = end
        return end

    def _read_registers(self) -> dict[str, int]:
        bits: dict[str, int] = {}
        for kind, names in re.findall(r"\.reg\s+\.(\w+)\s+([^;]+);", self._body):
            width = 1 if kind == "pred" else int(kind[1:])
            bits |= dict.fromkeys((name.strip() for name in names.split(",")), width)
        return bits

    # ------------------------------------------------------------------------------ the function

    def _translate(self, line: int, name: str) -> list[str]:
        types = {1: "bool", 32: "u32", 64: "u64"}
        rubbish = {1: "true", 32: "0x5a5a5a5au", 64: "0x5a5a5a5a5a5a5a5aull"}
        code = ['extern "C" void sim_enter(const void* params) {']
        for register, bits in self._bits.items():
            code.append(f"    {types[bits]} {register[1:]} = {rubbish[bits]};")
        parts = self._split(line)
        self._tables = {
            found[1]: [target.strip() for target in found[2].split(",")]
            for _, part in parts
            if (found := re.fullmatch(r"(\w+): ?\.branchtargets (.*)", part))
        }
        self._labels = {p[:-1]: i for i, (_, p) in enumerate(parts) if p.endswith(":")}
        self._parts = [part for _, part in parts]
        for number, (at_line, part) in enumerate(parts):
            if part.startswith((".reg", ".shared")) or ".branchtargets" in part:
                continue
            code.append(f'#line {at_line} "ptx/{name}"')
            if part.endswith(":"):
                code.append(f"{part[:-1]}:;")
                continue
            code.append(self._guarded(part, number))
        return [*code, "}"]

    def _split(self, line: int) -> list[tuple[int, str]]:
        """Instructions, labels and directives, each with its line."""
        found = []
        pattern = r"\s*(\w+:\s*\.branchtargets[^;]*;|\w+:(?=\s)|[^\s;][^;]*;)"
        for match in re.finditer(pattern, self._body):
            text = " ".join(match[1].rstrip(";").split())
            found.append((line + self._body.count("\n", 0, match.start(1)), text))
        return found

    def _polls_again(self, number: int, label: str) -> bool:
        """Whether a jump ends a turn that looked at the clock and changed nothing for others."""
        loop = [re.sub(r"^@\S+ ", "", part) for part in self._parts[self._labels[label] : number]]
        acts = any(part.startswith(("st.", "bar.", "cp.")) for part in loop)
        return any("%globaltimer" in part for part in loop) and not acts

    def _guarded(self, part: str, number: int) -> str:
        found = re.fullmatch(r"(?:@(!?)%(\w+) )?(\S+)(?: (.*))?", part)
        if found is None:
            raise PtxError(f"this is no instruction: {part}")
        negated, guard, op, rest = found.groups()
        operands = [
            each.strip() for each in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest or "")
        ]
        name, *more = op.split(".")
        if name == "bra":
            pause = "sim::poll_pause(SIM_HERE); " if self._polls_again(number, operands[0]) else ""
            code = f"{{ {pause}goto {operands[0]}; }}"
        elif name == "brx":
            cases = (f"case {i}: goto {t};" for i, t in enumerate(self._tables[operands[1]]))
            code = f"switch ({self._value(operands[0], 32)}) {{ {' '.join(cases)} }}"
        elif name in ("ret", "exit"):
            code = "return;"
        else:
            method = getattr(self, f"_{name}", None)
            code = method(more, operands) if method else self._arithmetic(name, more, operands)
        return f"    if ({negated}{guard}) {code}" if guard else f"    {code}"

    # ------------------------------------------------------------------------------- memory

    def _ld(self, parts: list[str], operands: list[str]) -> str:
        registers, address = _names(operands[0]), self._address(operands[1])
        nbytes = int(parts[-1][1:]) // 8
        if "param" in parts:
            return self._set(operands[0], f"param_at<{_type(8 * nbytes)}>(params, {address})")
        total = nbytes * _vector(parts, registers)
        if "shared" in parts:
            read = f"sim::shared_load(words, in_shared({address}), {total}, SIM_HERE);"
        else:
            order, scope = _order(parts)
            how = f"{order}, {scope}, {_cache(parts)}, SIM_HERE"
            read = f"sim::load16(words, at({address}), {how});"
            if total < 16:
                read = f"u64 word = sim::load(at({address}), {total}, {how}); "
                read += "__builtin_memcpy(words, &word, 8);"
        values = [f"word_of(words, {i})" for i in range(len(registers))]
        if nbytes == 8:
            values = ["(word_of(words, 0) | u64{word_of(words, 1)} << 32)"]
        sets = " ".join(self._set(to, value) for to, value in zip(registers, values, strict=True))
        return f"{{ u32 words[4] = {{}}; {read} {sets} }}"

    def _st(self, parts: list[str], operands: list[str]) -> str:
        address, values = self._address(operands[0]), _names(operands[1])
        bits = int(parts[-1][1:])
        total = bits // 8 * _vector(parts, values)
        words = ", ".join(self._value(value, bits) for value in values)
        if "shared" in parts:
            where = f"in_shared({address}), words, {total}, SIM_HERE"
            return f"{{ {_type(bits)} words[] = {{{words}}}; sim::shared_store({where}); }}"
        if total == 16:
            return f"{{ u32 words[] = {{{words}}}; sim::store16(at({address}), words, SIM_HERE); }}"
        value = f"(u64{{{self._value(values[0], bits)}}}"
        if len(values) == 2:
            value += f" | u64{{{self._value(values[1], bits)}}} << 32"
        order, scope = _order(parts)
        return f"sim::store(at({address}), {total}, {value}), {order}, {scope}, SIM_HERE);"

    def _atom(self, parts: list[str], operands: list[str]) -> str:
        return self._set(operands[0], self._rmw(parts, operands[1:], returns=True))

    def _red(self, parts: list[str], operands: list[str]) -> str:
        return self._rmw(parts, operands, returns=False) + ";"

    def _rmw(self, parts: list[str], operands: list[str], *, returns: bool) -> str:
        bits = int(parts[-1][1:])
        values = [self._value(each, bits) for each in operands[1:]]
        kinds = {"add": "add", "or": "bit_or", "max": "max", "cas": "cas"}
        kind = next(kinds[part] for part in parts if part in kinds)
        what = f"{values[1]}, {values[0]}" if kind == "cas" else f"{values[0]}, 0"
        order, scope = _order(parts)
        return (
            f"sim::read_modify_write(at({self._address(operands[0])}), {bits // 8}, "
            f"sim::Rmw::{kind}, {what}, {order}, {scope}, {str(returns).lower()}, SIM_HERE)"
        )

    def _fence(self, parts: list[str], operands: list[str]) -> str:
        known = {
            "acq_rel.sys": "fence(sim::Scope::sys, SIM_HERE)",
            "acq_rel.gpu": "fence(sim::Scope::gpu, SIM_HERE)",
            "mbarrier_init.release.cluster": "fence_mbarrier_init(SIM_HERE)",
            "proxy.async.global": "fence_proxy_global(SIM_HERE)",
            "proxy.async.shared::cta": "fence_proxy_shared(SIM_HERE)",
        }
        if ".".join(parts) not in known:
            raise PtxError(f"no fence.{'.'.join(parts)} here")
        return f"sim::{known['.'.join(parts)]};"

    # ----------------------------------------------------------------- barriers and bulk copies

    def _bar(self, parts: list[str], operands: list[str]) -> str:
        if parts[0] == "warp":
            return "sim::warp_meet(sim::WarpOp::barrier, 0, 0, SIM_HERE);"
        if parts[0] == "red":
            value = self._predicate(operands[-1])
            return self._set(operands[0], f"sim::block_barrier({value}, SIM_HERE)")
        return "sim::block_barrier(false, SIM_HERE);"

    def _mbarrier(self, parts: list[str], operands: list[str]) -> str:
        barrier = f"in_shared({self._address(operands[-2])})"
        value = self._value(operands[-1], 32)
        if parts[0] == "try_wait":
            wait = f"sim::mbarrier_try_wait({barrier}, {value}, SIM_HERE)"
            return self._set(operands[0], wait)
        act = {"init": "init", "arrive": "arrive_expect"}[parts[0]]
        return f"sim::mbarrier_{act}({barrier}, {value}, SIM_HERE);"

    def _cp(self, parts: list[str], operands: list[str]) -> str:
        if "commit_group" in parts:
            return "sim::bulk_commit(SIM_HERE);"
        if "wait_group" in parts:
            return f"sim::bulk_wait({operands[0]}, {str('read' in parts).lower()}, SIM_HERE);"
        to, source = self._address(operands[0]), self._address(operands[1])
        size = self._value(operands[2], 32)
        hint = self._value(operands[-1], 64) if "L2::cache_hint" in parts else "0"
        if "mbarrier::complete_tx::bytes" in parts:
            bar = f"in_shared({self._address(operands[3])})"
            copy = f"sim::bulk_load(in_shared({to}), at({source}), {size}, {bar}, SIM_HERE)"
            return f"{{ ++ptx_hints[0][{hint}]; {copy}; }}"
        copy = f"sim::bulk_store(at({to}), in_shared({source}), {size}, SIM_HERE)"
        return f"{{ ++ptx_hints[1][{hint}]; {copy}; }}"

    def _createpolicy(self, parts: list[str], operands: list[str]) -> str:
        return self._set(operands[0], str(_HINTS[parts[1]]))

    # --------------------------------------------------------------------------------- arithmetic

    def _arithmetic(self, name: str, parts: list[str], operands: list[str]) -> str:
        kind, to, given = parts[-1], operands[0], operands[1:]
        if kind == "pred":
            a, *b = map(self._predicate, given)
            return self._set(to, a if name == "mov" else f"{a} {_INFIX[name]} {b[0]}")
        bits = int(kind[1:])
        if name == "setp":
            a, b = (self._value(each, bits) for each in given[:2])
            test = f"{a} {_COMPARE[parts[0]]} {b}"
            if len(given) == 3:
                joined = {"and": "&", "or": "|"}[parts[1]]
                test = f"({test}) {joined} {self._predicate(given[2])}"
            return self._set(to, test)
        if name == "selp":
            a, b = (self._value(each, bits) for each in given[:2])
            return self._set(to, f"{self._predicate(given[2])} ? {a} : {b}")
        a, *more = (self._value(each, bits) for each in given)
        if name in ("mov", "cvt"):
            value = a
        elif name == "mul" and parts[0] in ("wide", "lo"):
            value = f"u64{{{a}}} * {more[0]}" if parts[0] == "wide" else f"{a} * {more[0]}"
        elif name == "mad" and parts[0] == "lo":
            value = f"{a} * {more[0]} + {more[1]}"
        elif name in ("min", "max"):
            value = f"{a} {'<' if name == 'min' else '>'} {more[0]} ? {a} : {more[0]}"
        elif name in ("shl", "shr"):
            by = self._value(given[1], 32)
            sign = "<<" if name == "shl" else ">>"
            value = f"{by} < {bits} ? {a} {sign} ({by} & {bits - 1}) : 0"
        elif name in _INFIX and len(more) == 1 and kind[0] in "ub":
            value = f"{a} {_INFIX[name]} {more[0]}"
        else:
            raise PtxError(f"this translator has no {'.'.join([name, *parts])}")
        return self._set(to, f"static_cast<{_type(bits if parts[0] != 'wide' else 64)}>({value})")

    # ----------------------------------------------------------------------------------- operands

    def _predicate(self, text: str) -> str:
        if text.startswith("!"):
            return f"!{self._predicate(text[1:])}"
        return self._register(text) if text.startswith("%") else str(text != "0").lower()

    def _value(self, text: str, bits: int) -> str:
        if text in _SPECIAL:
            return _SPECIAL[text]
        if text.startswith("%"):
            return f"static_cast<{_type(bits)}>({self._register(text)})"
        if text in self._symbols:
            return f"{_type(bits)}{{{self._symbols[text]}}}"
        return f"{_type(bits)}{{{int(text, 0) & (1 << bits) - 1}u{'ll' * (bits == 64)}}}"

    def _register(self, text: str) -> str:
        if text not in self._bits:
            raise PtxError(f"register {text} is not declared")
        return text[1:]

    def _set(self, register: str, value: str) -> str:
        if register == "_":
            return f"{value};"
        return f"{self._register(register)} = {value};"

    def _address(self, text: str) -> str:
        found = re.fullmatch(r"\[([^\]+]+)(?:\+(\d+))?\]", text)
        if found is None:
            raise PtxError(f"this is no address: {text}")
        return f"{self._value(found[1].strip(), 64)} + {found[2] or 0}"


def _lay_out_params(text: str) -> dict[str, int]:
    params: dict[str, int] = {}
    end = 0
    for each in text.split(","):
        found = re.search(r"\.[a-z](\d+)\s+(\w+)(?:\[(\d+)\])?\s*$", each)
        if found is None:
            raise PtxError(f"this is no parameter: {each.strip()}")
        size = int(found[1]) // 8
        params[found[2]] = -(-end // size) * size
        end = params[found[2]] + size * int(found[3] or 1)
    return params


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.strip("{}").split(",")]


def _vector(parts: list[str], names: list[str]) -> int:
    """Elements of an access, which must have as many registers."""
    count = next((int(part[1:]) for part in parts if part in ("v2", "v4")), 1)
    if count != len(names) or (count > 1 and parts[-1] not in ("u32", "b32")):
        raise PtxError(f"{'.'.join(parts)} of {len(names)} registers")
    return count


def _type(bits: int) -> str:
    return {32: "u32", 64: "u64"}[bits]


def _order(parts: list[str]) -> tuple[str, str]:
    if "volatile" in parts:
        return "sim::Order::relaxed", "sim::Scope::sys"
    order = next((part for part in parts if part in _ORDERS), "weak")
    scope = next((part for part in parts if part in ("gpu", "sys")), "none")
    return f"sim::Order::{order}", f"sim::Scope::{scope}"


def _cache(parts: list[str]) -> str:
    """What a load does in L1; evict_last keeps lines as an ordinary load does."""
    if "L1::no_allocate" in parts:
        return f"sim::Cache::{'read_only' if 'nc' in parts else 'no_allocate'}"
    return f"sim::Cache::{'no_allocate' if 'cg' in parts else 'allocate'}"
