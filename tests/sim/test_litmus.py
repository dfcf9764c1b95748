"""What the simulator allows and forbids: litmus tests of the memory model, copies and barriers.

``clean`` programs must give their one right outcome under all seeds, with no fault; the others
must be caught, and the surprising outcomes that the model allows must really be seen.
"""

import pytest

from simulator.litmus import run_litmus
from simulator.machine import Loads

UNORDERED = "read without being ordered after the write"
OVERWRITTEN = "overwritten while it may still be read"
NO_PROXY_READ = "no proxy fence between a write and a bulk copy's read"
NO_PROXY_SHARED = "no proxy fence between an ordinary access to shared memory and a bulk copy"

SEND = "FIRST { st_u64(x, 1); st_release_sys_u64(f, 1); }"
RECEIVE = """FIRST {
    WAIT(ld_relaxed_sys_u64(f) == 1);
    ld_acquire_sys_u64(f);
    st_u64(out, ld_u64(x));
}"""


def clean(outcomes, *expected):
    assert not outcomes.faults, next(iter(outcomes.example.values())).text
    assert set(outcomes.seen) == set(expected)


def two_ranks(sender, receiver, **how):
    return run_litmus([(0, 0, sender), (1, 0, receiver)], num_out=1, **how)


# ------------------------------------------------------------------------------- message passing


def test_release_and_acquire_pass_a_message():
    clean(two_ranks(SEND, RECEIVE), (1,))


def test_a_fence_before_a_relaxed_store_releases():
    sender = "FIRST { st_u64(x, 1); fence_acq_rel_sys(); st_relaxed_sys_u64(f, 1); }"
    clean(two_ranks(sender, RECEIVE), (1,))


def test_a_fence_after_a_relaxed_load_acquires():
    receiver = RECEIVE.replace("ld_acquire_sys_u64(f)", "fence_acq_rel_sys()")
    clean(two_ranks(SEND, receiver), (1,))


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [
        (SEND.replace("release", "relaxed"), RECEIVE),
        (SEND.replace("st_release_sys", "st_release_gpu"), RECEIVE),
        (
            "FIRST { st_u64(x, 1); fence_acq_rel_gpu(); st_relaxed_sys_u64(f, 1); }",
            RECEIVE,
        ),
        ("FIRST { st_relaxed_sys_u64(f, 1); st_u64(x, 1); }", RECEIVE),
        (SEND, RECEIVE.replace("ld_acquire_sys_u64(f);", "")),
        (SEND, RECEIVE.replace("ld_acquire_sys", "ld_acquire_gpu")),
    ],
    ids=["relaxed", "gpu-store", "gpu-fence", "after", "no-acquire", "gpu-acquire"],
)
def test_half_a_message_is_caught_and_may_read_old_data(sender, receiver):
    outcomes = two_ranks(sender, receiver, seeds=100)
    assert outcomes.num_faulty == 100
    assert outcomes.faults[UNORDERED] > 90
    assert (0,) in outcomes.seen


def test_gpu_scope_is_enough_on_one_gpu():
    sender = SEND.replace("sys", "gpu")
    receiver = RECEIVE.replace("sys", "gpu")
    clean(run_litmus([(0, 0, sender), (0, 1, receiver)], num_out=1), (1,))


def test_a_later_overwrite_needs_order_too():
    """The reader says it is done: only with release may the writer write again."""
    writer = """FIRST {
        st_u64(x, 1); st_release_sys_u64(f, 1);
        WAIT(ld_relaxed_sys_u64(g) == 1);
        ld_acquire_sys_u64(g);
        st_u64(x, 2);
    }"""
    done = "FIRST { st_release_sys_u64(g, 1); }"
    clean(two_ranks(writer, RECEIVE + done), (1,))
    outcomes = two_ranks(writer, RECEIVE + done.replace("release", "relaxed"), seeds=50)
    assert outcomes.faults[OVERWRITTEN] == 50


# ------------------------------------------------------------------------- through other threads


def test_order_is_cumulative_through_a_block():
    sender = """
        if (thread_index() == 9) st_u64(x, 1);
        block_barrier();
        FIRST { fence_acq_rel_sys(); st_relaxed_sys_u64(f, 1); }"""
    clean(two_ranks(sender, RECEIVE), (1,))
    receiver = """
        FIRST { WAIT(ld_relaxed_sys_u64(f) == 1); ld_acquire_sys_u64(f); }
        block_barrier();
        if (thread_index() == 5) st_u64(out, ld_u64(x));"""
    clean(two_ranks(sender, receiver), (1,))


def test_a_fence_in_another_thread_orders_nothing():
    sender = """
        if (thread_index() == 9) { st_u64(x, 1); fence_acq_rel_sys(); }
        block_barrier();
        FIRST st_relaxed_sys_u64(f, 1);"""
    assert two_ranks(sender, RECEIVE, seeds=50).faults[UNORDERED] == 50


def test_order_is_cumulative_through_scopes():
    roles = [
        (0, 0, "FIRST { st_u64(x, 1); st_release_gpu_u64(g, 1); }"),
        (
            0,
            1,
            """FIRST {
            WAIT(ld_relaxed_gpu_u64(g) == 1);
            ld_acquire_gpu_u64(g);
            st_release_sys_u64(f, 1); }""",
        ),
        (1, 0, RECEIVE),
    ]
    clean(run_litmus(roles, num_out=1), (1,))
    roles[1] = (0, 1, roles[1][2].replace("ld_acquire_gpu_u64(g);", ""))
    assert run_litmus(roles, num_out=1, seeds=50).faults[UNORDERED] == 50


def test_the_last_block_acquires_what_the_others_released():
    role = """
        if (thread_index() == 3) st_u64(x + block_index(), 1);
        block_barrier();
        FIRST {
            u32* counter = reinterpret_cast<u32*>(h);
            if (atom_add_acq_rel_gpu_u32(counter, 1) == 2) {
                st_u64(out, ld_u64(x) + ld_u64(x + 1) + ld_u64(x + 2));
            }
        }"""
    clean(run_litmus([(0, block, role) for block in range(3)], num_out=1), (3,))
    counted = role.replace("atom_add_acq_rel_gpu_u32(counter, 1)", "0; }")
    counted = role.replace(
        "if (atom_add_acq_rel_gpu_u32(counter, 1) == 2) {",
        "red_add_relaxed_gpu_u32(counter, 1); fence_acq_rel_gpu();"
        "if (ld_relaxed_gpu_u32(counter) == 3) {",
    )
    outcomes = run_litmus([(0, block, counted) for block in range(3)], num_out=1, seeds=100)
    assert outcomes.faults[UNORDERED] > 10  # a red neither releases nor acquires


def test_a_warp_barrier_orders_memory_and_a_ballot_does_not():
    role = """
        if (thread_index() == 9) st_u64(x, 1);
        warp_barrier();
        FIRST st_u64(out, ld_u64(x));"""
    clean(run_litmus([(0, 0, role)], num_out=1), (1,))
    role = role.replace("warp_barrier()", "warp_ballot(true)")
    assert run_litmus([(0, 0, role)], num_out=1, seeds=50).faults[UNORDERED] == 50


def test_kernels_of_one_stream_follow_each_other():
    role = "FIRST { u64 v = ld_u64(x); st_u64(x, v + 1); st_u64(out, v); }"
    clean(run_litmus([(0, 0, role)], num_out=1, launches=3), (2,))


# ------------------------------------------------------------------------------ control words


def test_stores_become_visible_late_and_out_of_order():
    first = "FIRST { st_relaxed_sys_u64(f, 1); st_relaxed_sys_u64(g, 1); }"
    second = "FIRST { u64 b = ld_relaxed_sys_u64(g); st_u64(out, b * 10 + ld_relaxed_sys_u64(f)); }"
    outcomes = two_ranks(first, second, seeds=600)
    assert set(outcomes.seen) == {(0,), (1,), (10,), (11,)}
    assert not outcomes.faults
    first = first.replace("; st_relaxed_sys_u64(g", "; fence_acq_rel_sys(); st_relaxed_sys_u64(g")
    second = second.replace("; st_u64(out", "; fence_acq_rel_sys(); st_u64(out")
    outcomes = two_ranks(first, second, seeds=600)
    assert set(outcomes.seen) == {(0,), (1,), (11,)}


def test_store_buffering_is_allowed():
    roles = [
        (
            0,
            0,
            "FIRST { st_relaxed_sys_u64(f, 1); fence_acq_rel_sys();"
            " st_u64(out, ld_relaxed_sys_u64(g)); }",
        ),
        (
            1,
            0,
            "FIRST { st_relaxed_sys_u64(g, 1); fence_acq_rel_sys();"
            " st_u64(out + 1, ld_relaxed_sys_u64(f)); }",
        ),
    ]
    assert set(run_litmus(roles, seeds=600).seen) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_independent_readers_may_disagree():
    read = (
        "FIRST {{ u64 a = ld_acquire_sys_u64({0}), b = ld_acquire_sys_u64({1});"
        " st_u64(out + {2}, a * 10 + b); }}"
    )
    roles = [
        (0, 0, "FIRST st_release_sys_u64(f, 1);"),
        (1, 0, "FIRST st_release_sys_u64(g, 1);"),
        (2, 0, read.format("f", "g", 0)),
        (2, 1, read.format("g", "f", 1)),
    ]
    assert (10, 10) in run_litmus(roles, seeds=1500).seen


def test_one_word_never_goes_back():
    writer = "FIRST for (u64 i = 1; i < 5; ++i) st_relaxed_sys_u64(f, i);"
    reader = """
        FIRST { u64 a = ld_relaxed_sys_u64(f), b = ld_relaxed_sys_u64(f); st_u64(out, a <= b); }
        u64 before = ld_relaxed_sys_u64(f);
        FIRST st_u64(x, before);
        block_barrier();
        if (thread_index() == 7) st_u64(out + 1, ld_relaxed_sys_u64(f) >= ld_u64(x));"""
    clean(run_litmus([(0, 0, writer), (1, 0, reader)], num_out=2), (1, 1))


def test_atomics_lose_nothing():
    role = "red_add_relaxed_gpu_u32(reinterpret_cast<u32*>(f), 1);"
    last = "FIRST { WAIT(ld_relaxed_gpu_u32(reinterpret_cast<u32*>(f)) == 64); st_u64(out, 64); }"
    clean(run_litmus([(0, 0, role), (0, 1, role), (0, 2, last)], num_out=1, seeds=60), (64,))


# ---------------------------------------------------------------------------- words of 16 bytes

# Round after round into one place; the reader takes what it finds, and says whether all of it is
# of one round.
WRITE_ROUNDS = """FIRST for (u32 i = 1; i < 5; ++i) {
    st_relaxed_sys_b128(rows, Vec16{{i, i, i, i}});
}"""
READ_ROUND = """FIRST for (u32 i = 0; i < 6; ++i) {
    Vec16 v = ld_relaxed_sys_b128(rows);
    bool whole = v.word[0] == v.word[1] && v.word[1] == v.word[2] && v.word[2] == v.word[3];
    if (i == 5) st_u64(out, v.word[3]);
    if (!whole) st_u64(out + 1, 1);
}"""


def test_a_word_of_sixteen_bytes_comes_late_but_whole():
    outcomes = two_ranks(WRITE_ROUNDS, READ_ROUND)
    assert not outcomes.faults
    outcomes = run_litmus([(0, 0, WRITE_ROUNDS), (1, 0, READ_ROUND)])
    assert set(outcomes.seen) == {(i, 0) for i in range(5)}


@pytest.mark.parametrize(
    "store", ["st_relaxed_sys_v4(rows, v)", "st_relaxed_sys_v2_u64(rows, low, high)"]
)
def test_a_strong_vector_comes_in_pieces(store):
    writer = WRITE_ROUNDS.replace(
        "st_relaxed_sys_b128(rows, Vec16{{i, i, i, i}})",
        f"Vec16 v = {{{{i, i, i, i}}}}; u64 low = i | u64(i) << 32, high = low; {store}",
    )
    reader = READ_ROUND
    if "v2" in store:
        reader = reader.replace(
            "Vec16 v = ld_relaxed_sys_b128(rows);",
            "u64 l = ld_relaxed_sys_u64(reinterpret_cast<u64*>(rows)),"
            " h = ld_relaxed_sys_u64(reinterpret_cast<u64*>(rows) + 1);"
            " Vec16 v = {{u32(l), u32(l >> 32), u32(h), u32(h >> 32)}};",
        )
    reader = reader.replace("ld_relaxed_sys_b128", "ld_relaxed_sys_v4")
    outcomes = run_litmus([(0, 0, writer), (1, 0, reader)])
    assert not outcomes.faults
    assert {torn for _, torn in outcomes.seen} == {0, 1}


def test_a_word_of_sixteen_bytes_orders_nothing_else():
    sender = "FIRST { st_u64(x, 1); st_relaxed_sys_b128(rows, Vec16{{1, 1, 1, 1}}); }"
    receiver = "FIRST { WAIT(ld_relaxed_sys_b128(rows).word[3] == 1); st_u64(out, ld_u64(x)); }"
    assert two_ranks(sender, receiver, seeds=50).faults[UNORDERED] == 50


# ------------------------------------------------------------------------------- bulk copies

FILL = """
    if (thread_index() < 2) st_shared_v4(stage + 16 * (thread_index() & 1), Vec16{{7, 0, 0, 0}});
    fence_proxy_async_shared();
    block_barrier();
"""
PUSH = (
    FILL + "FIRST { bulk_store(rows, stage, 32); bulk_commit(); bulk_wait<0>();"
    " st_release_sys_u64(f, 1); }"
)
TAKE = """FIRST {
    WAIT(ld_relaxed_sys_u64(f) == 1);
    ld_acquire_sys_u64(f);
    st_u64(out, ld_v4(rows).word[0]);
}"""


def test_a_bulk_store_is_visible_after_its_group():
    clean(two_ranks(PUSH, TAKE), (7,))


def test_waiting_for_the_reads_of_a_bulk_store_is_not_enough():
    outcomes = two_ranks(PUSH.replace("bulk_wait<0>", "bulk_wait_read<0>"), TAKE, seeds=100)
    assert outcomes.faults[UNORDERED] > 30
    assert (0,) in outcomes.seen
    assert outcomes.faults["unfinished copies"] == 100


def test_groups_belong_to_the_thread_that_issued_them():
    push = PUSH.replace("bulk_wait<0>(); st_release_sys_u64(f, 1);", "")
    push += "if (thread_index() == 1) { bulk_wait<0>(); st_release_sys_u64(f, 1); }"
    assert two_ranks(push, TAKE, seeds=50).faults["unfinished copies"] == 50


def test_ordinary_stores_to_shared_memory_need_a_proxy_fence():
    push = PUSH.replace("fence_proxy_async_shared();", "")
    assert two_ranks(push, TAKE, seeds=50).faults[NO_PROXY_SHARED] == 50
    after = push.replace("FIRST {", "FIRST { fence_proxy_async_shared();")
    assert two_ranks(after, TAKE, seeds=50).faults[NO_PROXY_SHARED] == 50  # another thread's stores


def test_a_stage_is_reused_only_when_it_has_been_read():
    push = PUSH.replace(
        "bulk_commit();",
        "bulk_commit(); bulk_wait_read<0>(); st_shared_v4(stage, Vec16{{9, 0, 0, 0}});",
    )
    clean(two_ranks(push, TAKE), (7,))
    outcomes = two_ranks(push.replace("bulk_wait_read<0>();", ""), TAKE, seeds=200)
    assert outcomes.num_faulty == 200
    assert outcomes.faults["shared memory overwritten while it may still be read"] > 5
    assert (9,) in outcomes.seen


PULL = """
    FIRST { mbarrier_init(loaded, 1); fence_mbarrier_init(); }
    block_barrier();
    FIRST {
        WAIT(ld_relaxed_sys_u64(f) == 1);
        ld_acquire_sys_u64(f);
        fence_proxy_async_global();
        mbarrier_arrive_expect_bytes(loaded, 32);
        bulk_load(stage, rows, 32, loaded);
    }
    WAIT(mbarrier_try_wait_parity(loaded, 0));
    if (thread_index() == 4) st_u64(out, ld_shared_v4(stage).word[0]);
"""
STORE_ROWS = (
    "FIRST { st_v4(rows, Vec16{{7, 0, 0, 0}}); st_v4(rows + 16, Vec16{{7, 0, 0, 0}}); "
    "st_release_sys_u64(f, 1); }"
)


def test_a_bulk_load_brings_what_was_acquired():
    clean(two_ranks(STORE_ROWS, PULL), (7,))


def test_a_bulk_load_of_acquired_rows_needs_a_proxy_fence():
    outcomes = two_ranks(STORE_ROWS, PULL.replace("fence_proxy_async_global();", ""), seeds=50)
    assert outcomes.faults[NO_PROXY_READ] == 50
    early = PULL.replace("fence_proxy_async_global();", "").replace(
        "FIRST {\n        WAIT", "FIRST { fence_proxy_async_global();\n        WAIT"
    )
    assert two_ranks(STORE_ROWS, early, seeds=50).faults[NO_PROXY_READ] == 50


def test_a_bulk_load_needs_the_acquire():
    outcomes = two_ranks(STORE_ROWS, PULL.replace("ld_acquire_sys_u64(f);", ""), seeds=50)
    assert outcomes.faults[UNORDERED] == 50


def test_a_loaded_stage_is_read_only_after_its_mbarrier():
    pull = PULL.replace("WAIT(mbarrier_try_wait_parity(loaded, 0));\n", "")
    pull += "FIRST WAIT(mbarrier_try_wait_parity(loaded, 0));"
    outcomes = two_ranks(STORE_ROWS, pull, seeds=100)
    assert outcomes.num_faulty == 100
    assert all("shared memory" in kind for kind in outcomes.faults)


def test_an_mbarrier_must_be_fenced_before_a_copy_signals_it():
    outcomes = two_ranks(STORE_ROWS, PULL.replace("fence_mbarrier_init();", ""), seeds=10)
    assert outcomes.faults["fatal"] == 10


def test_bulk_stores_complete_in_any_order():
    push = PUSH.replace(
        "bulk_store(rows, stage, 32); bulk_commit();",
        "bulk_store(rows, stage, 16); bulk_commit();"
        "bulk_store(rows + 16, stage, 16); bulk_commit();",
    )
    peek = "FIRST st_u64(out, ld_v4(rows).word[0] * 10 + ld_v4(rows + 16).word[0]);"
    outcomes = two_ranks(push, peek, seeds=800)
    assert set(outcomes.seen) == {(0,), (7,), (70,), (77,)}


def test_no_block_ends_with_a_copy_in_flight():
    pull = PULL[: PULL.index("WAIT(mbarrier_try_wait")].rstrip()
    outcomes = two_ranks(STORE_ROWS, pull, seeds=100)
    assert outcomes.faults["fatal"] > 50
    assert "in flight" in outcomes.example["fatal"].text


# ------------------------------------------------------------------------- loads that go through L1

# The consumer has read the row before, so that its SM may keep the line.
WARM = (
    "FIRST { LOAD(rows); st_relaxed_sys_u64(g, 1); WAIT(ld_relaxed_sys_u64(f) == 1); ACQUIRE "
    "st_u64(out, LOAD(rows).word[0]); }"
)
PRODUCE = (
    "FIRST { WAIT(ld_acquire_sys_u64(g) == 1); st_v4(rows, Vec16{{7, 0, 0, 0}}); "
    "st_release_sys_u64(f, 1); }"
)


@pytest.mark.parametrize("loads", [Loads.HOPPER, Loads.STRICT])
@pytest.mark.parametrize(
    ("load", "acquire", "stale"),
    [
        ("ld_v4", "ld_acquire_sys_u64(f);", False),
        ("ld_v4", "", True),
        ("ld_no_allocate_v4", "", False),
        ("ld_nc_no_allocate_l2_256_v4", "", False),
        ("ld_nc_no_allocate_l2_256_v4", "ld_acquire_sys_u64(f);", False),
        ("ld_relaxed_sys_v4", "", False),
    ],
)
def test_stale_lines_as_measured_on_hopper(loads, load, acquire, stale):
    consumer = WARM.replace("LOAD", load).replace("ACQUIRE", acquire)
    seen = two_ranks(PRODUCE, consumer, loads=loads, seeds=150).seen
    assert ((0,) in seen) == stale
    assert (7,) in seen


@pytest.mark.parametrize("loads", [Loads.HOPPER, Loads.STRICT])
def test_a_neighbour_blocks_acquire_hides_a_missing_one_on_hopper_only(loads):
    consumer = """FIRST {
        ld_v4(rows); st_relaxed_sys_u64(g, 1);
        WAIT(ld_relaxed_sys_u64(h) == 1);
        st_u64(out, ld_v4(rows).word[0]);
    }"""
    neighbour = (
        "FIRST { WAIT(ld_relaxed_sys_u64(f) == 1); ld_acquire_sys_u64(f);"
        " st_release_gpu_u64(h, 1); }"
    )
    roles = [(0, 0, PRODUCE), (1, 0, consumer), (1, 1, neighbour)]
    at = {"h": 1}
    outcomes = run_litmus(roles, num_out=1, loads=loads, blocks_per_sm=2, seeds=150, at=at)
    assert ((0,) in outcomes.seen) == (loads == Loads.STRICT)


def test_the_ptx_model_wants_an_acquire_whatever_the_load():
    consumer = WARM.replace("LOAD", "ld_no_allocate_v4").replace("ACQUIRE", "")
    assert two_ranks(PRODUCE, consumer, seeds=50).faults[UNORDERED] == 50


# ---------------------------------------------------------------- plain accesses to shared memory


def test_plain_accesses_to_shared_memory_need_a_barrier():
    role = """
        u32* cell = reinterpret_cast<u32*>(stage);
        cell[thread_index()] = thread_index();
        block_barrier();
        if (thread_index() == 3) st_u64(out, cell[31 - thread_index()]);"""
    clean(run_litmus([(0, 0, role)], num_out=1, seeds=30), (28,))
    for nothing in ("", "warp_ballot(true);"):
        racy = role.replace("block_barrier();", nothing)
        outcomes = run_litmus([(0, 0, racy)], num_out=1, seeds=30)
        assert outcomes.num_faulty == 30
        assert any("shared memory" in kind for kind in outcomes.faults)


def test_shared_atomics_do_not_race_with_each_other():
    role = """
        u32* cell = reinterpret_cast<u32*>(stage);
        FIRST *cell = 0;
        block_barrier();
        shared_add(cell, 2);
        block_barrier();
        FIRST st_u64(out, *cell);"""
    clean(run_litmus([(0, 0, role)], num_out=1, seeds=30), (64,))
    first, _, last = role.rpartition("block_barrier();")
    assert run_litmus([(0, 0, first + last)], num_out=1, seeds=30).num_faulty == 30


def test_shared_memory_starts_unwritten():
    outcomes = run_litmus([(0, 0, "FIRST st_u64(out, *stage);")], num_out=1, seeds=5)
    assert outcomes.faults["read of shared memory that nobody has written"] == 5


# ------------------------------------------------------------------------------ execution


def test_time_passes_only_when_nobody_can_run():
    wait = """FIRST {
        u64 end = global_timer() + 5000000;
        u64 polls = 0;
        bool late = false;
        while (ld_relaxed_sys_u64(f) != 1) {
            poll_pause();
            if (++polls % 3 == 0 && global_timer() > end) { late = true; break; }
        }
        st_u64(out, late);
    }"""
    clean(two_ranks("FIRST st_relaxed_sys_u64(f, 1);", wait), (0,))
    clean(two_ranks("", wait, seeds=50), (1,))


def test_a_deadlock_says_where_everybody_waits():
    outcomes = two_ranks("block_barrier();", "FIRST WAIT(ld_relaxed_sys_u64(f) == 1);", seeds=5)
    assert outcomes.faults["hang"] == 5
    text = outcomes.example["hang"].text
    assert "rank 1: in operation 1" in text
    assert "threads 0: polls at" in text
    assert "f holds 0x0" in text


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("if (lane_index() < 4) warp_ballot(true);", "has exited while others of its warp wait"),
        ("if (lane_index() < 4) warp_ballot(true); else warp_barrier();", "different operations"),
        ("FIRST st_u64(x + 4096, 1);", "outside of region"),
        ("FIRST *x = 1;", "without a wrapper"),
        ("FIRST st_u64(reinterpret_cast<u64*>(rows + 4), 1);", "misaligned"),
        ("FIRST st_u64(reinterpret_cast<u64*>(stage), 1);", "not an address of global memory"),
        ("FIRST { st_relaxed_sys_u64(f, 1); ld_relaxed_sys_u32(reinterpret_cast<u32*>(f)); }",
         "different sizes"),
        ("FIRST { st_relaxed_sys_b128(rows, Vec16{{1, 2, 3, 4}}); ld_relaxed_sys_v4(rows); }",
         "different sizes"),
        ("FIRST bulk_store(rows, stage, 8);", "a bulk copy of a wrong size"),
    ],
)  # fmt: skip
def test_misuse_is_fatal_and_named(code, complaint):
    outcomes = run_litmus([(0, 0, code)], num_out=1, seeds=3)
    assert outcomes.faults["fatal"] == 3
    assert complaint in outcomes.example["fatal"].text


def test_an_atomic_on_a_peers_memory_is_refused():
    code = "FIRST red_add_relaxed_gpu_u32(reinterpret_cast<u32*>(f), 1);"
    assert two_ranks("", code, seeds=3).faults["fatal"] == 3


def test_equal_seeds_give_equal_runs():
    role = (
        "for (int i = 0; i < 3; ++i) red_add_relaxed_gpu_u32(reinterpret_cast<u32*>(f), i);"
        "FIRST st_u64(out, ld_relaxed_sys_u32(reinterpret_cast<u32*>(f)));"
    )
    roles = [(0, block, role) for block in range(3)]
    one, two = (run_litmus(roles, num_out=1, seeds=20).seen for _ in range(2))
    assert one == two
    assert len(one) > 1
