"""One seed, one story: which Buffer, which calls, what goes wrong, and whether all ended well."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from deepep_cupy.protocol.headers import Refusal, RefusalCode
from simulator import calls
from simulator.calls import Array, Handle, Routing, Ways
from simulator.casts import HIDDEN, random_cast
from simulator.dispatches import PLAIN, Mode, call_dispatch, random_mode, rows_received
from simulator.machine import with_lines
from simulator.shapes import Edit, Shape
from simulator.world import FAILED, OK, POISONED, REFUSED, STOPPED, Setting, World, harmful

SHAPES = (
    Shape(1, 32, "nc"),
    Shape(2, 64, "coherent"),
    Shape(2, 64, "nc"),
    Shape(3, 64, "coherent"),
    Shape(4, 32, "nc"),
)
EPOCHS = (1, 1, 2, 2**31 - 2, 2**31 - 1, 2**32 - 4, 2**32 - 3)
LATER_CALLS = ("barrier", "dispatch", "mask", "cached", "combine", "combine")
FATAL = ("freeze", "skew", "abort", "absent")
"""Troubles after which operations fail and the Buffer is poisoned."""


@dataclass(frozen=True)
class Focus:
    """What is fixed of a story; ``None`` leaves it to the seed.

    Attributes:
        shapes: Which shapes may be drawn.
        calls: Names of the calls, in order: barrier, dispatch, mask, cached, combine.
        bulk: The path.
        trouble: ``""`` for none, or freeze, skew, absent, abort, refuse, bad_expert, differ.
        epochs: Where counting may begin.
        row_bytes: Sizes of dispatched rows.
        tokens: Tokens of each rank are at least this many.
        mode: ``"plain"``: nothing but rows; ``"no wait"``: hosts never wait; ``"full"``: neither,
            and some rank has too little room in the first dispatch; None: anything.
        cast: True: dispatched rows are cast on their way; None: some, unless ``mode`` is "plain".
        hidden: Channels of rows that are cast.
        blocks: Sizes of grids.
        most_tokens: Tokens of each rank are at most this many.
        empty: Ranks that have no tokens, as a part of all.
        experts: Experts of each rank.
        topk: K.
        edits: Planted faults, by kernel.
    """

    shapes: tuple[Shape, ...] = SHAPES
    calls: tuple[str, ...] | None = None
    bulk: bool | None = None
    trouble: str | None = None
    epochs: tuple[int, ...] = EPOCHS
    row_bytes: tuple[int, ...] | None = None
    tokens: int = 0
    mode: str | None = None
    cast: bool | None = None
    hidden: tuple[int, ...] = HIDDEN
    blocks: tuple[int, ...] = (1, 2, 3)
    most_tokens: int = 8
    empty: float = 0.0
    experts: tuple[int, ...] = (1, 2, 3, 3, 12)
    topk: tuple[int, ...] | None = None
    edits: Mapping[str, Edit] = field(default_factory=dict, hash=False)

    def to_json(self) -> str:
        """What differs from ``Focus()``, planted faults left out; see ``from_json``."""
        plain = vars(Focus())
        values = {k: v for k, v in vars(self).items() if v != plain[k] and k != "edits"}
        if "shapes" in values:
            values["shapes"] = [list(vars(shape).values()) for shape in self.shapes]
        return json.dumps(values) if values else ""

    @staticmethod
    def from_json(text: str) -> Focus:
        """The focus that ``to_json`` described."""
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()}
        if "shapes" in values:
            values["shapes"] = tuple(Shape(*fields) for fields in values["shapes"])
        return Focus(**values)


@dataclass
class Verdict:
    """How a story ended.

    Attributes:
        problems: What was wrong, in sentences; empty if nothing was.
        tale: What the story was.
        steps: Wrapper calls.
    """

    problems: list[str]
    tale: str
    steps: int


class Story:
    """The calls of one seed."""

    def __init__(self, seed: int, focus: Focus) -> None:
        self.seed, self.focus = seed, focus
        self.rng = rng = np.random.default_rng(seed)
        self.cast_rng = np.random.default_rng([seed, 1])
        shape = self.pick(focus.shapes)
        ranks = shape.num_ranks
        self.trouble = focus.trouble if focus.trouble is not None else self._draw_trouble(ranks)
        odd = focus.row_bytes is None and rng.random() < 0.15
        self.sizes = focus.row_bytes or ((6, 10, 21) if odd else (16, 48, 80, 272, 384, 20))
        setting = Setting(
            shape=shape,
            num_experts=ranks * int(self.pick(focus.experts)),
            max_tokens=focus.most_tokens,
            first_epoch=int(self.pick(focus.epochs)),
            byte_wise=any(size % 4 for size in self.sizes),
            edits=focus.edits,
            quarantine=self.trouble in FATAL,
        )
        self.world = World(seed, setting, max(focus.blocks))
        self.handles: list[Handle] = []
        self.refused: list[Handle] = []
        self.expected: dict[int, str] = {}
        self.absent: set[int] = set()
        self.tale = [
            f"R={ranks} threads={shape.num_threads} loads={shape.loads} "
            f"epoch={setting.first_epoch} trouble={self.trouble or 'none'}"
        ]

    def pick(self, values: Any) -> Any:
        """One of several."""
        return values[int(self.rng.integers(len(values)))]

    def _draw_trouble(self, ranks: int) -> str:
        if self.rng.random() < 0.6:
            return ""
        kinds = ["skew", "abort", "refuse", "bad_expert"]
        if ranks > 1:
            kinds += ["freeze", "absent", "differ"]
        return str(self.pick(kinds))

    # ------------------------------------------------------------------------------ calls

    def tell(self) -> None:
        """Append all calls to the ranks' streams."""
        names = self.focus.calls or self._draw_calls()
        when = int(self.rng.integers(len(names)))
        for number, name in enumerate(names):
            troubled = number == when
            if troubled and self.trouble == "absent":
                self.absent.add(int(self.rng.integers(self.world.num_ranks)))
            self._call(name, troubled)
        self._disturb()

    def _draw_calls(self) -> tuple[str, ...]:
        names = ["dispatch"]
        for _ in range(int(self.rng.integers(1, 4))):
            names.append(str(self.pick(LATER_CALLS)))
        return tuple(names)

    def _ways(self, name: str, troubled: bool) -> Ways:
        ranks = self.world.num_ranks
        bulk = self.rng.random() < 0.5 if self.focus.bulk is None else self.focus.bulk
        refusals = {}
        if troubled and self.trouble == "refuse":
            rank = int(self.rng.integers(ranks))
            refusals[rank] = Refusal(RefusalCode.ARGUMENT, 7)
            self.expected[len(self.world.calls) + 1] = REFUSED
        grids = [int(self.pick(self.focus.blocks)) for _ in range(ranks)]
        present = [rank for rank in range(ranks) if rank not in self.absent]
        return Ways(bool(bulk), grids, present, refusals, self.rng)

    def _call(self, name: str, troubled: bool) -> None:
        ways = self._ways(name, troubled)
        differ = troubled and self.trouble == "differ" and name != "barrier"
        if differ:
            self.expected[len(self.world.calls) + 1] = REFUSED
        if name == "barrier":
            calls.call_barrier(self.world, ways)
        elif name in ("dispatch", "mask") or not (self.handles or self.refused):
            self._dispatch(ways, name == "mask", troubled, differ)
        elif name == "cached":
            self._cached(ways, differ)
        else:
            self._combine(ways, differ)
        call = self.world.calls[-1]
        self.tale.append(f"{call.serial}: {call.name} grids={list(ways.grids)} bulk={ways.bulk}")

    def _tokens(self) -> list[int]:
        least = self.focus.tokens
        most = self.world.setting.max_tokens
        tokens = [int(self.rng.integers(least, most + 1)) for _ in range(self.world.num_ranks)]
        if self.focus.empty:
            tokens = [0 if self.rng.random() < self.focus.empty else t for t in tokens]
        return tokens

    def _dispatch(self, ways: Ways, use_mask: bool, troubled: bool, differ: bool) -> None:
        tokens = self._tokens()
        size = int(self.pick(self.sizes))
        bad = troubled and self.trouble == "bad_expert" and not use_mask
        if bad:
            tokens = [max(1, t) for t in tokens]
        routing = calls.random_routing(self.rng, self.world, tokens, use_mask, self.focus.topk)
        if bad and routing.topk_idx is not None:
            rank = int(self.rng.integers(len(tokens)))
            token = int(self.rng.integers(tokens[rank]))
            routing.topk_idx[rank][token, 0] = self.pick([-2, self.world.setting.num_experts])
            self.expected[len(self.world.calls) + 1] = REFUSED
        xs = [calls.random_rows(self.rng, t, size) for t in tokens]
        if differ:
            xs[0] = calls.random_rows(self.rng, tokens[0], size + 16 if size < 384 else size - 16)
        mode = self._mode(xs, routing, bad=bad or differ or bool(ways.refusals))
        if not differ:
            xs, mode = self._cast(xs, mode)
        call, handle = call_dispatch(self.world, ways, xs, routing, mode=mode)
        call.name += f" ({mode})" if str(mode) else ""
        if handle is None or len(ways.present) < self.world.num_ranks:
            return
        if self._all_well(call.serial, ways):
            self.handles.append(handle)
        elif mode.worst is not None and not (bad or differ or ways.refusals):
            self.refused.append(handle)

    def _mode(self, xs: list[Array], routing: Routing, *, bad: bool) -> Mode:
        """How to dispatch; now and then some rank has too little room, and nobody knows."""
        most = self.world.num_ranks * self.world.setting.max_tokens
        mode = random_mode(self.rng, xs, routing, most, False)
        if self.focus.mode == "plain":
            return PLAIN
        if self.focus.mode is not None and mode.worst is None:
            mode = replace(mode, worst=[most] * len(xs))
        if mode.worst is None:
            return mode
        real = rows_received(self.world, routing)
        room = [
            max(r, w) if self.rng.random() < 0.7 else r
            for r, w in zip(real, mode.worst, strict=True)
        ]
        full = self.focus.mode == "full" and not self.world.calls
        if not bad and max(real) > 0 and (full or self.rng.random() < 0.1):
            rank = int(np.argmax(real))
            room[rank] = real[rank] - 1
            self.expected[len(self.world.calls) + 1] = REFUSED
        return replace(mode, worst=room)

    def _cast(self, xs: list[Array], mode: Mode) -> tuple[list[Array], Mode]:
        """Now and then other rows, which are cast on their way."""
        wanted = self.focus.cast
        if wanted is None:
            wanted = self.focus.mode != "plain" and self.cast_rng.random() < 0.25
        if not wanted:
            return xs, mode
        cast = random_cast(self.cast_rng, [len(x) for x in xs], self.focus.hidden)
        codes, scales = cast.results()
        return codes, replace(mode, cast=cast, scales=scales)

    def _all_well(self, serial: int, ways: Ways) -> bool:
        return serial not in self.expected and len(ways.present) == self.world.num_ranks

    def _handle(self) -> Handle:
        """Of a dispatch that was well, or of one that was refused without anybody's knowing."""
        if self.refused and (not self.handles or self.rng.random() < 0.5):
            self.expected[len(self.world.calls) + 1] = REFUSED
            return self.refused[-1]
        return self.pick(self.handles)  # type: ignore[no-any-return]

    def _cached(self, ways: Ways, differ: bool) -> None:
        handle = self._handle()
        size = int(self.pick(self.sizes))
        tokens = [result.handle.num_tokens for result in handle.results]
        xs = [calls.random_rows(self.rng, t, size) for t in tokens]
        if differ:
            xs[0] = calls.random_rows(self.rng, tokens[0], size + 16 if size < 384 else size - 16)
        weights = None
        if self.rng.random() < 0.5:
            weights = [self.rng.random((t, 3)).astype(np.float32) for t in tokens]
        routing = Routing(None, weights, None)
        mode = PLAIN
        if self.focus.mode != "plain":
            mode = random_mode(self.rng, xs, routing, 0, cached=True)
        if not differ:
            xs, mode = self._cast(xs, mode)
        call_dispatch(self.world, ways, xs, routing, handle, mode)

    def _combine(self, ways: Ways, differ: bool) -> None:
        handle = self._handle()
        dtype = calls.COMBINED[str(self.pick(sorted(calls.COMBINED)))]
        sizes = [size for size in self.sizes if size % dtype.itemsize == 0] or [dtype.itemsize]
        width = int(self.pick(sizes)) // dtype.itemsize
        if self.world.setting.byte_wise and self.rng.random() < 0.5:
            width = max(1, width - 1)
        elif dtype.itemsize < 4 and not self.world.setting.byte_wise:
            width += -width % (16 // dtype.itemsize)  # narrow rows are tracked by bytes
        if differ:  # one rank calls something else
            odd = int(self.rng.integers(self.world.num_ranks))
            ways.refusals[odd] = Refusal(RefusalCode.NONE)
        calls.call_combine(self.world, ways, self.rng, handle, dtype, width)

    # ------------------------------------------------------------------------------ trouble

    def _disturb(self) -> None:
        world, rng = self.world, self.rng
        step = int(rng.integers(1, 30000))
        if self.trouble == "freeze":
            rank = int(rng.integers(world.num_ranks))
            world.frozen.add(rank)
            world.machine.freeze(rank, step)
        if self.trouble == "skew":
            rank, block = int(rng.integers(world.num_ranks)), int(rng.integers(3))
            for _ in range(4):  # a jump only matters while the block waits
                world.machine.skew(rank, block, step, 50 * world.setting.timeout_ns)
                step = int(rng.integers(1, 30000))
        if self.trouble == "abort":
            rank = int(rng.integers(world.num_ranks))
            world.machine.host_store(rank, step, world.board, 64 * rank, 1)

    # ------------------------------------------------------------------------------ the end

    def run(self) -> Verdict:
        """Run the machine and judge."""
        self.tell()
        faults = self.world.machine.run()
        verdicts = self.world.verdicts()
        self._forgive_absent(verdicts)
        problems = [with_lines(f"{fault.text}") for fault in harmful(faults, verdicts)]
        stopped = any("hang" in fault.kind or fault.kind == "fatal" for fault in faults)
        if not stopped:
            self._judge_calls(verdicts, problems)
            self._judge_rest(verdicts, problems)
        tale = [*self.tale, f"profile: {self.world.machine.profile}"]
        return Verdict(problems, "\n".join(tale), self.world.machine.steps)

    def _forgive_absent(self, verdicts: dict[tuple[int, int], str]) -> None:
        for call in self.world.calls:
            for rank in self.absent:
                if rank not in call.checks:
                    verdicts[rank, call.serial] = STOPPED

    def _judge_calls(self, verdicts: dict[tuple[int, int], str], problems: list[str]) -> None:
        quiet = self.trouble not in FATAL
        for call in self.world.calls:
            for rank in range(self.world.num_ranks):
                verdict = verdicts[rank, call.serial]
                where = f"{call.name} {call.serial} on rank {rank}"
                if quiet and verdict != self.expected.get(call.serial, OK):
                    want = self.expected.get(call.serial, OK)
                    why = f": {self.world.explain(rank)}" if verdict == FAILED else ""
                    problems.append(f"{where} ended as {verdict}, wanted {want}{why}")
                check = call.checks if verdict == OK else call.poisoned
                if verdict == FAILED:
                    check = call.remains
                if verdict != STOPPED and rank in check:
                    self._try(check[rank], f"{where} ({verdict})", problems)

    def _try(self, check: Callable[[], None], where: str, problems: list[str]) -> None:
        try:
            check()
        except AssertionError as error:
            problems.append(f"{where}: {error}")

    def _judge_rest(self, verdicts: dict[tuple[int, int], str], problems: list[str]) -> None:
        world = self.world
        told = any(verdict == FAILED for verdict in verdicts.values())  # all ranks of it, in time
        for rank in range(world.num_ranks):
            ends = [verdicts[rank, call.serial] for call in world.calls]
            if STOPPED in ends:
                continue
            control = world.memory[rank].control
            words = {name: getattr(control, name) for name in ("arrivals", "busy", "tickets")}
            if FAILED not in ends and POISONED not in ends:
                words |= {"claimed": control.claimed, "abort": control.abort,
                          "poisoned": control.poisoned}  # fmt: skip
                experts = range(world.setting.num_experts)
                words |= {f"histogram[{e}]": control.histogram + 4 * e for e in experts}
                want = world.setting.first_epoch
                for _ in world.calls:
                    want = want + 1 if want + 1 < 2**32 else 2
                got = world.control_word(rank, control.epoch)
                if got != want and self.trouble != "abort":
                    problems.append(f"rank {rank} rests at epoch {got}, wanted {want}")
            for name, offset in words.items():
                value = world.control_word(rank, offset)
                if value and not (name == "abort" and (told or self.trouble == "abort")):
                    problems.append(f"rank {rank} rests with {name} = {value:#x}")


def last_operations(story: Story, most: int) -> str:
    """What each rank did last, after a run."""
    parts = [f"rank {rank}:\n{story.world.machine.last_of(rank, most)}"
             for rank in range(story.world.num_ranks)]  # fmt: skip
    return "\n".join(parts)


def run_story(seed: int, focus: Focus | None = None) -> Verdict:
    """Run one seed."""
    return Story(seed, focus or Focus()).run()
