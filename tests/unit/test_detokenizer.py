"""Streamed pieces: joined they are the whole text, and nothing is held back for long."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.engine.detokenizer import Detokenizer

REPLACEMENT = "\ufffd"
MOST_PENDING = 3

TEXTS = {
    "emoji": "🦊🌋🎺",
    "accents": "coöperate déjà",
    "combining": "cafe\u0301 n\u0303",
    "CJK": "雪が降る",
    "joined family": "👩‍👩‍👧 ok",
    "flag and skin": "🇫🇮👍🏽!",
    "mixed": " a é 雪 🦊  b\n\n\tc",
    "real replacement marks": "a\ufffd\ufffd\ufffd\ufffd\ufffdb",
    "leading spaces": "  two  spaces",
    "boxes": "─────┐",
}


def byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write each byte as."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {byte: chr(byte) for byte in plain}
    table |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


LETTERS = byte_letters()
SPECIAL = ["<|end|>", "<|user|>"]
# Tokens of several bytes, some of which end inside a character, begin inside one, or both.
LONG = [
    "雪".encode(),
    "🦊".encode(),
    b" the",
    "─".encode()[:2],
    "─".encode()[2:] + "─".encode()[:1],
    "─".encode()[1:] + "─".encode()[:1],
    "🦊".encode()[2:] + "🌋".encode()[:2],
    b"a" + "é".encode()[:1],
    "é".encode()[1:] + b"b",
    b"\xff\xfe",
]


@functools.cache
def byte_level() -> Any:
    """A tokenizer whose ids 0 to 255 are bytes; then ``LONG``, then ``SPECIAL``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {letter: byte for byte, letter in enumerate(LETTERS)}
    for token in LONG:
        vocab["".join(LETTERS[byte] for byte in token)] = len(vocab)
    assert len(vocab) == 256 + len(LONG)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[0],
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
    )


@functools.cache
def byte_fallback() -> Any:
    """A tokenizer of words with a byte token for what is not among them, as Llama 2 has."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ("▁the", "▁", "a", "▁雪", "b"):
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def whole(ids: list[int], skip_special_tokens: bool = True, tokenizer: Any = None) -> str:
    text = (tokenizer or byte_level()).decode(
        ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)
    return text


def pieces_of(
    ids: list[int], cuts: list[int], skip_special_tokens: bool = True, tokenizer: Any = None
) -> list[str]:
    """What comes out when ids are pushed in blocks that end at ``cuts``; the flush is last."""
    detokenizer = Detokenizer(tokenizer or byte_level(), skip_special_tokens)
    bounds = [0, *cuts, len(ids)]
    pieces = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(bounds)]
    return [*pieces, detokenizer.flush()]


def assert_streams(ids: list[int], cuts: list[int], skip_special_tokens: bool = True) -> None:
    """Joined pieces are the text, and after each push at most three tokens are held back."""
    pieces = pieces_of(ids, cuts, skip_special_tokens)
    assert "".join(pieces) == whole(ids, skip_special_tokens)
    given = ""
    for piece, end in zip(pieces, [*cuts, len(ids)], strict=False):
        given += piece
        if skip_special_tokens and any(token >= 256 + len(LONG) for token in ids):
            continue  # tokens without text may lie between the bytes of a character
        due = whole(ids[: max(0, end - MOST_PENDING)], skip_special_tokens)
        # The last mark of a text so far may be a character that is still to be completed.
        assert len(given) >= len(due) - due.endswith(REPLACEMENT), (given, due)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_every_block_cut(text: str) -> None:
    """Byte tokens, cut in all ways into two and three blocks, one by one, and at once."""
    ids = list(text.encode())
    assert whole(ids) == text
    assert_streams(ids, [])
    assert_streams(ids, list(range(1, len(ids))))
    for cut in range(len(ids) + 1):
        assert_streams(ids, [cut])
    for cuts in itertools.combinations(range(len(ids)), 2):
        assert_streams(ids, list(cuts))


@pytest.mark.parametrize("text", ["🦊é", "─雪a"])
def test_every_way_to_cut_a_short_text(text: str) -> None:
    ids = list(text.encode())
    for count in range(len(ids)):
        for cuts in itertools.combinations(range(1, len(ids)), count):
            assert_streams(ids, list(cuts))


def test_no_mark_before_it_is_due() -> None:
    """One byte at a time: nothing of a character is shown before its last byte is there."""
    for text in TEXTS.values():
        detokenizer = Detokenizer(byte_level())
        shown = ""
        for byte in text.encode():
            shown += detokenizer.push([byte])
            assert text.startswith(shown)
        assert shown + detokenizer.flush() == text


def test_an_unfinished_tail_is_flushed_once() -> None:
    ids = list(b"ok " + "🦊".encode()[:3])
    detokenizer = Detokenizer(byte_level())
    assert "".join(detokenizer.push([token]) for token in ids) == "ok "
    assert detokenizer.flush() == whole(ids)[3:] == REPLACEMENT
    assert detokenizer.flush() == ""


@pytest.mark.parametrize(
    "bad", [b"\xff", b"\x80", b"\xc3", b"\xe2\x94", b"\xf0\x9f\xa6", b"\xc0\xaf"]
)
def test_a_lone_invalid_byte_in_the_middle(bad: bytes) -> None:
    ids = list(b"one " + bad + " twö".encode())
    assert REPLACEMENT in whole(ids)
    assert_streams(ids, list(range(1, len(ids))))
    for cut in range(len(ids)):
        assert_streams(ids, [cut])


def test_garbage_cannot_stall_the_stream() -> None:
    for garbage in ([0xFF], [0x80], [0xF0, 0x9F, 0xA6], [0xE2, 0x94, 0xE2], [0xC3]):
        ids = garbage * 400
        assert_streams(ids, list(range(1, len(ids))))
        assert_streams(ids, list(range(7, len(ids), 7)))


def test_tokens_that_complete_one_character_and_begin_the_next() -> None:
    """Every push ends inside a character, for as long as the text goes; the others come out."""
    across = 256 + LONG.index("─".encode()[1:] + "─".encode()[:1])
    ids = [0xE2, *[across] * 50, 0x94, 0x80]
    assert whole(ids) == "─" * 51
    assert_streams(ids, list(range(1, len(ids))))
    detokenizer = Detokenizer(byte_level())
    shown = "".join(detokenizer.push([token]) for token in ids[:-2])
    assert len(shown) >= 47


def test_two_byte_tokens_over_three_byte_characters() -> None:
    """All ways to put three-byte characters together from tokens that straddle them."""
    for tokens in itertools.product(range(256 + 3, 256 + 6), [0xE2, 0x94, 0x80], repeat=2):
        for head in ([], [0xE2], [0xE2, 0x94]):
            ids = [*head, *tokens, 0x80, 0x61]
            assert_streams(ids, list(range(1, len(ids))))


class Counting:
    """A tokenizer that remembers the most tokens it was asked to decode at once."""

    def __init__(self) -> None:
        self.most = 0

    def decode(self, ids: list[int], **options: bool) -> str:
        self.most = max(self.most, len(ids))
        text = byte_level().decode(ids, **options)
        assert isinstance(text, str)
        return text


def test_a_push_costs_the_same_however_much_came_before() -> None:
    for ids in ([0xFF, 0xE2, 0x94] * 500, list(b"ab") * 500, list("🦊".encode()) * 300):
        tokenizer = Counting()
        detokenizer = Detokenizer(tokenizer)
        for token in ids:
            detokenizer.push([token])
        assert tokenizer.most < 100


any_tokens = st.lists(
    st.one_of(
        st.integers(0, 255),
        st.integers(0x80, 0xBF),
        st.sampled_from([0xE2, 0xF0, 0x9F, 0xC3, 0x61, 0x20]),
        st.integers(256, 256 + len(LONG) + len(SPECIAL) - 1),
    ),
    max_size=30,
)


@settings(deadline=None, max_examples=500, derandomize=True)
@given(any_tokens, st.data(), st.booleans())
def test_any_tokens_in_any_blocks(ids: list[int], data: st.DataObject, skip: bool) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids) + 1)))
    assert_streams(ids, cuts, skip)
    assert_streams(ids, list(range(1, len(ids))), skip)


def test_special_tokens() -> None:
    end, user = 256 + len(LONG), 256 + len(LONG) + 1
    ids = [*"hé".encode(), end, *"雪".encode()[:1], user, *"雪".encode()[1:], 0x61]
    for skip in (False, True):
        for cut in range(len(ids)):
            assert "".join(pieces_of(ids, [cut], skip)) == whole(ids, skip)
    assert whole(ids, True) == "hé雪a"
    assert "<|end|>" in "".join(pieces_of(ids, [3], False))
    detokenizer = Detokenizer(byte_level())
    assert [detokenizer.push([end]) for _ in range(5)] == [""] * 5 and detokenizer.flush() == ""


def test_spaces_before_punctuation_are_kept() -> None:
    """Also where the tokenizer's own settings would tidy them away behind the stream's back."""
    text = "it 's , well , n't . !"
    for cuts in ([], list(range(1, len(text)))):
        assert "".join(pieces_of(list(text.encode()), cuts)) == text


def test_byte_fallback() -> None:
    """Words and byte tokens mixed; the space before a word survives at a block's beginning."""
    tokenizer = byte_fallback()
    word = {text: tokenizer.convert_tokens_to_ids(text) for text in ("▁the", "a", "▁雪", "▁")}
    lists = [
        [word["▁the"], word["▁the"], word["a"]],
        [word["▁the"], *"🦊".encode(), word["▁the"]],
        [*"雪が降る🦊".encode()],
        [word["▁雪"], word["▁"], *"é".encode(), word["a"], *"🌋".encode()[:3], word["▁the"]],
        [0xFF, word["▁the"], 0x80, 0x80, 0x80, 0x80, 0x80, word["a"]],
        [*"é".encode(), word["a"], *"🌋".encode()[:3]],
    ]
    for ids in lists:
        expected = whole(ids, tokenizer=tokenizer)
        for cuts in ([], list(range(1, len(ids))), *([cut] for cut in range(len(ids)))):
            assert "".join(pieces_of(ids, cuts, tokenizer=tokenizer)) == expected


def test_byte_fallback_holds_nothing_back_for_long() -> None:
    """Their decoders spoil a whole run of bytes for one bad one; the stream does not wait."""
    for ids in ([0xFF] * 50, [*"🦊".encode()] * 20, [*"é".encode(), *[0x80] * 50]):
        detokenizer = Detokenizer(byte_fallback())
        shown = ""
        for count, token in enumerate(ids, start=1):
            shown += detokenizer.push([token])
            assert len(shown.encode()) >= count - MOST_PENDING
