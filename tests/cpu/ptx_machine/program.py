"""From PTX to Python: one function a stretch of instructions.

Only the instructions that the barrier kernels use are known, the hand-written one's and NVRTC's; a
text with any other is refused.
"""

from __future__ import annotations

import re

__all__ = ["Program", "PtxError", "load_bytes", "store_bytes"]

BINARY = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>"}
UNSIGNED_ONLY = {"rem": "%", "div": "//"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
SPECIAL = {"%tid.x": "t.index", "%ctaid.x": "0", "%nctaid.x": "1"}
SPACES = {"param": "t.block.param", "shared": "t.block.shared"}
ORDERS = ("relaxed", "acquire", "release", "acq_rel")
SKIPPED = (".pragma", ".reg", ".shared")


class PtxError(Exception):
    """The text cannot be run, or does what no kernel of this package may do."""


def signed(value, bits):
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def load_bytes(memory, address, nbytes):
    if address % nbytes or not 0 <= address <= len(memory) - nbytes:
        raise PtxError(f"{nbytes} bytes at {address:#x} cannot be loaded")
    return int.from_bytes(memory[address : address + nbytes], "little")


def store_bytes(memory, address, nbytes, value):
    if address % nbytes or not 0 <= address <= len(memory) - nbytes:
        raise PtxError(f"{nbytes} bytes cannot be stored at {address:#x}")
    memory[address : address + nbytes] = (value & (1 << 8 * nbytes) - 1).to_bytes(nbytes, "little")


def _without_scope(scope):
    """The text of a scope of its own, its registers under names of their own."""
    names = re.findall(r"\.reg\s+\.\w+\s+(%\w+);", scope[1].replace("\t", " "))
    return re.sub(r"%\w+", lambda found: found[0] + "_inner" * (found[0] in names), scope[1])


class Program:
    """One entry, translated.

    Attributes:
        blocks: Functions of (thread, its registers, world); each leaves the next one in ``t.pc``.
        num_registers: Of a thread.
        num_shared: Bytes of its shared variables.
        params: Parameter -> offset in the packed parameters.
    """

    def __init__(self, text: str) -> None:
        text = re.sub(r"//[^\n]*|\.loc\s[^\n]*", "", text)
        entry = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)[^{]*\{", text)
        body = text[entry.end() : text.index("\n}", entry.end())]  # NVRTC adds debug sections
        body = re.sub(r"\{(\s*\.reg[^{}]*)\}", _without_scope, body)
        self.params: dict[str, int] = {}
        end = 0
        for each in entry[1].split(","):
            bits, name, count = re.search(r"\.[a-z](\d+)\s+(\w+)(?:\[(\d+)\])?\s*$", each).groups()
            size = int(bits) // 8
            aligned = re.search(r"\.align (\d+)", each)
            unit = int(aligned[1]) if aligned else size
            self.params[name] = -(-end // unit) * unit
            end = self.params[name] + size * int(count or 1)
        self.symbols = dict(self.params)
        self.num_shared = 0
        for bits, name, count in re.findall(r"\.shared[^;]*\.[a-z](\d+)\s+(\w+)\[(\d*)\];", text):
            self.symbols[name] = self.num_shared
            self.num_shared += -(-int(bits) // 8 * int(count or 0) // 16) * 16
        self.widths: dict[str, int] = {}
        for kind, names in re.findall(r"\.reg\s+\.(\w+)\s+([^;]+);", body):
            bits = 1 if kind == "pred" else int(kind[1:])
            for name in (part.strip() for part in names.split(",")):
                many = re.fullmatch(r"(%\w+)<(\d+)>", name)
                each = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
                self.widths |= dict.fromkeys(each, bits)
        self.index = {name: number for number, name in enumerate(self.widths)}
        self.num_registers = len(self.index)
        self._translate(body)

    def _translate(self, body):
        texts, lines, labels = [], [], {}
        for part in re.split(r"(?<=:)\s+|;", body):
            part = part.strip()
            label = part.endswith(":")
            if not part or part.startswith(SKIPPED) or (label and not lines):
                labels |= {part[:-1]: len(texts)} if label else {}
                continue
            follows = len(texts) + 1
            if label:
                labels[part[:-1]] = follows
                code, ends = f"t.pc = {follows}", True
            else:
                code, ends = self._instruction(part, follows)
            lines.append(code)
            if ends:
                texts.append(lines)
                lines = []
        names = {"signed": signed, "load_bytes": load_bytes, "store_bytes": store_bytes}
        self.blocks = []
        for number, lines in enumerate(texts):
            text = "\n ".join([f"def block_{number}(t, r, w):", *lines])
            text = re.sub(r"LABEL\(([^)]*)\)", lambda found: str(labels[found[1]]), text)
            exec(text, names)
            self.blocks.append(names[f"block_{number}"])

    def _instruction(self, text, follows):
        """Python for one instruction, and whether it ends a stretch."""
        guard, op, rest = re.fullmatch(r"(?:@(!?%\w+)\s+)?(\S+)\s*(.*)", text, re.DOTALL).groups()
        operands = [part.strip() for part in re.findall(r"\{[^}]*\}|[^,\s][^,{]*", rest)]
        code, ends = self._unguarded(op, operands)
        if ends and "t.pc" not in code and op != "ret":
            code = f"t.pc = {follows}; {code}"
        if guard:
            otherwise = f"\n else: t.pc = {follows}" if ends else ""
            code = f"if {self._predicate(guard)}: {code}{otherwise}"
        return code, ends

    def _unguarded(self, op, operands):
        name, *rest = op.split(".")
        if name == "bra":
            return f"t.pc = LABEL({operands[0]})", True
        if name == "ret":
            return "w.exit(t)", True
        if name in ("ld", "st") and set(rest) & set(SPACES):
            return self._local(name, rest, operands), False
        if name in ("ld", "st", "atom", "red"):
            return self._global(name, rest, operands), True
        if name == "fence":
            return f"w.release(t, {rest[-1]!r})", True
        if name == "bar":
            if rest[0] == "red":
                to, value = self.index[operands[0]], self._predicate(operands[-1])
                return f"w.arrive(t, -1, {value}, {to})", True
            return f"w.arrive(t, {'t.index // 32' if rest[0] == 'warp' else -1}, False, None)", True
        if operands[-1] == "%globaltimer":
            return self._set(operands[0], "w.read_clock()"), True
        return self._set(operands[0], self._expression(name, rest, operands[1:])), False

    def _local(self, name, rest, operands):
        """Parameters and shared memory."""
        memory = next(SPACES[each] for each in rest if each in SPACES)
        nbytes = int(rest[-1][1:]) // 8
        registers, address = operands if name == "ld" else operands[::-1]
        code = []
        for i, part in enumerate(registers.strip("{}").split(",")):
            where = f"{memory}, {self._address(address)} + {i * nbytes}, {nbytes}"
            if name == "st":
                code.append(f"store_bytes({where}, {self._value(part.strip())})")
            else:
                code.append(self._set(part.strip(), f"load_bytes({where})"))
        return "; ".join(code)

    def _global(self, name, rest, operands):
        order = next((each for each in rest if each in ORDERS), "weak")
        scope = next((each for each in rest if each in ("gpu", "sys")), "")
        how = f"{order!r}, {scope!r}, {int(rest[-1][1:]) // 8}"
        to = operands.pop(0) if name in ("ld", "atom") else None
        address, *values = operands
        call = f"w.{'load' if name == 'ld' else 'store' if name == 'st' else 'atomic'}"
        if call == "w.atomic":
            how += f", {next(each for each in rest if each in ('add', 'or', 'cas'))!r}"
        inside = ", ".join([f"t, {self._address(address)}, {how}", *map(self._value, values)])
        return self._set(to, f"{call}({inside})") if to else f"{call}({inside})"

    def _expression(self, name, rest, operands):
        kind = rest[-1]
        if kind == "pred":
            a, *b = map(self._predicate, operands)
            return {"mov": a, "not": f"not {a}"}.get(name) or f"({a}) {BINARY[name]} ({b[0]})"
        if name == "cvt":
            return self._value(operands[0], kind)
        if name == "selp":
            a, b = (self._value(each, kind) for each in operands[:2])
            return f"{a} if {self._predicate(operands[2])} else {b}"
        if name == "setp" and len(operands) == 3:
            more = self._predicate(operands.pop())
            return f"({self._expression(name, [rest[0], kind], operands)}) {rest[1]} ({more})"
        a, *more = (self._value(each, kind) for each in operands)
        if name == "setp":
            return f"{a} {COMPARE[rest[0]]} {more[0]}"
        if name == "mov":
            return a
        if name == "mad" and rest[0] != "hi":
            return f"{a} * {more[0]} + {more[1]}"
        if name == "mul":
            return f"{a} * {more[0]} >> {kind[1:] if rest[0] == 'hi' else 0}"
        if name == "bfi":
            ones = (1 << int(more[2])) - 1
            return f"{more[0]} & ~({ones} << {more[1]}) | ({a} & {ones}) << {more[1]}"
        known = BINARY if kind[0] == "s" else BINARY | UNSIGNED_ONLY
        if name not in known or len(more) != 1:
            raise PtxError(f"this machine has no {'.'.join([name, *rest])}")
        return f"{a} {known[name]} {more[0]}"

    def _predicate(self, text):
        if text.startswith("!"):
            return f"not {self._predicate(text[1:])}"
        return f"r[{self.index[text]}]" if text.startswith("%") else str(text != "0")

    def _value(self, text, kind="b64"):
        """An operand as an instruction of this type reads it."""
        bits = int(kind[1:])
        if text.startswith("%"):
            value = SPECIAL.get(text) or f"r[{self.index[text]}]"
        elif re.match(r"-?\d", text):
            value = str(int(text.rstrip("U"), 0) & (1 << bits) - 1)
        else:
            value = str(self.symbols[text])
        return f"signed({value}, {bits})" if kind[0] == "s" else value

    def _set(self, register, value):
        number, bits = self.index[register], self.widths[register]
        if bits == 1:
            return f"r[{number}] = bool({value})"
        return f"r[{number}] = ({value}) & {2**bits - 1}"

    def _address(self, text):
        base, offset = re.fullmatch(r"\[([^\]+]+)(?:\+(-?\d+))?\]", text).groups()
        return f"{self._value(base)} + {offset or 0}"
