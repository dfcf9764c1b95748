"""Integers of a dispatch, which the host engine takes from the reference, against simple loops."""

import numpy as np
import pytest

from deepep_cupy.engines.host.engine import check_experts
from deepep_cupy.engines.host.moves import rank_bounds
from deepep_cupy.protocol.headers import RefusalCode
from deepep_cupy.reference.layout import get_dispatch_layout, local_choices, send_rows

RANKS, EXPERTS, K = 3, 12, 4
LOCAL = EXPERTS // RANKS


def choices(seed, num_tokens, dtype):
    rng = np.random.default_rng(seed)
    idx = np.argsort(rng.random((num_tokens, EXPERTS)), axis=1)[:, :K].astype(dtype)
    idx[rng.random(idx.shape) < 0.4] = -1
    return idx


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("num_tokens", [0, 1, 50])
def test_mask_counts_and_local_choices(dtype, num_tokens):
    idx = choices(num_tokens, num_tokens, dtype)
    layout = get_dispatch_layout(idx, EXPERTS, RANKS)
    mask, counts = layout.is_token_in_rank, layout.num_tokens_per_expert
    assert mask.shape == (num_tokens, RANKS)
    assert counts.dtype == np.int32
    for token, row in enumerate(idx):
        wanted = {int(expert) // LOCAL for expert in row if expert >= 0}
        assert set(np.flatnonzero(mask[token])) == wanted
    for expert in range(EXPERTS):
        assert counts[expert] == (idx == expert).sum()
    for rank in range(RANKS):
        local = local_choices(idx, rank, LOCAL)
        assert local.dtype == dtype
        for got, want in zip(local.flat, idx.flat, strict=True):
            mine = want >= 0 and want // LOCAL == rank
            assert got == (want - rank * LOCAL if mine else -1)


def test_entries_outside_count_for_nothing():
    idx = np.array([[EXPERTS, -2, 5, -1]])
    layout = get_dispatch_layout(idx, EXPERTS, RANKS)
    assert layout.is_token_in_rank.tolist() == [[False, True, False]]
    assert layout.num_tokens_per_expert.sum() == 1


def test_send_rows_are_the_rows_of_the_receivers():
    masks = [np.random.default_rng(rank).random((9 + rank, RANKS)) < 0.5 for rank in range(RANKS)]
    counts = np.array([mask.sum(axis=0) for mask in masks])
    sent = [send_rows(mask, counts, rank) for rank, mask in enumerate(masks)]
    for receiver in range(RANKS):
        row = 0
        for rank, mask in enumerate(masks):
            for token in range(len(mask)):
                assert sent[rank][token, receiver] == (row if mask[token, receiver] else -1)
                row += mask[token, receiver]
        assert rank_bounds(counts[:, receiver])[-1] == row


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ([EXPERTS, 0, 1, 2], RefusalCode.EXPERT_OUT_OF_RANGE),
        ([0, 1, 2, -2], RefusalCode.EXPERT_OUT_OF_RANGE),
        ([2**31 - 1, 0, 1, 2], RefusalCode.EXPERT_OUT_OF_RANGE),
        ([5, 1, 2, 5], RefusalCode.DUPLICATE_EXPERT),
        ([-1, 0, -1, 0], RefusalCode.DUPLICATE_EXPERT),
    ],
)
def test_the_first_bad_token_is_found(row, code):
    idx = choices(0, 30, np.int64)
    assert check_experts(idx, EXPERTS) is None
    idx[21] = idx[17] = row
    refusal = check_experts(idx, EXPERTS)
    assert (refusal.code, refusal.value) == (code, 17)


def test_nothing_is_allowed():
    assert check_experts(np.zeros((0, K), np.int64), EXPERTS) is None
    assert check_experts(np.full((5, K), -1), EXPERTS) is None
