"""The figures of ``bench tune``: what is kept, what of it is believed, and what is chosen."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from deepep_cupy.engines.gpu import tuning
from deepep_cupy.engines.gpu.grid import GridPlan
from deepep_cupy.engines.gpu.tuning import Key, Tuning, best_blocks, best_tokens, load, save

KEY = Key("NVIDIA H200", 2, 1, 14336)
FIGURES = Tuning(24, 2, 4)


def test_what_was_kept_is_found_for_the_like_alone(tmp_path):
    path = save(KEY, FIGURES, tmp_path)
    assert path.parent.name == "tuning"
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert load(KEY, tmp_path) == FIGURES
    for other in ({"gpu": "NVIDIA B200"}, {"num_ranks": 4}, {"ranks_on_gpu": 2}, {"row_bytes": 8}):
        key = replace(KEY, **other)
        assert load(key, tmp_path) == tuning.shipped(key.gpu)
    save(KEY, replace(FIGURES, blocks=16), tmp_path)
    assert load(KEY, tmp_path).blocks == 16


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"gpu": "NVIDIA H100"},
        {"row_bytes": 8},
        {"blocks": 0},
        {"blocks": True},
        {"blocks": 24.0},
        {"dispatch_tokens": -1},
        {"combine_tokens": 1 << 20},
        {"combine_tokens": None},
        None,
        "nothing",
        "[]",
    ],
)
def test_damaged_figures_are_not_believed(change, tmp_path, caplog):
    path = save(KEY, FIGURES, tmp_path)
    text = path.read_text()
    if isinstance(change, dict):
        path.write_text(json.dumps(json.loads(text) | change))
    else:
        path.write_text(text[:-20] if change is None else change)
    assert load(KEY, tmp_path) == tuning.SHIPPED["NVIDIA H200"]
    assert f"{path} is not used" in caplog.text


def test_a_folder_that_others_may_write_is_not_read(tmp_path):
    path = save(KEY, FIGURES, tmp_path)
    tmp_path.chmod(0o777)
    assert load(KEY, tmp_path) == tuning.SHIPPED["NVIDIA H200"]
    assert save(KEY, FIGURES, tmp_path) is None
    assert path.exists()


def test_figures_decide_numbers_of_blocks_alone():
    plan = GridPlan(132, 1, None, FIGURES)
    assert (plan.most, plan.dispatch(64), plan.combine(64)) == (24, 24, 16)
    assert (plan.dispatch(20), plan.combine(20), plan.combine(1), plan.combine(0)) == (10, 5, 1, 1)
    assert replace(plan, wanted=8).most == 8
    assert replace(plan, ranks_on_gpu=8).most == 16
    assert GridPlan(132, 1, None, tuning.SHIPPED["NVIDIA H200"]).most == GridPlan(132, 1, None).most
    assert set(asdict(FIGURES)) == {"blocks", "dispatch_tokens", "combine_tokens"}


def test_the_fewest_blocks_that_are_nearly_best():
    times = {8: [312, 351], 16: [184, 191], 24: [186, 193], 64: [184, 190]}
    assert best_blocks(times) == 16
    assert best_blocks(times | {16: [184, 250]}) == 24
    assert best_blocks({8: [100, 200], 16: [150, 150], 32: [200, 100]}) == 16
    assert best_blocks({4: [7.0]}) == 4


def test_the_most_tokens_that_are_best():
    assert best_tokens({1: 10.0, 2: 10.05, 4: 12.0, 8: 14.0}) == 2
    assert best_tokens({1: 10.0, 2: 9.0, 4: 12.0}) == 2
