"""The policy of loads: the table is what the kernels do, verdicts on disk mean what they say."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from deepep_cupy._resources import kernel_dir, ptx_dir
from deepep_cupy.engines.gpu import loads as policy
from deepep_cupy.engines.gpu.loads import ACCESSES, PROTOCOLS, Access, Reading, Verdict, resolve
from deepep_cupy.litmus import runner as litmus

FILLS_L1 = {"ld.global", "ld.global.ca", "ld.global.nc", "ld.global.nc.L1::evict_last"}
GPU, DRIVER = "NVIDIA H200", "580.82.07"


def reading_of(test, **changes):
    """What a GPU on which L1 keeps stale lines says."""
    stale = test.load in FILLS_L1 and test.protocol in ("other SM", "relaxed")
    counts = {"checks": 2_000_000, "stale": 1_999_000 if stale else 0}
    return Reading(**dataclasses.asdict(test), **(counts | changes))


def verdict_of(producers=("peer", "kernel", "block"), change=None, **fields):
    readings = [reading_of(test) for test in litmus.every_test(producers, bulk=True)]
    if change is not None:
        readings = [each for each in map(change, readings) if each is not None]
    settings = {
        "gpu": GPU,
        "arch": 90,
        "driver": DRIVER,
        "date": "2026-01-02 03:04",
        "package": "0",
        "num_gpus": 2 if "peer" in producers else 1,
    }
    return Verdict(readings=tuple(readings), **(settings | fields))


# -------------------------------------------------------------------------- the table and the text


def wrappers():
    """Function of ``asm/memory.cuh`` → its instruction without vector and type."""
    text = (kernel_dir() / "asm" / "memory.cuh").read_text()
    found = re.findall(r"DEVICE \w+ (ld_\w+)\([^{]*\{.*?asm volatile\(\s*\"(\S+)", text, re.DOTALL)
    return {name: re.sub(r"(\.v[24])?\.[a-z]\d+$", "", op) for name, op in found}


def loads_of(function):
    """(nc, coherent, {bytes: narrow}) wrappers that a function of ``access.cuh`` calls."""
    text = (kernel_dir() / "common" / "access.cuh").read_text()
    body = re.search(rf"^DEVICE \w+ {function}\(.*?^\}}", text, re.MULTILINE | re.DOTALL)[0]
    calls = re.findall(r"return (ld_\w+)\(", body)
    narrow = re.findall(r"kBytes == (\d+)\) \{[^}]*?(ld_\w+)\(", body)
    return calls, {int(nbytes): name for nbytes, name in narrow}


@pytest.mark.parametrize(
    "access",
    [access for access in ACCESSES if access.function != "bulk_load"],
    ids=lambda a: f"{a.function}-{a.nbytes}",
)
def test_the_table_is_what_access_cuh_does(access):
    known = wrappers()
    calls, narrow = loads_of(access.function)
    if calls:
        nc, coherent = (known[name] for name in calls)
    else:
        nc = coherent = known[narrow[access.nbytes]]
    assert (nc, coherent) == (access.nc, access.coherent)


def test_no_function_that_reads_is_missing_from_the_table():
    text = (kernel_dir() / "common" / "access.cuh").read_text()
    functions = set(re.findall(r"^DEVICE \w+ (read_\w+)\(", text, re.MULTILINE))
    assert functions | {"bulk_load"} == {access.function for access in ACCESSES}


def test_bulk_loads_of_peers_rows_stand_behind_a_proxy_fence():
    """Those of this rank's rows, in dispatch, rely on the kernel boundary."""
    combine = (kernel_dir() / "combine" / "bulk.cu").read_text()
    assert "fence_proxy_async_global();" in combine
    assert combine.index("fence_proxy_async_global();") < combine.index(
        "start_loads<kBias>(c, d, s"
    )


def test_every_load_of_the_table_is_tested():
    for access in ACCESSES:
        assert {access.nc, access.coherent} <= {*litmus.LOADS, *litmus.BULK_LOADS}
        assert access.nbytes in litmus.WIDTHS
        assert access.protocol in PROTOCOLS


@pytest.mark.parametrize("access", ACCESSES, ids=lambda a: f"{a.function}-{a.nbytes}")
def test_the_table_in_words_is_the_table(access):
    rows = [
        [cell.strip().strip("`") for cell in line.strip("|\n ").split("|")]
        for line in (ptx_dir() / "README.md").read_text().splitlines()
        if line.startswith("|")
    ]
    wanted = [access.function, str(access.nbytes), access.coherent, access.nc]
    assert wanted in [row[:4] for row in rows]


@pytest.mark.parametrize("hint", policy.BULK_HINTS, ids=lambda hint: hint.function)
def test_hints_of_bulk_copies_are_those_of_the_table(hint):
    text = (kernel_dir() / "asm" / "bulk.cuh").read_text()
    body = re.search(rf"^DEVICE void {hint.function}\(.*?^\}}", text, re.MULTILINE | re.DOTALL)[0]
    assert ("L2::cache_hint" in body) == (hint.hint != "none")
    assert hint.hint in ("none", "evict_first", "evict_normal")


# ----------------------------------------------------------------------------------- judgements


@pytest.mark.parametrize("loads", ["nc", "coherent"])
@pytest.mark.parametrize("producers", [("kernel", "block"), ("peer", "kernel", "block")])
def test_a_gpu_that_behaves_passes(loads, producers):
    judged = verdict_of(producers).judge(loads)
    assert (judged.status, judged.because) == ("passed", ())
    assert judged.checks > 10_000_000


NC = "ld.global.nc.L1::no_allocate.L2::256B"


@pytest.mark.parametrize("kind", ["stale", "torn", "wrong"])
def test_one_bad_word_contradicts(kind):
    def change(each):
        if (each.load, each.nbytes, each.protocol, each.producer) == (NC, 16, "reader", "peer"):
            return dataclasses.replace(each, **{kind: 1})
        return each

    verdict = verdict_of(change=change)
    judged = verdict.judge("nc")
    assert judged.status == "contradicted"
    assert len(judged.because) == 2  # through both pointers
    assert f"1 {kind}" in judged.because[0]
    assert judged.because[0].startswith(f"peer read: {NC} of 16 bytes")
    assert verdict.judge("coherent").status == "passed"


def test_a_bad_word_where_no_access_relies_on_it_does_not():
    """Loads that bypass L1 may be stale with nobody acquiring; no kernel does that."""

    def change(each):
        stale = each.protocol in ("relaxed", "other SM", "same SM", "handed over")
        return dataclasses.replace(each, stale=5) if stale else each

    assert verdict_of(change=change).judge("nc").status == "passed"


@pytest.mark.parametrize("access", ACCESSES, ids=lambda a: f"{a.function}-{a.nbytes}")
@pytest.mark.parametrize("loads", ["nc", "coherent"])
def test_each_access_is_judged(access, loads):
    key = (access.load(loads), access.nbytes, access.protocol)

    def bad(each):
        same = (each.load, each.nbytes, each.protocol) == key
        return dataclasses.replace(each, stale=1) if same else each

    def missing(each):
        return None if (each.load, each.nbytes, each.protocol) == key else each

    assert verdict_of(change=bad).judge(loads).status == "contradicted"
    judged = verdict_of(change=missing).judge(loads)
    assert judged.status == "inconclusive"
    assert any("was not tested" in reason for reason in judged.because)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"checks": 999_999}, "fewer than"), ({"error": "gave up", "checks": 0}, "gave up")],
)
def test_too_little_says_nothing(changes, said):
    judged = verdict_of(change=lambda each: dataclasses.replace(each, **changes, stale=0))
    judged = judged.judge("coherent")
    assert judged.status == "inconclusive"
    assert said in judged.because[0]


def test_a_test_without_teeth_says_nothing_of_nc():
    fresh = verdict_of(change=lambda each: dataclasses.replace(each, stale=0))
    judged = fresh.judge("nc")
    assert judged.status == "inconclusive"
    assert len(judged.because) == 3  # for each producer
    assert fresh.judge("coherent").status == "passed"


def test_a_planted_access_is_caught():
    planted = Access("planted", "", 16, "relaxed", "ld.global.nc", "ld.global.nc")
    judged = verdict_of().judge("coherent", (*ACCESSES, planted))
    assert judged.status == "contradicted"
    assert all(reason.startswith("planted: ld.global.nc of 16") for reason in judged.because)


# --------------------------------------------------------------------------- verdicts on disk


def choose(folder, wanted="auto", arch=90, *, across_gpus=True, gpu=GPU, driver=DRIVER):
    return resolve(
        wanted, arch, gpu=gpu, driver=driver, across_gpus=across_gpus, folder=folder
    ).loads


@pytest.mark.parametrize("wanted", ["nc", "coherent"])
def test_what_is_asked_for_is_taken(wanted, tmp_path):
    verdict_of().save(tmp_path)
    assert choose(tmp_path, wanted) == wanted
    assert choose(tmp_path, wanted, arch=123) == wanted


def test_auto_is_coherent_without_a_verdict(tmp_path):
    choice = resolve("auto", 89, gpu=GPU, driver=DRIVER, folder=tmp_path)
    assert choice.loads == "coherent"
    assert "python -m deepep_cupy litmus" in choice.reason


def test_auto_follows_a_passing_verdict(tmp_path):
    path = verdict_of().save(tmp_path)
    assert path.parent == tmp_path / "v2" / "litmus"
    assert choose(tmp_path) == "nc"
    assert choose(tmp_path, arch=89) == "nc"  # its own words count, whatever the architecture
    assert choose(tmp_path, gpu="NVIDIA H100", arch=89) == "coherent"
    assert choose(tmp_path, driver="570.1", arch=89) == "coherent"


def test_one_gpu_says_nothing_of_two(tmp_path):
    verdict_of(("kernel", "block"), arch=89).save(tmp_path)
    assert choose(tmp_path, arch=89, across_gpus=True) == "coherent"
    assert choose(tmp_path, arch=89, across_gpus=False) == "nc"
    verdict_of(arch=89).save(tmp_path)
    assert choose(tmp_path, arch=89, across_gpus=True) == "nc"


def bad_nc(each):
    bad = (each.load, each.nbytes, each.protocol) == (NC, 16, "reader")
    return dataclasses.replace(each, torn=1) if bad else each


def test_a_contradiction_beats_the_table_and_the_other_verdict(tmp_path, monkeypatch):
    monkeypatch.setattr(policy, "NC_ARCHITECTURES", {90: "seen"})
    assert choose(tmp_path) == "nc"
    verdict_of().save(tmp_path)
    verdict_of(("kernel", "block"), bad_nc).save(tmp_path)
    assert choose(tmp_path) == "coherent"


def test_a_newer_verdict_takes_the_place_of_an_older_one(tmp_path):
    first = verdict_of(change=bad_nc).save(tmp_path)
    assert choose(tmp_path) == "coherent"
    assert verdict_of().save(tmp_path) == first
    assert choose(tmp_path, arch=89) == "nc"
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_a_verdict_is_read_as_it_was_written(tmp_path):
    verdict = verdict_of()
    verdict.save(tmp_path)
    (found,) = policy.find_verdicts(GPU, DRIVER, tmp_path)
    assert found == verdict


def damage(path, how):
    stored = json.loads(path.read_text())
    if how == "half":
        path.write_text(path.read_text()[:1000])
    elif how == "format":
        path.write_text(json.dumps(stored | {"format": 0}))
    elif how == "field":
        path.write_text(json.dumps(stored | {"colour": "red"}))
    elif how == "type":
        stored["readings"][0]["stale"] = "none"
        path.write_text(json.dumps(stored))
    elif how == "list":
        path.write_text("[1, 2]")
    elif how == "bytes":
        path.write_bytes(b"\xff\xfe\x00")
    elif how == "other":
        path.write_text(json.dumps(stored | {"gpu": "another"}))
    else:
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize(
    "how", ["half", "format", "field", "type", "list", "bytes", "other", "folder"]
)
def test_a_damaged_verdict_says_nothing(how, tmp_path):
    verdict = verdict_of(arch=89)
    path = verdict.save(tmp_path)
    assert choose(tmp_path, arch=89) == "nc"
    damage(path, how)
    assert choose(tmp_path, arch=89) == "coherent"


def test_a_verdict_that_others_could_have_written_says_nothing(tmp_path):
    path = verdict_of(arch=89).save(tmp_path)
    assert choose(tmp_path, arch=89) == "nc"
    tmp_path.chmod(0o777)
    assert choose(tmp_path, arch=89) == "coherent"
    assert verdict_of(arch=89).save(tmp_path) is None
    tmp_path.chmod(0o700)
    assert choose(tmp_path, arch=89) == "nc"
    path.parents[1].chmod(0o777)
    assert choose(tmp_path, arch=89) == "coherent"


def test_names_of_files_are_words(tmp_path):
    path = policy.verdict_path("NVIDIA ../../x y/z", "", 2, tmp_path)
    assert path.parent == tmp_path / "v2" / "litmus"
    assert re.fullmatch(r"[A-Za-z0-9.-]+", path.name)
    assert not path.name.startswith(".")


def test_the_driver_is_the_kernel_modules_version_if_known(tmp_path, monkeypatch):
    file = tmp_path / "version"
    monkeypatch.setattr(policy, "_KERNEL_DRIVER", Path(file))
    assert policy.driver_name(13000) == "CUDA 13.0"
    for line in (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed Aug 27\nGCC version: 12",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build",
    ):
        file.write_text(line)
        assert policy.driver_name(13000) == "580.82.07"
    file.write_text("")
    assert policy.driver_name(12080) == "CUDA 12.8"
