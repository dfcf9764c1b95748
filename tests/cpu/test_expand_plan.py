"""Blocks and slices of the local kernels."""

import pytest

from deepep_cupy.engines.gpu.grid import GridPlan, cast_chunks, local_blocks, num_slices


@pytest.mark.parametrize(
    ("num_sms", "ranks", "warps", "blocks"),
    [(132, 1, 1, 1), (132, 1, 5, 2), (132, 1, 10**9, 132), (132, 2, 10**9, 66), (1, 2, 9, 1)],
)
def test_local_kernels_take_the_ranks_share_of_the_gpu(num_sms, ranks, warps, blocks):
    assert local_blocks(GridPlan(num_sms, ranks, wanted=3), warps) == blocks


def test_no_work_is_one_block():
    assert local_blocks(GridPlan(132, 1, None), 0) == 1


@pytest.mark.parametrize(
    ("hidden", "itemsize", "access", "chunks"),
    [(7168, 2, 16, 7), (7168, 4, 16, 14), (7168, 2, 2, 14), (1, 4, 4, 1), (1032, 2, 16, 2)],
)
def test_chunks_cover_the_row(hidden, itemsize, access, chunks):
    assert cast_chunks(hidden, itemsize, access) == chunks


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 4096, 65536, 1 << 22])
@pytest.mark.parametrize("experts", [1, 32, 256, 4096, 1 << 20])
def test_slices_are_few_where_experts_are_many(tokens, experts):
    slices = num_slices(tokens, experts)
    assert 1 <= slices <= 1024
    assert slices == 1 or slices * experts <= 1 << 20
    assert slices <= max(1, -(-tokens // 16))


def test_usual_sizes_use_all_slices():
    assert num_slices(32768, 32) == 1024
    assert num_slices(128, 32) == 8


def test_small_batches_have_a_token_a_block():
    plan = GridPlan(132, 1, None)
    assert [plan.dispatch(n) for n in (0, 1, 8, 9, 20, 4096)] == [1, 1, 1, 9, 20, 21]
    assert [plan.dispatch(n, counts=False) for n in (0, 1, 8, 4096)] == [1, 1, 8, 21]
    assert [plan.combine(n) for n in (0, 1, 3, 20, 4096)] == [1, 1, 3, 20, 21]
    assert GridPlan(132, 8, wanted=64).dispatch(12) == 12
    assert GridPlan(132, 8, wanted=64).combine(4096) == 16


def test_few_blocks_leave_the_cast_to_a_kernel_of_its_own():
    assert GridPlan(132, 1, None).casts_on_the_way(4096, 2)  # 21 blocks
    assert not GridPlan(132, 1, wanted=8).casts_on_the_way(4096, 2)
    assert not GridPlan(132, 1, wanted=10).casts_on_the_way(4096, 2)
    assert GridPlan(132, 1, wanted=11).casts_on_the_way(4096, 2)
    assert GridPlan(132, 1, wanted=8).casts_on_the_way(1, 2)
    assert GridPlan(132, 1, wanted=8).casts_on_the_way(0, 2)


def test_many_blocks_cast_on_the_way_whatever_the_number_of_tokens():
    assert GridPlan(132, 1, None).casts_on_the_way(1 << 20, 2)
    assert GridPlan(132, 1, None).casts_on_the_way(4096, 1)
    assert not GridPlan(132, 1, None).casts_on_the_way(1 << 20, 1)  # nothing goes over a link
