"""The integers of a dispatch, against loops that are too simple to be wrong."""

import numpy as np
import pytest

from deepep_cupy.protocol import routing
from deepep_cupy.protocol.headers import RefusalCode

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
    mask = routing.mask_of_choices(idx, EXPERTS, RANKS)
    counts = routing.count_per_expert(idx, EXPERTS)
    assert mask.shape == (num_tokens, RANKS)
    assert counts.dtype == np.int32
    for token, row in enumerate(idx):
        wanted = {int(expert) // LOCAL for expert in row if expert >= 0}
        assert set(np.flatnonzero(mask[token])) == wanted
    for expert in range(EXPERTS):
        assert counts[expert] == (idx == expert).sum()
    for rank in range(RANKS):
        local = routing.local_choices(idx, rank, LOCAL)
        assert local.dtype == dtype
        for got, want in zip(local.flat, idx.flat, strict=True):
            mine = want >= 0 and want // LOCAL == rank
            assert got == (want - rank * LOCAL if mine else -1)


def test_entries_outside_count_for_nothing():
    idx = np.array([[EXPERTS, -2, 5, -1]])
    assert routing.mask_of_choices(idx, EXPERTS, RANKS).tolist() == [[False, True, False]]
    assert routing.count_per_expert(idx, EXPERTS).sum() == 1


def test_send_rows_are_the_rows_of_the_receivers():
    masks = [np.random.default_rng(rank).random((9 + rank, RANKS)) < 0.5 for rank in range(RANKS)]
    counts = np.array([mask.sum(axis=0) for mask in masks])
    sent = [routing.send_rows(mask, counts, rank) for rank, mask in enumerate(masks)]
    for receiver in range(RANKS):
        row = 0
        for rank, mask in enumerate(masks):
            for token in range(len(mask)):
                assert sent[rank][token, receiver] == (row if mask[token, receiver] else -1)
                row += mask[token, receiver]
        assert routing.recv_offsets(counts[:, receiver])[-1] == row


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
    assert routing.check_experts(idx, EXPERTS) is None
    idx[21] = idx[17] = row
    refusal = routing.check_experts(idx, EXPERTS)
    assert (refusal.code, refusal.value) == (code, 17)


def test_nothing_is_allowed():
    assert routing.check_experts(np.zeros((0, K), np.int64), EXPERTS) is None
    assert routing.check_experts(np.full((5, K), -1), EXPERTS) is None


@pytest.mark.parametrize(("value", "wanted"), [(0, 0), (1, 8), (8, 8), (9, 16)])
def test_round_up(value, wanted):
    assert routing.round_up(value, 8) == wanted
