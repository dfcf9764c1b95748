"""Which load reads which memory on which GPU, why that is sound, and what a litmus test found.

Rows come from memory that another GPU, or an earlier kernel, has written. A load may answer from a
line that L1 took before, unless something makes the line fresh: no line is ever taken
(``L1::no_allocate``), an acquire on the same SM empties L1, a kernel begins, or the copy engine
reads, which does not look into L1. ``ACCESSES`` lists for each kind of access the load that is
used and what it relies on; ``ptx/README.md`` argues it; ``python -m deepep_cupy litmus`` tests it
on the GPU at hand and leaves a verdict in the cache folder, which ``resolve`` reads.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from deepep_cupy import env
from deepep_cupy.jit.cache import own_folder

__all__ = [
    "ACCESSES",
    "BULK_HINTS",
    "LEAST_CHECKS",
    "NC_ARCHITECTURES",
    "PROTOCOLS",
    "Access",
    "BulkHint",
    "Choice",
    "Judgement",
    "Reading",
    "Verdict",
    "driver_name",
    "find_verdicts",
    "resolve",
    "verdict_path",
]

_LOG = logging.getLogger(__name__)
PROTOCOLS: Mapping[str, str] = {
    "reader": "the reading block acquires the flag",
    "same SM": "another block of the same SM acquires it",
    "other SM": "a block on another SM acquires it",
    "handed over": "a block on another SM acquires it, the reading block acquires from that one",
    "relaxed": "nobody acquires",
    "boundary": "the reading kernel starts after the writing one has ended",
}
"""How the reader learns that there is something new → in words."""

_WEAK = "ld.global"
_NO_ALLOCATE = "ld.global.L1::no_allocate"
_RELAXED = "ld.relaxed.sys.global"
_NC = "ld.global.nc.L1::no_allocate"
_NC_256B = "ld.global.nc.L1::no_allocate.L2::256B"
_BULK = "cp.async.bulk"
_FENCED_BULK = "fence.proxy.async + cp.async.bulk"


@dataclass(frozen=True)
class Access:
    """One way to read rows, as ``common/access.cuh`` and ``asm/bulk.cuh`` have it.

    Attributes:
        name: For people.
        function: Its function there.
        nbytes: What one load reads.
        protocol: What it relies on, a key of ``PROTOCOLS``.
        coherent: The load with ``DEEPEP_CUPY_LOADS=coherent``: sound by the rules of PTX.
        nc: The load with ``DEEPEP_CUPY_LOADS=nc``.
        min_arch: Oldest architecture that has it.
    """

    name: str
    function: str
    nbytes: int
    protocol: str
    coherent: str
    nc: str
    min_arch: int = 80

    def load(self, loads: str) -> str:
        """The load with ``loads``, ``"coherent"`` or ``"nc"``."""
        return self.nc if loads == "nc" else self.coherent


ACCESSES = (
    Access("local read", "read_local", 16, "boundary", _NO_ALLOCATE, _NC_256B),
    Access("local read", "read_local_u64", 8, "boundary", _WEAK, _NC),
    Access("local read", "read_local_u32", 4, "boundary", _WEAK, _NC),
    Access("narrow local read", "read_local_narrow", 8, "boundary", _WEAK, _WEAK),
    Access("narrow local read", "read_local_narrow", 4, "boundary", _WEAK, _WEAK),
    Access("peer read", "read_peer", 16, "reader", _RELAXED, _NC_256B),
    Access("narrow peer read", "read_peer_narrow", 8, "reader", _RELAXED, _RELAXED),
    Access("narrow peer read", "read_peer_narrow", 4, "reader", _RELAXED, _RELAXED),
    Access("bulk load of local rows", "bulk_load", 16, "boundary", _BULK, _BULK, 90),
    Access("bulk load of peers' rows", "bulk_load", 16, "reader", _FENCED_BULK, _FENCED_BULK, 90),
)
"""All reads of rows. What is listed for 4 bytes holds for 2 and 1 as well."""


@dataclass(frozen=True)
class BulkHint:
    """What a bulk copy tells L2 about the lines it touches.

    Attributes:
        name: The access.
        function: The function of ``cuda/asm/bulk.cuh``.
        hint: ``"none"``, ``"evict_first"`` or ``"evict_normal"``.
        why: The reason.
    """

    name: str
    function: str
    hint: str
    why: str


BULK_HINTS = (
    BulkHint(
        "bulk load of this rank's rows (dispatch) and of the peers' (combine)",
        "bulk_load",
        "none",
        "each row is read once, which is what evict_first is for, but the next kernel often reads "
        "the same rows, and evict_first gained 2.3 % at most in `bench flavors` on two H200",
    ),
    BulkHint(
        "bulk store to the receiver's block (dispatch)",
        "bulk_store",
        "none",
        "the receiver reads the rows next: evict_first would send them to memory before that",
    ),
)
"""The hints in force."""

NC_ARCHITECTURES: Mapping[int, str] = {
    # None yet. Two H200 pass `litmus` (115 million words, none stale), but `bench flavors` shows no
    # gain there that would be a reason to leave what PTX promises by default.
}
"""Architecture → what was seen there. With ``auto``, these use ``nc`` without a verdict."""


# ------------------------------------------------------------------------------------- readings

LEAST_CHECKS = 1_000_000
"""A reading of fewer checks may count against a load, never for it."""

_FILLS_L1 = (_WEAK, "ld.global.ca", "ld.global.nc", "ld.global.nc.L1::evict_last")
_FORMAT = 1


@dataclass(frozen=True)
class Reading:
    """What the litmus test counted for one load in one situation.

    Attributes:
        producer: Who wrote: ``"peer"``: another GPU, ``"kernel"``: another kernel on the same GPU,
            ``"block"``: another block of the same kernel.
        pointer: Where the words are: ``"local"`` memory of the reader, or the ``"peer"``'s.
        protocol: A key of ``PROTOCOLS``.
        load: The instruction without vector and type.
        nbytes: What one load reads.
        checks: Words of 16 bytes compared.
        stale: Of these, not of this round.
        torn: Of these, of two rounds within one load.
        wrong: Of these, of no round.
        oldest: Age of the oldest, in rounds.
        error: Why there is no count, empty otherwise.
    """

    producer: str
    pointer: str
    protocol: str
    load: str
    nbytes: int
    checks: int = 0
    stale: int = 0
    torn: int = 0
    wrong: int = 0
    oldest: int = 0
    error: str = ""

    @property
    def bad(self) -> int:
        """Words that were not what they should be."""
        return self.stale + self.torn + self.wrong

    def __str__(self) -> str:
        where = f"{self.producer} writes, {self.pointer} pointer, {PROTOCOLS[self.protocol]}"
        what = self.error or (
            f"{self.stale:,} stale, {self.torn:,} torn, {self.wrong:,} wrong of {self.checks:,}"
        )
        return f"{self.load} of {self.nbytes} bytes ({where}): {what}"


@dataclass(frozen=True)
class Judgement:
    """Whether readings bear out a choice of loads.

    Attributes:
        status: ``"passed"``, ``"contradicted"`` or ``"inconclusive"``.
        because: One line a reason; none where it passed.
        checks: Words compared for it.
    """

    status: str
    because: tuple[str, ...]
    checks: int


@dataclass(frozen=True)
class Verdict:
    """One run of the litmus test.

    Attributes:
        gpu: Model of the GPU.
        arch: 90 for compute capability 9.0.
        driver: See ``driver_name``.
        date: Day and time, UTC.
        package: Version of this package.
        num_gpus: 2 where a peer wrote, else 1.
        readings: All of them.
    """

    gpu: str
    arch: int
    driver: str
    date: str
    package: str
    num_gpus: int
    readings: tuple[Reading, ...]

    def judge(self, loads: str, accesses: Iterable[Access] = ACCESSES) -> Judgement:
        """Judge ``"nc"`` or ``"coherent"`` for all accesses."""
        against: list[str] = []
        unknown: list[str] = []
        checks = 0
        for access in accesses:
            if self.arch < access.min_arch:
                continue
            load = access.load(loads)
            wanted = set(self._situations(access.protocol, bulk=load in (_BULK, _FENCED_BULK)))
            for reading in self.readings:
                if (reading.load, reading.nbytes) != (load, access.nbytes):
                    continue
                if (reading.producer, reading.pointer, reading.protocol) not in wanted:
                    continue
                wanted.remove((reading.producer, reading.pointer, reading.protocol))
                checks += reading.checks
                if reading.bad:
                    against.append(f"{access.name}: {reading}")
                elif reading.error:
                    unknown.append(f"{access.name}: {reading}")
                elif reading.checks < LEAST_CHECKS:
                    unknown.append(f"{access.name}: {reading}: fewer than {LEAST_CHECKS:,}")
            unknown += [
                f"{access.name}: {load} of {access.nbytes} bytes was not tested with "
                f"{producer} writing, {pointer} pointer, {PROTOCOLS[protocol]}"
                for producer, pointer, protocol in sorted(wanted)
            ]
        if loads == "nc":
            unknown += self._no_teeth()
        if against:
            return Judgement("contradicted", tuple(dict.fromkeys(against)), checks)
        reasons = tuple(dict.fromkeys(unknown))
        return Judgement("inconclusive" if reasons else "passed", reasons, checks)

    def _situations(self, protocol: str, *, bulk: bool) -> Iterator[tuple[str, str, str]]:
        """(producer, pointer, protocol) in which an access that relies on ``protocol`` may be."""
        if self.num_gpus > 1:
            yield "peer", "local", protocol
            yield "peer", "peer", protocol
        yield "kernel", "local", protocol
        if protocol != "boundary" and not bulk:
            yield "block", "local", protocol

    def _no_teeth(self) -> Iterator[str]:
        """Situations that prove no load: even one that fills L1 was never stale there."""
        for producer in ("peer", "kernel", "block")[self.num_gpus < 2 :]:
            if not any(
                reading.bad
                for reading in self.readings
                if (reading.producer, reading.protocol) == (producer, "relaxed")
                and reading.load in _FILLS_L1
            ):
                yield (
                    f"no load was ever stale with {producer} writing, so that loads that never "
                    "were prove nothing"
                )

    def save(self, folder: Path | None = None) -> Path | None:
        """Write it where ``find_verdicts`` looks, in place of an older one; return the file, or
        ``None`` (and a warning in the log) where that cannot be written."""
        path = verdict_path(self.gpu, self.driver, self.num_gpus, folder)
        if path is None:
            return None
        made = path.with_suffix(f".{os.getpid():x}.tmp")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            made.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
            made.replace(path)
        except OSError as error:
            _LOG.warning("the verdict of the litmus test cannot be kept: %s", error)
            return None
        return path

    def as_json(self) -> dict[str, Any]:
        """All of it, for ``json.dumps``."""
        return {"format": _FORMAT, **asdict(self)}


def verdict_path(gpu: str, driver: str, num_gpus: int, folder: Path | None = None) -> Path | None:
    """Return the file of a verdict; ``folder`` is the cache folder if ``None``.

    A verdict decides which loads are used, so that it must be this user's, as machine code must:
    where the folder is not, there are no verdicts (``None``).
    """
    root = own_folder(env.cache_dir() if folder is None else folder)
    return None if root is None else root / "litmus" / _file_name(gpu, driver, num_gpus)


def _file_name(gpu: str, driver: str, num_gpus: int) -> str:
    return ".".join((_word(gpu), _word(driver), f"{num_gpus}gpu", "json"))


def _word(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.") or "unknown"


def find_verdicts(gpu: str, driver: str, folder: Path | None = None) -> Sequence[Verdict]:
    """Return what is known of a GPU model with a driver; damaged files are left out."""
    found: list[Verdict] = []
    path = verdict_path(gpu, driver, 2, folder)
    if path is None:
        return found
    for each in (path, path.with_name(_file_name(gpu, driver, 1))):
        verdict = _read(each)
        if verdict is not None and (verdict.gpu, verdict.driver) == (gpu, driver):
            found.append(verdict)
    return found


def _read(path: Path) -> Verdict | None:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored.pop("format") != _FORMAT:
            return None
        readings = tuple(_typed(Reading(**each)) for each in stored.pop("readings"))
        verdict = _typed(Verdict(readings=readings, **stored))
        verdict.judge("nc")  # unknown protocols raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return verdict


_Stored = TypeVar("_Stored", "Reading", "Verdict")


def _typed(stored: _Stored) -> _Stored:
    """Raise TypeError unless all numbers and texts are what they should be."""
    for field in fields(stored):
        wanted = {"int": int, "str": str}.get(str(field.type), object)
        if not isinstance(getattr(stored, field.name), wanted):
            raise TypeError(field.name)
    return stored


# --------------------------------------------------------------------------------------- choice


@dataclass(frozen=True)
class Choice:
    """Which loads the kernels are compiled with.

    Attributes:
        loads: ``"nc"`` or ``"coherent"``.
        reason: One line for people.
    """

    loads: str
    reason: str


def resolve(
    wanted: str,
    arch: int,
    *,
    gpu: str = "",
    driver: str = "",
    across_gpus: bool = True,
    folder: Path | None = None,
) -> Choice:
    """Choose the loads. Local: ranks that share compiled kernels must agree on the outcome.

    Args:
        wanted: ``DEEPEP_CUPY_LOADS``.
        arch: 90 for compute capability 9.0.
        gpu: Model of the GPU.
        driver: See ``driver_name``.
        across_gpus: Whether the ranks use several GPUs; then a verdict of one GPU is not enough.
        folder: Cache folder, ``None`` for the user's.
    """
    if wanted != "auto":
        return Choice(wanted, f"DEEPEP_CUPY_LOADS={wanted}")
    judged = [(each, each.judge("nc").status) for each in find_verdicts(gpu, driver, folder)]
    for verdict, status in judged:
        if status == "contradicted":
            return Choice("coherent", f"the litmus test of {verdict.date} contradicts nc here")
    if arch in NC_ARCHITECTURES:
        return Choice("nc", f"sm_{arch} is in the policy table: {NC_ARCHITECTURES[arch]}")
    for verdict, status in judged:
        if status == "passed" and (verdict.num_gpus > 1 or not across_gpus):
            return Choice("nc", f"the litmus test of {verdict.date} passed here")
    return Choice(
        "coherent",
        f"sm_{arch} is not in the policy table, and no litmus test has passed here "
        "(python -m deepep_cupy litmus)",
    )


_KERNEL_DRIVER = Path("/proc/driver/nvidia/version")


def driver_name(cuda_version: int) -> str:
    """Return the driver's name in verdicts: the version of its kernel module, else that of CUDA.

    Args:
        cuda_version: As ``cudaDriverGetVersion`` returns it, 13000 for 13.0.
    """
    try:
        found = re.search(r"\d+\.\d+(?:\.\d+)?", _KERNEL_DRIVER.read_text().splitlines()[0])
    except (OSError, IndexError):
        found = None
    if found:
        return found[0]
    return f"CUDA {cuda_version // 1000}.{cuda_version % 1000 // 10}"
