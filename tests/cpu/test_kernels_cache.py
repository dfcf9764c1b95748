"""The cache: the user's alone, verified, never fatal; one compile a node."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from deepep_cupy.errors import CompileError, ContractError
from deepep_cupy.jit import build as build_module
from deepep_cupy.jit import cache as cache_module
from deepep_cupy.jit.build import Request, build, build_all, open_cache
from deepep_cupy.jit.cache import KernelCache
from deepep_cupy.jit.compile import Compiled, Resources, Target
from deepep_cupy.jit.spec import KernelSpec, Param

DIGEST = "0123456789abcdef" * 4
FILES = {"k.cu": b"text", "k.cubin": b"\x7fELF..."}
META = {"resources": {"registers": 7}}
SPEC = KernelSpec(
    name="fake",
    source="barrier/barrier.cu",
    entry="fake",
    doc="",
    params=(Param("x", "u8*"),),
    threads=32,
)
REQUEST = Request(SPEC, {"kNumRanks": 2}, Target(90))


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def stored(folder):
    cache = KernelCache(folder)
    return cache, cache.store("k.sm_90", DIGEST, FILES, META).folder


def test_what_is_stored_is_found_by_another_process(tmp_path):
    _, folder = stored(tmp_path / "a" / "b")
    found = KernelCache(tmp_path / "a" / "b").load("k.sm_90", DIGEST)
    assert found is not None
    assert (found.folder, dict(found.files), dict(found.meta)) == (folder, FILES, META)
    assert folder.name == f"k.sm_90.{DIGEST[:32]}"
    assert KernelCache(tmp_path / "a" / "b").load("k.sm_90", DIGEST[::-1]) is None


def test_the_folder_is_the_users_alone(tmp_path):
    _, folder = stored(tmp_path / "cache")
    assert mode(folder.parent) == 0o700
    folder.parent.chmod(0o755)
    KernelCache(tmp_path / "cache")
    assert mode(folder.parent) == 0o700


def test_nothing_is_left_beside_the_entries(tmp_path):
    _, folder = stored(tmp_path)
    stored(tmp_path)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("bad_mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_is_not_used(bad_mode, tmp_path, caplog):
    _, folder = stored(tmp_path)
    folder.parent.chmod(bad_mode)
    with caplog.at_level(logging.WARNING):
        cache = KernelCache(tmp_path)
    assert "other users may write there" in caplog.text
    assert cache.load("k.sm_90", DIGEST) is None
    elsewhere = cache.store("k.sm_90", DIGEST, FILES, META).folder
    assert tmp_path not in elsewhere.parents
    assert mode(elsewhere.parent) == 0o700
    assert cache.load("k.sm_90", DIGEST) is not None


def test_a_folder_of_another_user_is_not_used(tmp_path, monkeypatch, caplog):
    stored(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with caplog.at_level(logging.WARNING):
        assert KernelCache(tmp_path).load("k.sm_90", DIGEST) is None
    assert "belongs to user" in caplog.text


@pytest.mark.parametrize("bad_mode", [0o770, 0o707, 0o777])
def test_nobody_else_may_replace_a_folder_above(bad_mode, tmp_path, caplog):
    _, folder = stored(tmp_path / "open" / "mine")
    (tmp_path / "open").chmod(bad_mode)
    with caplog.at_level(logging.WARNING):
        assert KernelCache(tmp_path / "open" / "mine").load("k.sm_90", DIGEST) is None
    assert f"other users may write in {tmp_path / 'open'} above it (chmod go-w " in caplog.text
    (tmp_path / "open").chmod(bad_mode | stat.S_ISVTX)  # as /tmp: each moves the own alone
    assert KernelCache(tmp_path / "open" / "mine").load("k.sm_90", DIGEST) is not None
    (tmp_path / "link").symlink_to(tmp_path / "open" / "mine")
    (tmp_path / "open").chmod(bad_mode)
    assert KernelCache(tmp_path / "link").load("k.sm_90", DIGEST) is None
    assert folder.is_dir()


def test_a_folder_above_of_another_user_is_not_used(tmp_path, monkeypatch, caplog):
    """As where the folder under /tmp for programs without a home was made by somebody first."""
    me, lstat = os.geteuid(), Path.lstat
    stored(tmp_path / "theirs" / "mine")

    def owner(path):
        found = lstat(path)
        if path.name != "theirs":
            return found
        return os.stat_result((*found[:4], me + 1, *found[5:]))

    monkeypatch.setattr(Path, "lstat", owner)
    with caplog.at_level(logging.WARNING):
        assert KernelCache(tmp_path / "theirs" / "mine").load("k.sm_90", DIGEST) is None
    assert f"theirs above it belongs to user {me + 1}" in caplog.text


def test_folders_that_are_made_are_the_users_alone(tmp_path):
    before = os.umask(0o002)
    try:
        stored(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [mode(tmp_path / "a"), mode(tmp_path / "a" / "b")] == [0o700, 0o700]
    assert KernelCache(tmp_path / "a" / "b").load("k.sm_90", DIGEST) is not None


def test_a_link_is_not_followed(tmp_path, caplog):
    stored(tmp_path / "theirs")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "v2").symlink_to(tmp_path / "theirs" / "v2")
    with caplog.at_level(logging.WARNING):
        assert KernelCache(tmp_path / "mine").load("k.sm_90", DIGEST) is None
    assert "a link is not followed" in caplog.text


def test_a_folder_that_cannot_be_made_is_not_fatal(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        cache = KernelCache(tmp_path / "file" / "cache")
    assert "DEEPEP_CUPY_CACHE_DIR" in caplog.text
    kept = cache.store("k.sm_90", DIGEST, FILES, META)
    assert (kept.folder / "k.cubin").read_bytes() == FILES["k.cubin"]


def test_a_full_disk_is_not_fatal(tmp_path, monkeypatch, caplog):
    cache, _ = stored(tmp_path)
    write_bytes = Path.write_bytes

    def full(path, content):
        if tmp_path in path.parents:
            raise OSError(28, "No space left on device")
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with caplog.at_level(logging.WARNING):
        kept = cache.store("k.sm_90", DIGEST[::-1], FILES, META)
    assert "No space left on device" in caplog.text
    assert tmp_path not in kept.folder.parents
    assert cache.load("k.sm_90", DIGEST[::-1]) is not None
    assert cache.load("k.sm_90", DIGEST) is not None, "what was there is still read"
    assert not list((tmp_path / "v2").glob(".new-*"))


def test_no_folder_at_all_is_not_fatal(tmp_path, monkeypatch, caplog, compiler):
    """A full disk for cache and temporary folder together, or nothing writable."""
    cache = KernelCache(tmp_path)

    def full(**_):
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(cache_module.tempfile, "mkdtemp", full)
    with caplog.at_level(logging.WARNING):
        kept = cache.store("k.sm_90", DIGEST, FILES, META)
    assert (kept.folder, dict(kept.files)) == (None, FILES)
    assert "kept in memory" in caplog.text
    assert build(REQUEST, KernelCache(None)).image == b"\x7fELF"
    assert KernelCache(None).folder is None
    compiler.fails = True
    with pytest.raises(CompileError, match="does not compile"):
        build(REQUEST, KernelCache(None))


def test_the_private_folder_goes_with_the_cache():
    cache = KernelCache(None)
    folder = cache.store("k.sm_90", DIGEST, FILES, META).folder
    assert folder.is_dir()
    del cache
    assert not folder.exists()


def damage_content(folder):
    (folder / "k.cubin").write_bytes(b"\x7fELF..!")


def damage_cut(folder):
    (folder / "k.cubin").write_bytes(b"")


def damage_missing(folder):
    (folder / "k.cubin").unlink()


def damage_entry(folder):
    (folder / "entry.json").write_text("{")


def damage_shape(folder):
    (folder / "entry.json").write_text("[]")


def damage_digest(folder):
    entry = json.loads((folder / "entry.json").read_text())
    (folder / "entry.json").write_text(json.dumps({**entry, "digest": DIGEST[::-1]}))


def damage_path(folder):
    """An entry that names a file elsewhere does not read it."""
    entry = json.loads((folder / "entry.json").read_text())
    entry["files"] = {"../../outside": entry["files"]["k.cu"]}
    (folder.parents[1] / "outside").write_bytes(FILES["k.cu"])
    (folder / "entry.json").write_text(json.dumps(entry))


@pytest.mark.parametrize(
    "damage",
    [
        damage_content,
        damage_cut,
        damage_missing,
        damage_entry,
        damage_shape,
        damage_digest,
        damage_path,
    ],
)
def test_a_damaged_entry_is_replaced(damage, tmp_path, caplog):
    cache, folder = stored(tmp_path)
    damage(folder)
    with caplog.at_level(logging.WARNING):
        assert cache.load("k.sm_90", DIGEST) is None
    assert str(folder) in caplog.text
    assert cache.store("k.sm_90", DIGEST, FILES, META).folder == folder
    assert cache.load("k.sm_90", DIGEST) is not None
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_every_flipped_bit_of_an_entry_is_found(tmp_path, caplog):
    cache, folder = stored(tmp_path)
    whole = (folder / "entry.json").read_bytes()
    caplog.set_level(logging.ERROR)
    for at in range(len(whole)):
        for bit in range(8) if at % 7 == 0 else (0, 5):
            changed = bytearray(whole)
            changed[at] ^= 1 << bit
            (folder / "entry.json").write_bytes(changed)
            found = cache.load("k.sm_90", DIGEST)
            if found is not None:  # one kind of white space for another
                assert json.loads(changed) == json.loads(whole)


def hammer(folder, rounds):
    cache = KernelCache(folder)
    for number in range(rounds):
        digest = f"{number % 3:032d}" * 2
        found = cache.load("k", digest)
        if found is not None and dict(found.files) != FILES:
            os._exit(3)
        cache.store("k", digest, FILES, META)
        if number % 5 == 0:
            with contextlib.suppress(FileNotFoundError):  # another one is replacing it just now
                (folder / "v2" / f"k.{digest[:32]}" / "k.cu").write_bytes(b"torn")


def test_processes_that_write_and_damage_the_same_entries(tmp_path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=hammer, args=(tmp_path, 60)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]


# ------------------------------------------------------------------- building through the cache


class Compiler:
    """Stands for NVRTC and counts."""

    def __init__(self):
        self.calls = 0
        self.version = "13.5"
        self.fails = False

    def compile_text(self, text, *, name, entry, target, options):
        self.calls += 1
        if self.fails:
            raise CompileError("kernel fake does not compile")
        cubin = b"\x7fELF" if target.cubin else b""
        return Compiled(name, entry, target, options, text, "// ptx", cubin, Resources(9), "log")


@pytest.fixture
def compiler(monkeypatch):
    fake = Compiler()
    monkeypatch.setattr(build_module, "compile_text", fake.compile_text)
    monkeypatch.setattr(build_module, "compiler_version", lambda: fake.version)
    monkeypatch.setattr(
        build_module, "generate", lambda spec, constants: f"// {spec.name} {constants}\n"
    )
    return fake


def test_a_second_build_compiles_nothing_and_is_equal(compiler, tmp_path):
    first = build(REQUEST, KernelCache(tmp_path))
    second = build(REQUEST, KernelCache(tmp_path))
    assert compiler.calls == 1
    assert (first.cached, second.cached) == (False, True)
    assert second.compiled == first.compiled
    assert second.folder == first.folder
    assert second.image == first.image == (first.folder / "fake.cubin").read_bytes()
    assert sorted(path.suffix for path in first.folder.iterdir()) == [
        ".cu",
        ".cubin",
        ".json",
        ".ptx",
    ]


def test_an_entry_that_lacks_what_is_needed_is_replaced(compiler, tmp_path):
    """Its digests are right, and so it was kept for ever."""
    folder = build(REQUEST, KernelCache(tmp_path)).folder
    entry = json.loads((folder / "entry.json").read_text())
    del entry["sha256"]
    entry["meta"] = {"resources": {"colour": 3}}
    entry["sha256"] = cache_module._seal(entry)
    (folder / "entry.json").write_text(json.dumps(entry))
    assert not build(REQUEST, KernelCache(tmp_path)).cached
    assert build(REQUEST, KernelCache(tmp_path)).cached
    assert compiler.calls == 2


def test_ptx_is_loaded_where_there_is_no_cubin(compiler, tmp_path):
    request = Request(SPEC, {"kNumRanks": 2}, Target(90, cubin=False))
    assert build(request, KernelCache(tmp_path)).image == b"// ptx"
    assert build(request, KernelCache(tmp_path)).cached


def test_text_options_and_compiler_are_in_the_key(compiler, tmp_path, monkeypatch):
    build(REQUEST, KernelCache(tmp_path))
    build(Request(SPEC, {"kNumRanks": 3}, Target(90)), KernelCache(tmp_path))
    build(Request(SPEC, {"kNumRanks": 2}, Target(100)), KernelCache(tmp_path))
    compiler.version = "12.8"
    build(REQUEST, KernelCache(tmp_path))
    assert compiler.calls == 4
    monkeypatch.setattr(build_module, "nvrtc_options", lambda _: ("-arch=sm_90", "-G"))
    build(REQUEST, KernelCache(tmp_path))
    assert compiler.calls == 5


def test_assert_cached_refuses_to_compile(compiler, tmp_path, monkeypatch):
    build(REQUEST, KernelCache(tmp_path))
    monkeypatch.setenv("DEEPEP_CUPY_ASSERT_CACHED", "1")
    assert build(REQUEST, KernelCache(tmp_path)).cached
    with pytest.raises(CompileError) as raised:
        build(Request(SPEC, {"kNumRanks": 3}, Target(90)), KernelCache(tmp_path))
    assert "fake.sm_90" in str(raised.value)
    assert "DEEPEP_CUPY_ASSERT_CACHED" in str(raised.value)
    assert compiler.calls == 1


def test_the_error_says_how_to_see_it_again(compiler, tmp_path):
    compiler.fails = True
    with pytest.raises(CompileError) as raised:
        build(REQUEST, KernelCache(tmp_path))
    kept = tmp_path / "v2" / "failed" / "fake.sm_90.cu"
    assert f"python -m deepep_cupy kernels compile --file {kept} --arch sm_90" in str(raised.value)
    assert kept.read_text() == "// fake {'kNumRanks': 2}\n"


def test_one_rank_compiles_before_the_barrier_and_the_others_load_after_it(compiler, tmp_path):
    seen = []
    requests = [REQUEST, Request(SPEC, {"kNumRanks": 3}, Target(90))]
    cache = KernelCache(tmp_path)
    build_all(requests, cache, compiles=True, barrier=lambda: seen.append(compiler.calls))
    built = build_all(
        requests,
        KernelCache(tmp_path),
        compiles=False,
        barrier=lambda: seen.append(compiler.calls),
    )
    assert seen == [2, 2]
    assert compiler.calls == 2
    assert all(one.cached for one in built)


def test_no_rank_waits_for_one_whose_compile_fails(compiler, tmp_path):
    compiler.fails = True
    reached = []
    for compiles in (True, False):
        with pytest.raises(CompileError):
            build_all(
                [REQUEST],
                KernelCache(tmp_path),
                compiles=compiles,
                barrier=lambda: reached.append(1),
            )
    assert reached == [1, 1]


def test_a_rank_without_the_common_cache_compiles_for_itself(compiler, tmp_path):
    build_all([REQUEST], KernelCache(tmp_path), compiles=True, barrier=lambda: None)
    own = KernelCache(None)
    assert not build_all([REQUEST], own, compiles=False, barrier=lambda: None)[0].cached
    assert compiler.calls == 2


def test_the_users_folder_is_the_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPEP_CUPY_CACHE_DIR", str(tmp_path / "chosen"))
    assert open_cache().folder == tmp_path / "chosen" / "v2"
    monkeypatch.setenv("DEEPEP_CUPY_CACHE_DIR", "~nosuchuser/x")
    with pytest.raises(ContractError, match="DEEPEP_CUPY_CACHE_DIR must be a folder, got '~nosu"):
        open_cache()
