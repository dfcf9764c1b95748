"""What ranks make of each other's headers, word by word."""

import numpy as np
import pytest

from deepep_cupy.protocol.headers import (
    ARGUMENTS,
    DTYPE_CODES,
    MAX_TAG,
    SIGNATURE,
    WORDS,
    Kind,
    Layout,
    Refusal,
    RefusalCode,
    call_word,
    describe_refusal,
    difference,
    dtype_code,
    dtype_label,
    dtype_name,
    kind_of,
    tagged,
    verdict,
)
from deepep_cupy.protocol.sizes import SCALE_GROUP, num_scales
from deepep_cupy.reference.combine import ADDABLE
from deepep_cupy.reference.quant import GROUP, num_groups, quantize

LIMITS = {"num_max_tokens_per_rank": 128, "num_experts": 64}


def header(**words):
    return dict.fromkeys(WORDS, 0) | {"kind": Kind.DISPATCH} | words


def test_facts_of_the_protocol_are_those_of_the_reference():
    known = tuple(name for name in DTYPE_CODES if not name.startswith("float8"))
    assert known == ADDABLE
    assert SCALE_GROUP == GROUP
    for hidden in (1, GROUP - 1, GROUP, GROUP + 1, 5 * GROUP):
        codes, scales = quantize(np.ones((1, hidden), np.float32))
        assert num_scales(hidden, packed=False) == scales.shape[1] == num_groups(codes.shape[1])
        _, packed = quantize(np.ones((1, hidden), np.float32), round_scale=True, use_ue8m0=True)
        assert num_scales(hidden, packed=True) == packed.shape[1]


def test_equal_headers_agree():
    assert difference("dispatch", [header()] * 3) is None
    assert verdict("dispatch", [header()] * 3, **LIMITS) is None


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (0, 3, "rank 0 calls dispatch, rank 1 calls dispatch in a graph (captured call 3)"),
        (2, 3, "in a graph (captured call 2), rank 1 calls dispatch in a graph (captured call 3)"),
        (tagged(5), tagged(6), "dispatch with tag 5, rank 1 calls dispatch with tag 6"),
        (tagged(None), tagged(0), "rank 0 calls dispatch, rank 1 calls dispatch with tag 0"),
        (tagged(MAX_TAG), MAX_TAG, f"with tag {MAX_TAG}, rank 1 calls dispatch in a graph"),
    ],
)
def test_calls_of_one_form_are_told_apart(one, other, said):
    words = [header(kind=call_word(Kind.DISPATCH, each)) for each in (one, other)]
    assert all(0 <= each["kind"] < 1 << 32 for each in words)
    assert all(kind_of(each["kind"]) == Kind.DISPATCH for each in words)
    assert said in verdict("dispatch", words, **LIMITS)
    assert verdict("dispatch", [words[0]] * 2, **LIMITS) is None
    words[1]["refusal"] = RefusalCode.ARGUMENT
    assert "rank 1 refused the call" in verdict("dispatch", words, **LIMITS)  # the better news


def test_words_behind_the_signature_may_differ():
    for word in set(WORDS) - set(SIGNATURE) - {"refusal"}:
        assert verdict("dispatch", [header(), header(**{word: 9})], **LIMITS) is None


@pytest.mark.parametrize("word", SIGNATURE)
def test_each_word_of_the_signature_is_compared(word):
    text = verdict("dispatch", [header(), header(**{word: 1})], **LIMITS)
    assert text.startswith("dispatch(): ")
    assert "rank 0" in text
    assert "rank 1" in text
    assert text.endswith("nothing was moved on any rank.")


def test_differences_are_shown_as_people_say_them():
    kinds = [header(), header(kind=Kind.COMBINE)]
    assert "rank 0 calls dispatch, rank 1 calls combine" in difference("dispatch", kinds)
    dtypes = [header(dtype=1), header(dtype=dtype_code("V7", 7))]
    assert "rank 0: bfloat16, rank 1: opaque 7-byte items" in difference("dispatch", dtypes)
    layouts = [header(layout=Layout.MASK), header(layout=Layout.CACHED)]
    assert "rank 0: is_token_in_rank, rank 1: handle" in difference("dispatch", layouts)


def test_a_difference_of_calls_comes_before_a_refusal():
    headers = [header(refusal=RefusalCode.ARGUMENT), header(kind=Kind.BARRIER)]
    assert "rank 1 calls barrier" in verdict("dispatch", headers, **LIMITS)


def test_a_refusal_comes_before_what_it_left_empty():
    refused = header(refusal=RefusalCode.TOO_MANY_TOKENS, refusal_value=129, dtype=3)
    text = verdict("dispatch", [header(), refused], **LIMITS)
    wanted = "rank 1 refused the call: it has 129 tokens, more than num_max_tokens_per_rank = 128"
    assert wanted in text


def test_all_refusing_ranks_are_named():
    refused = header(refusal=RefusalCode.DUPLICATE_EXPERT, refusal_value=5)
    text = verdict("dispatch", [refused, header(), refused, refused], **LIMITS)
    assert "rank 0 refused" in text
    assert text.endswith("nothing was moved on any rank (refused too on: 2, 3).")


@pytest.mark.parametrize(
    ("code", "value", "words"),
    [
        (RefusalCode.EXPERT_OUT_OF_RANGE, 13, ("token 13", "outside -1..63")),
        (RefusalCode.DUPLICATE_EXPERT, 13, ("token 13", "twice")),
        (RefusalCode.POOL_EXHAUSTED, 40, ("40 more MiB",)),
        (RefusalCode.ARGUMENT, ARGUMENTS.index("topk_idx"), ("argument 'topk_idx' is not",)),
        (RefusalCode.ARGUMENT, 0, ("its arguments are not allowed",)),
        (RefusalCode.ARGUMENT, 99, ("its arguments are not allowed",)),
    ],
)
def test_refusals_say_why(code, value, words):
    text = describe_refusal("combine", 3, Refusal(code, value), 64)
    assert text.startswith("combine(): rank 3 refused the call: ")
    assert [word for word in words if word not in text] == []


def test_an_unknown_refusal_is_still_one():
    assert "rank 0 refused" in verdict("dispatch", [header(refusal=77), header()], **LIMITS)


def test_dtype_codes_are_distinct_and_have_names():
    assert len(set(DTYPE_CODES.values())) == len(DTYPE_CODES)
    for name, code in DTYPE_CODES.items():
        assert dtype_code(name, 99) == code
        assert dtype_name(code) == name
    assert dtype_code("V12", 12) != dtype_code("V13", 13)


OPAQUE = [
    np.dtype(text) for text in ("c8", "M8[ns]", "M8[us]", "m8[ns]", "V8", "S8", ">f8", ">i8", "U2")
]
OPAQUE += [
    np.dtype([("a", "f4"), ("b", "i4")]),
    np.dtype([("a", "f4"), ("c", "i4")]),
    np.dtype([("a", "f4"), ("b", "f4")]),
    np.dtype([("a", "f4", 2)]),
    np.dtype({"names": ["a"], "formats": ["f4"], "offsets": [4], "itemsize": 8}),
    np.dtype({"names": ["a"], "formats": ["f4"], "offsets": [0], "itemsize": 8}),
]


def test_opaque_dtypes_of_one_size_are_told_apart():
    codes = [dtype_code(dtype_label(dtype), dtype.itemsize) for dtype in OPAQUE]
    assert len(set(codes)) == len(OPAQUE)
    assert all(256 < code < 2**31 for code in codes)
    text = difference("dispatch", [header(dtype=codes[0]), header(dtype=codes[4])])
    assert "rank 0: complex64, rank 1: opaque 8-byte items" in text


def test_a_huge_item_has_a_code():
    big = np.dtype("V1000000")
    assert 0 < dtype_code(dtype_label(big), big.itemsize) < 2**31
