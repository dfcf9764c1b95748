"""The copying modules and the flush on a simulated GPU: every byte, every kind, odd sizes."""

from __future__ import annotations

import random
import re

import pytest

from deepep_cupy.bench import flavors
from deepep_cupy.engines.gpu.ptx_modules import get_module
from deepep_cupy.jit.launch import Packed
from simulator.gpus import Gpus
from simulator.ptx import PtxError, ptx_kernel

TO, FROM, FAILED, SIZE = 0x40000, 0x1000, 0x80, 0x80000
STAGES_BYTES = 4 * 3584
"""Of a warp that copies in bulk."""


def entry_of(name):
    module = get_module(name)
    return module.entries[0], module.path.read_text(encoding="utf-8")


class Copied:
    """One launch, and the memory after it."""

    def __init__(self, name, *, text=None, grid=2, num_threads=32, seed=0, faults=(), **values):
        entry, _ = entry_of(name)
        gpus = Gpus(seed=seed, nbytes=SIZE, max_blocks=grid, num_threads=num_threads)
        base = gpus.base(0, 0)
        gpus.poke(base + FROM, random.Random(seed).randbytes(TO - FROM))
        places = {key: base + values[key] for key in values if key in PLACES}
        params = Packed(entry.layout({}), values | places, name).tobytes()
        dynamic = num_threads // 32 * STAGES_BYTES if name == "copy_flavors_bulk" else 0
        before = ptx_kernel(name, text).hints()
        gpus.launch(0, 0, name, grid, num_threads, params, text=text, dynamic=dynamic)
        gpus.run()
        assert [fault.kind for fault in gpus.faults] == list(faults), gpus.faults
        self.memory = gpus.peek(base, SIZE)
        after = ptx_kernel(name, text).hints()
        self.hints = [
            {hint for hint in range(3) if new[hint] > old[hint]}
            for new, old in zip(after, before, strict=True)
        ]


PLACES = ("to", "from", "failed", "scratch")
run = Copied


def assert_copied(world, nbytes):
    assert world.memory[TO : TO + nbytes] == world.memory[FROM : FROM + nbytes]
    assert not any(world.memory[TO + nbytes :])


# ------------------------------------------------------------------------------ kinds of loads


@pytest.mark.parametrize("kind", range(len(flavors.LOADS)), ids=flavors.LOADS)
def test_every_kind_copies_every_byte(kind):
    values = {"to": TO, "from": FROM, "num_words": 5 * 256, "load": kind}
    assert_copied(run("copy_flavors", **values), 5 * 4096)


@pytest.mark.parametrize(("grid", "num_threads", "chunks"), [(1, 32, 3), (3, 64, 7), (2, 96, 0)])
def test_any_grid_copies_all_chunks(grid, num_threads, chunks):
    values = {"to": TO, "from": FROM, "num_words": chunks * 256, "load": 0}
    world = run("copy_flavors", grid=grid, num_threads=num_threads, **values)
    assert_copied(world, chunks * 4096)


def test_kinds_are_numbered_as_in_the_text():
    _, text = entry_of("copy_flavors")
    body = re.sub(r"//[^\n]*", "", text)
    targets = re.search(r"\.branchtargets\s+([^;]+);", body)[1].replace(" ", "").split(",")
    assert len(targets) == len(flavors.LOADS)
    for target, load in zip(targets, flavors.LOADS, strict=True):
        block = re.search(rf"^{target}:\n(.*?)^\s+bra\s+STORE;", body, re.MULTILINE | re.DOTALL)[1]
        ops = [line.split()[0] for line in block.splitlines() if line.strip()]
        assert ops == [f"{load}.v4.u32"] * 8, target


# ----------------------------------------------------------------------------------- bulk copies

PIECE = 3584


def bulk(nbytes, *, load_hint=0, store_hint=0, **more):
    values = {"to": TO, "from": FROM, "num_bytes": nbytes, "failed": FAILED, "limit_ns": 500_000}
    hints = {"load_hint": load_hint, "store_hint": store_hint}
    return run("copy_flavors_bulk", **values, **hints, **more)


@pytest.mark.parametrize(
    ("pieces", "num_threads"), [(0, 64), (1, 64), (5, 64), (17, 64), (29, 64), (69, 512)]
)
def test_bulk_copies_every_byte(pieces, num_threads):
    """Two blocks: from no pieces to more than each warp has stages."""
    nbytes = pieces * PIECE
    world = bulk(nbytes, num_threads=num_threads, seed=pieces)
    assert_copied(world, nbytes)
    assert not any(world.memory[FAILED : FAILED + 4])


@pytest.mark.parametrize("nbytes", [16, PIECE - 16, PIECE + 16, 12 * PIECE + 1600])
@pytest.mark.parametrize("seed", range(5))
def test_one_warp_goes_round_its_stages(nbytes, seed):
    assert_copied(bulk(nbytes, grid=1, num_threads=32, seed=seed), nbytes)


@pytest.mark.parametrize("load_hint", range(3))
@pytest.mark.parametrize("store_hint", range(3))
def test_hints_are_what_was_asked_for(load_hint, store_hint):
    world = bulk(9 * PIECE, load_hint=load_hint, store_hint=store_hint, grid=1)
    assert_copied(world, 9 * PIECE)
    assert world.hints == [{load_hint}, {store_hint}]


FAULTS = {
    "a stage is filled while a store may still read it": (
        "wait_group.read    2",
        "wait_group.read    3",
    ),
    "the block ends with stores under way": ("wait_group         0", "wait_group         1"),
    "a stage is stored before its load has come": (
        "@%p_is bra                       LOADED;",
        "bra                              LOADED;",
    ),
    "the parity does not change": (
        "shr.u32                          %r_parity, %r_turn, 2",
        "shr.u32                          %r_parity, %r_turn, 31",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault):
    old, new = FAULTS[fault]
    _, text = entry_of("copy_flavors_bulk")
    assert text.count(old) == 1, fault
    assert any(goes_wrong(text.replace(old, new), seed) for seed in range(20)), fault


def goes_wrong(text, seed):
    try:
        assert_copied(bulk(12 * PIECE, text=text, grid=1, seed=seed), 12 * PIECE)
    except (PtxError, AssertionError):
        return True
    return False


def test_a_load_that_never_comes_ends_the_wait():
    _, text = entry_of("copy_flavors_bulk")
    wait = "mbarrier.try_wait.parity.shared::cta.b64 %p_is, [%r_bar], %r_parity;"
    assert text.count(wait) == 1
    text, given_up = text.replace(wait, "mov.pred %p_is, 0;"), ["unfinished copies"]
    world = bulk(PIECE, text=text, grid=1, num_threads=32, faults=given_up)
    assert world.memory[FAILED] == 1


# ----------------------------------------------------------------------------------------- flush


@pytest.mark.parametrize("num_words", [0, 1, 31, 200])
def test_the_flush_writes_all_words_and_no_more(num_words):
    values = {"scratch": TO, "num_words": num_words, "value": 0x01020304}
    world = run("l2_flush", grid=3, **values)
    assert world.memory[TO:] == bytes.fromhex("04030201") * (4 * num_words) + bytes(
        SIZE - TO - 16 * num_words
    )
