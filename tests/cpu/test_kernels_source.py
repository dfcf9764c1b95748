"""Flattening: one string, real file names, nothing unknown let through."""

from __future__ import annotations

import re

import pytest

from deepep_cupy._resources import kernel_dir
from deepep_cupy.engines.gpu.kernels import kernel_source, list_kernels, shape_constants
from deepep_cupy.errors import CompileError
from deepep_cupy.jit.source import flatten, generate, locate


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_h", ".cuh").replace("_c", ".cu")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_each_file_comes_once_and_lines_keep_their_names(tmp_path):
    write(
        tmp_path,
        main_c='int before;\n#include "asm/a.cuh"\n#include "asm/b.cuh"\nint after;\n',
        asm__a_h="#pragma once\nint a;\n",
        asm__b_h='#pragma once\n#include "asm/a.cuh"\nint b;\n',
    )
    text = flatten("main.cu", search=[tmp_path])
    main, a, b = (f"{tmp_path}/{name}" for name in ("main.cu", "asm/a.cuh", "asm/b.cuh"))
    assert text.splitlines() == [
        f'#line 1 "{main}"',
        "int before;",
        f'#line 1 "{a}"',
        "",
        "int a;",
        f'#line 3 "{main}"',
        f'#line 1 "{b}"',
        "",
        "",
        "int b;",
        f'#line 4 "{main}"',
        "int after;",
    ]
    lines = text.splitlines()
    assert lines[locate(text, main, 4) - 1] == "int after;"
    assert lines[locate(text, b, 3) - 1] == "int b;"
    assert locate(text, b, 9) is None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("#include <atomic>", "this form of include"),
        ('#include "asm/types.cuh" "x"', "this form of include"),
        ("#include NAME", "this form of include"),
        ('#include "../secret.h"', "a path that leaves cuda"),
        ('#include "/etc/passwd"', "a path that leaves cuda"),
        ('#if 1\n#include "asm/types.cuh"\n#endif', "an include inside #if"),
        ('#ifndef X\n#include "asm/types.cuh"\n#endif', "an include inside #if"),
        ('#import "asm/types.cuh"', "#import"),
        ('#include "asm/nothing.cuh"', "no file 'asm/nothing.cuh'"),
        ('#include "asm/loop.cuh"', "asm/loop.cuh -> asm/back.cuh -> asm/loop.cuh"),
        ('#include "generated/prelude.cuh"', "flattened without"),
    ],
)
def test_what_the_flattener_does_not_know_is_refused(line, said, tmp_path, monkeypatch):
    write(
        tmp_path,
        main_c=f"int x;\n{line}\n",
        asm__types_h="",
        asm__loop_h='#include "asm/back.cuh"\n',
        asm__back_h='#include "asm/loop.cuh"\n',
    )
    monkeypatch.setattr("deepep_cupy.jit.source.kernel_dir", lambda: tmp_path)
    with pytest.raises(CompileError) as raised:
        flatten("main.cu")
    assert said in str(raised.value)
    if "no file" not in said and "round" not in str(raised.value):
        assert re.search(r"deepep_cupy/cuda/main.cu:\d", str(raised.value))


def test_a_search_folder_replaces_files_and_may_use_system_headers(tmp_path):
    write(tmp_path, asm__types_h="#include <atomic>  // why\nusing u32 = unsigned;\n")
    write(tmp_path, main_c='#include "asm/types.cuh"\n#include "asm/thread.cuh"\n')
    text = flatten("main.cu", search=[tmp_path])
    assert "#include <atomic>" in text
    assert "__forceinline__" not in text, "ours came instead of the replacement"
    assert f'#line 1 "{tmp_path}/asm/types.cuh"' in text
    assert '#line 1 "deepep_cupy/cuda/asm/thread.cuh"' in text


@pytest.mark.parametrize("spec", list_kernels(), ids=lambda spec: spec.name)
def test_a_kernels_text_is_whole_and_names_no_folder_of_this_machine(spec):
    text = kernel_source(spec.name, "sm_90", num_ranks=3)
    assert text == kernel_source(spec.name, "sm_90", num_ranks=3)
    assert text == generate(spec, shape_constants("sm_90", num_ranks=3))
    assert re.match(rf"// deepep_cupy \S+, kernel {spec.name}, entry {spec.entry}\n", text)
    assert "#include" not in text
    assert "    kNumRanks = 3,\n" in text
    assert str(kernel_dir().parents[2]) not in text
    assert f"struct {spec.struct.name} {{" in text
    assert text != kernel_source(spec.name, "sm_90", num_ranks=4)


def test_every_line_directive_names_a_real_file():
    for spec in list_kernels():
        text = kernel_source(spec.name)
        shown = set(re.findall(r'#line \d+ "deepep_cupy/cuda/([^"]+)"', text))
        assert spec.source in shown
        missing = [name for name in shown if not (kernel_dir() / name).is_file()]
        assert not missing
