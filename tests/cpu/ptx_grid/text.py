"""From PTX text to Python functions, one an instruction."""

from __future__ import annotations

import re

__all__ = ["Program", "PtxError"]

COMPARE = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
BINARY = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
    "rem": lambda a, b: a % b,
    "div": lambda a, b: a // b,
    "min": min,
    "max": max,
}
SPECIAL = {
    "%tid.x": lambda t: t.index,
    "%ntid.x": lambda t: t.block.num_threads,
    "%ctaid.x": lambda t: t.block.index,
    "%nctaid.x": lambda t: t.block.grid,
    "%smid": lambda t: t.block.sm.index,
    "%globaltimer": lambda t: t.world.read_clock(),
}
VISIBLE = ("ld", "st", "atom", "red", "bar", "fence", "mbarrier", "cp")
"""Instructions behind which the scheduler may turn to another thread."""
KNOWN = (*VISIBLE, "createpolicy")
"""Instructions with a method of their own."""


class PtxError(Exception):
    """The text cannot be run, or does what no kernel of this package may do."""


class Program:
    """One entry.

    Attributes:
        code: Functions of a thread; each may set ``t.pc``, and returns True where others may go on.
        params: Parameter → (offset in the packed parameters, bytes).
        shared: Shared variable → offset; ``extern`` is where dynamic shared memory begins.
    """

    def __init__(self, text):
        text = re.sub(r"//[^\n]*", "", text)
        entry = re.search(r"\.entry\s+\w+\s*\(([^)]*)\)[^{]*\{", text)
        head, body = text[: entry.start()], text[entry.end() : text.rindex("}")]
        self.params, end = {}, 0
        for each in entry[1].split(","):
            bits, name = re.search(r"\.[a-z](\d+)\s+(\w+)\s*$", each).groups()
            size = int(bits) // 8
            self.params[name] = -(-end // size) * size, size
            end = self.params[name][0] + size
        self.shared, end = {}, 0
        for bits, name, count in re.findall(r"\.shared[^;]*\.[a-z](\d+)\s+(\w+)\[(\d+)\];", body):
            self.shared[name] = end
            end += -(-int(bits) // 8 * int(count) // 128) * 128
        self.extern = end
        for name in re.findall(r"\.extern\s+\.shared[^;]*\s(\w+)\[\];", head):
            self.shared[name] = end
        self.widths = {}
        for kind, names in re.findall(r"\.reg\s+\.(\w+)\s+([^;]+);", body):
            bits = 1 if kind == "pred" else int(kind[1:])
            self.widths |= dict.fromkeys((name.strip() for name in names.split(",")), bits)
        self._read(re.sub(r"\.(reg|shared)\s[^;]*;", "", body))

    def _read(self, body):
        self.labels, self.tables, lines = {}, {}, []
        body = re.sub(
            r"(\w+):\s*\.branchtargets\s+([^;]+);",
            lambda found: self._table(found[1], found[2]),
            body,
        )
        for part in re.split(r"(?<=:)\s+|;", body):
            part = " ".join(part.split())
            if part.endswith(":"):
                self.labels[part[:-1]] = len(lines)
            elif part:
                lines.append(part)
        self.opcodes = [re.sub(r"^@\S+ ", "", line).split()[0] for line in lines]
        self.code = [self._compile(line, number + 1) for number, line in enumerate(lines)]

    def _table(self, name, targets):
        self.tables[name] = [target.strip() for target in targets.split(",")]
        return ""

    def _compile(self, line, follows):
        guard, op, rest = re.fullmatch(r"(?:@(!?%\w+) )?(\S+)(?: (.*))?", line).groups()
        operands = [
            each.strip() for each in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest or "")
        ]
        name, *parts = op.split(".")
        visible = name in VISIBLE and not {"param"} & set(parts)
        visible = visible or operands[-1:] == ["%globaltimer"]
        act = self._action(name, parts, operands)
        if guard is None:
            taken = None
        else:
            register, wanted = guard.lstrip("!"), not guard.startswith("!")
            taken = lambda t: t.r[register] == wanted  # noqa: E731

        def step(t):
            t.pc = follows
            if taken is None or taken(t):
                act(t)
                return visible
            return False

        return step

    # -------------------------------------------------------------------------- instructions

    def _action(self, name, parts, operands):
        if name == "bra":
            target = self.labels_of(operands[0])
            return lambda t: setattr(t, "pc", target())
        if name == "brx":
            index, table = self._value(operands[0], 32), self.tables[operands[1]]
            return lambda t: setattr(t, "pc", self.labels[table[index(t)]])
        if name in ("ret", "exit"):
            return lambda t: t.world.end(t)
        if name in ("ld", "st") and "param" in parts:
            return self._load_param(operands)
        special = getattr(self, f"_{name}", None) if name in KNOWN else None
        if special:
            return special(parts, operands)
        return self._arithmetic(name, parts, operands)

    def labels_of(self, name):
        return lambda: self.labels[name]

    def _load_param(self, operands):
        offset, size = self.params[operands[1].strip("[]")]
        put = self._put(operands[0])
        return lambda t: put(t, int.from_bytes(t.block.params[offset : offset + size], "little"))

    def _ld(self, parts, operands):
        nbytes, names = int(parts[-1][1:]) // 8, operands[0].strip("{}").split(",")
        puts, address = [self._put(name.strip()) for name in names], self._address(operands[1])
        self._check_vector(parts, names)
        if "shared" in parts:

            def load_shared(t):
                for i, put in enumerate(puts):
                    put(t, t.block.load_shared(address(t) + i * nbytes, nbytes))

            return load_shared
        how = ".".join(["ld", *[p for p in parts if p not in ("v2", "v4", parts[-1])]])

        def load(t):
            at, size = address(t), nbytes * len(puts)
            data = t.world.load(t, how, at, size)
            for i, put in enumerate(puts):
                put(t, int.from_bytes(data[i * nbytes : (i + 1) * nbytes], "little"))

        return load

    def _st(self, parts, operands):
        bits, names = int(parts[-1][1:]), operands[1].strip("{}").split(",")
        values, address = (
            [self._value(name.strip(), bits) for name in names],
            self._address(operands[0]),
        )
        self._check_vector(parts, names)
        store = "store_shared" if "shared" in parts else "store"

        def act(t):
            data = b"".join(value(t).to_bytes(bits // 8, "little") for value in values)
            where = t.block if store == "store_shared" else t.world
            where_args = (address(t), data) if store == "store_shared" else (t, address(t), data)
            getattr(where, store)(*where_args)

        return act

    def _check_vector(self, parts, names):
        count = next((int(part[1:]) for part in parts if part in ("v2", "v4")), 1)
        if count != len(names):
            raise PtxError(f"{parts}: {len(names)} registers")

    def _atom(self, parts, operands):
        bits, put = int(parts[-1][1:]), self._put(operands[0])
        address = self._address(operands[1])
        values = [self._value(each, bits) for each in operands[2:]]
        kind = next(part for part in parts if part in ("cas", "add"))
        return lambda t: put(
            t, t.world.atomic(t, kind, address(t), bits // 8, [value(t) for value in values])
        )

    def _red(self, parts, operands):
        bits, address = int(parts[-1][1:]), self._address(operands[0])
        value = self._value(operands[1], bits)
        kind = next(part for part in parts if part in ("add", "max", "or"))
        return lambda t: t.world.atomic(t, kind, address(t), bits // 8, [value(t)])

    def _fence(self, parts, operands):
        if parts[0] in ("mbarrier_init", "proxy"):
            return lambda t: None
        if parts[0] != "acq_rel":
            raise PtxError(f"no fence.{'.'.join(parts)} here")
        return lambda t: t.block.sm.l1.clear()

    def _bar(self, parts, operands):
        if parts[0] == "warp":
            return lambda t: t.block.arrive(t, t.index // 32)
        if parts[0] == "red":
            put, value = self._put(operands[0]), operands[-1]
            return lambda t: t.block.arrive(t, -1, t.r[value], put)
        return lambda t: t.block.arrive(t, -1)

    def _mbarrier(self, parts, operands):
        address = self._address(operands[-2])
        value = self._value(operands[-1], 32)
        if parts[0] == "init":
            return lambda t: t.block.init_mbarrier(address(t), value(t))
        if parts[0] == "arrive":
            return lambda t: t.block.mbarriers[address(t)].arrive(value(t))
        put = self._put(operands[0])
        return lambda t: put(t, t.block.mbarriers[address(t)].passed(value(t)))

    def _cp(self, parts, operands):
        if "commit_group" in parts:
            return lambda t: t.commit_group()
        if "wait_group" in parts:
            most = int(operands[0])
            return lambda t: t.wait_group(most, read="read" in parts)
        to, source = self._address(operands[0]), self._address(operands[1])
        size = self._value(operands[2], 32)
        hint = self._value(operands[-1], 64) if "L2::cache_hint" in parts else (lambda t: 0)
        if "mbarrier::complete_tx::bytes" in parts:
            bar = self._address(operands[3])
            return lambda t: t.start_load(to(t), source(t), size(t), bar(t), hint(t))
        return lambda t: t.start_store(to(t), source(t), size(t), hint(t))

    def _createpolicy(self, parts, operands):
        put, hint = self._put(operands[0]), {"L2::evict_first": 1, "L2::evict_normal": 2}[parts[1]]
        return lambda t: put(t, hint)

    def _arithmetic(self, name, parts, operands):
        kind, put = parts[-1], self._put(operands[0])
        if kind == "pred":
            values = [self._predicate(each) for each in operands[1:]]
            if name == "mov":
                return lambda t: put(t, values[0](t))
            return lambda t: put(t, bool(BINARY[name](values[0](t), values[1](t))))
        bits = int(kind[1:])
        if name == "setp":
            return self._comparison(parts, operands, put, bits)
        if name == "selp":
            yes, no = (self._value(each, bits) for each in operands[1:3])
            condition = self._predicate(operands[3])
            return lambda t: put(t, yes(t) if condition(t) else no(t))
        values = [self._value(each, bits) for each in operands[1:]]
        if name in ("mov", "cvt"):
            return lambda t: put(t, values[0](t))
        if name == "mul" and parts[0] in ("wide", "lo"):
            return lambda t: put(t, values[0](t) * values[1](t))
        if name == "mad" and parts[0] == "lo":
            return lambda t: put(t, values[0](t) * values[1](t) + values[2](t))
        if name not in BINARY or len(values) != 2:
            raise PtxError(f"this machine has no {'.'.join([name, *parts])}")
        act = BINARY[name]
        return lambda t: put(t, act(values[0](t), values[1](t)))

    def _comparison(self, parts, operands, put, bits):
        compare = COMPARE[parts[0]]
        a, b = (self._value(each, bits) for each in operands[1:3])
        if len(operands) == 3:
            return lambda t: put(t, compare(a(t), b(t)))
        more = self._predicate(operands[3])
        if parts[1] != "and":
            raise PtxError(f"no setp.{'.'.join(parts)} here")
        return lambda t: put(t, compare(a(t), b(t)) and more(t))

    # ------------------------------------------------------------------------------ operands

    def _predicate(self, text):
        if text.startswith("!"):
            return lambda t: not t.r[text[1:]]
        if text.startswith("%"):
            return lambda t: t.r[text]
        return lambda t: text != "0"

    def _value(self, text, bits):
        mask = (1 << bits) - 1
        if text in SPECIAL:
            return SPECIAL[text]
        if text.startswith("%"):
            if text not in self.widths:
                raise PtxError(f"register {text} is not declared")
            return lambda t: t.r[text] & mask
        if text in self.shared:
            return lambda t: self.shared[text]
        number = int(float(text)) if "." in text else int(text, 0)
        return lambda t: number & mask

    def _put(self, register):
        if register == "_":
            return lambda t, value: None
        bits = self.widths[register]
        if bits == 1:
            return lambda t, value: t.r.__setitem__(register, bool(value))
        return lambda t, value: t.r.__setitem__(register, value & (1 << bits) - 1)

    def _address(self, text):
        base, offset = re.fullmatch(r"\[([^\]+]+)(?:\+(-?\d+))?\]", text).groups()
        value, more = self._value(base.strip(), 64), int(offset or 0)
        return lambda t: value(t) + more
