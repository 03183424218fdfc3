"""How a draft model with another tokenizer is understood, on tokenizers trained here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from foredraft.drafters.base import DrafterContext
from foredraft.drafters.draft_model import DraftModelConfig, DraftModelDrafter
from foredraft.drafters.vocabulary import (
    Context,
    SameIds,
    SharedTokens,
    Spelling,
    Text,
    match_vocabularies,
)
from foredraft.errors import ConfigError
from foredraft.model.loader import prepare_target
from foredraft.params import SamplingParams, SpeculationParams
from tests.tiny import CONTEXT, VOCAB, engine, family_model, run, run_to_end

_TEXT = (
    "The harbour library opened its new reading room on Monday. The room has forty seats, two long "
    "oak tables and a glass roof that faces the old lighthouse. Naïve café, 12 €.\n\tEnd. "
)
_OTHER = (
    "def read(path: str) -> list[int]:\n    return [int(line) for line in open(path) if line]\n"
    "The old tables of the library are read on Monday. "
)


def byte_level(text: str, size: int, special: tuple[str, ...] = ("<s>", "</s>")) -> Any:
    """A byte-level BPE tokenizer, as GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1]
    )


def spaced(text: str, size: int) -> Any:
    """A BPE tokenizer that writes a space as ``▁`` and rare bytes as ``<0x0A>``, as Llama 2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special[:3], show_progress=False)
    tokenizer.train_from_iterator([text] * 4, trainer)
    tokenizer.add_tokens(special[3:])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def encode(tokenizer: Any, text: str) -> np.ndarray:
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


@pytest.fixture(scope="module")
def wide() -> Any:
    return byte_level(_TEXT * 3, 420)


def test_tokens_stand_for_bytes(wide: Any) -> None:
    for tokenizer in (wide, spaced(_TEXT, 120)):
        spelling = Spelling(tokenizer, len(tokenizer))
        text = "The old café\n\thas 12 €."
        assert spelling.bytes_of(encode(tokenizer, text)) == text.encode()
        assert spelling.bytes_of(np.array(spelling.spell(text.encode()))) == text.encode()
        assert spelling.begin == tokenizer.bos_token_id and spelling.end == tokenizer.eos_token_id
    assert not Spelling(wide, len(wide)).begins
    assert Spelling(spaced(_TEXT, 120), 500).begins


def test_padded_vocabularies_keep_their_ids(wide: Any) -> None:
    size = len(wide)
    for sizes in ((size, size + 60), (size + 60, size), (size + 8, size + 64)):
        found = match_vocabularies(wide, sizes[0], wide, sizes[1], "auto", "d")
        assert isinstance(found, SameIds)
        assert found.columns.tolist() == [i if i < sizes[1] else -1 for i in range(sizes[0])]
    ids = np.array([1, size + 3, 5])
    assert found.context(Context(), ids).tolist() == ids.tolist()
    cut = SameIds(100, 50)
    assert cut.context(Context(), np.array([3, 70])).tolist() == [3, 0]
    none = match_vocabularies(None, 10, wide, 12, "auto", "d")
    assert isinstance(none, SameIds)


def test_shared_tokens_are_translated_and_others_spelt(wide: Any) -> None:
    other = byte_level(_OTHER * 3, 380, ("<begin>", "<end>"))
    found = match_vocabularies(wide, len(wide), other, len(other), "auto", "d")
    assert isinstance(found, SharedTokens)
    mine, theirs = Spelling(wide, len(wide)), Spelling(other, len(other))
    shared = [i for i, column in enumerate(found.columns) if column >= 0]
    assert 256 < len(shared) < len(wide)
    for token in shared:
        if isinstance(mine.surfaces[token], bytes):
            assert mine.surfaces[token] == theirs.surfaces[found.columns[token]]
    assert found.columns[wide.eos_token_id] == other.eos_token_id  # by what they are for
    text = "The harbour library opened its café.\n"
    ids = encode(wide, text)
    known = Context()
    for end in (3, 4, len(ids)):  # as the text grows
        got = found.context(known, ids[:end])
        assert theirs.bytes_of(got) == mine.bytes_of(ids[:end])
    # A request that is met again with a shorter text.
    assert theirs.bytes_of(found.context(known, ids[:5])) == mine.bytes_of(ids[:5])


def test_two_ways_of_writing_a_space(wide: Any) -> None:
    other = spaced(_TEXT, 120)
    found = match_vocabularies(wide, len(wide), other, len(other), "shared", "d")
    assert isinstance(found, SharedTokens)
    (room,) = [i for t, i in wide.get_vocab().items() if t == "Ġthe"]
    assert other.convert_ids_to_tokens(int(found.columns[room])) == "▁the"
    byte = wide.get_vocab()["ð"]  # how a byte-level vocabulary writes 0xF0
    assert other.convert_ids_to_tokens(int(found.columns[byte])) == "<0xF0>"
    # It begins its texts with a token that the target does not have.
    assert found.context(Context(), encode(wide, "The"))[0] == other.bos_token_id


def test_too_little_in_common_goes_by_way_of_text() -> None:
    wide = byte_level(_TEXT * 3, 2000)  # many more than there are bytes
    narrow = byte_level("", 258)
    size = 6 * len(wide)
    found = match_vocabularies(wide, size, narrow, len(narrow), "text", "d")
    assert isinstance(found, Text)
    known = Context()
    ids = encode(wide, _TEXT * 3)
    spelling = Spelling(narrow, len(narrow))
    for end in range(1, len(ids)):
        got = spelling.bytes_of(found.context(known, ids[:end])).decode()
        whole = Spelling(wide, size).bytes_of(ids[:end]).decode("utf-8", "replace")
        assert got == whole
    assert 0 < known.num_tokens < len(ids)
    # What is drafted is read behind the text, as the target would have written it.
    for end in (7, 20, 41):
        rest = (_TEXT * 3).encode()[len(Spelling(wide, size).bytes_of(ids[:end])) :][:30]
        drafted = found.drafted(ids[:end], encode(narrow, rest.decode("utf-8", "ignore")))
        assert drafted[:4].tolist() == ids[end : end + 4].tolist()
    assert not len(found.drafted(ids[:9], np.empty(0, dtype=np.int64)))


def test_nothing_in_common_is_refused(wide: Any) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    alien = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"漢字": 0, "[U]": 1}, unk_token="[U]")),
        unk_token="[U]",
    )
    with pytest.raises(ConfigError, match="shares no token with the target"):
        match_vocabularies(wide, len(wide), alien, 2, "auto", "d")
    with pytest.raises(ConfigError, match="has no tokenizer"):
        match_vocabularies(wide, len(wide), None, 2, "text", "d")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_noise_is_matched_by_token(temperature: float) -> None:
    """The target with its vocabulary shuffled, as its own draft model, is always right."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    def words(order: np.ndarray) -> Any:
        vocab = {f"w{token}": place for place, token in enumerate(order.tolist())}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer)

    order = np.random.default_rng(0).permutation(VOCAB)
    target = prepare_target("target", family_model("llama"), words(np.arange(VOCAB)), CONTEXT)
    model = family_model("llama")
    with torch.no_grad():
        for table in (model.get_input_embeddings(), model.get_output_embeddings()):
            table.weight.copy_(table.weight[torch.from_numpy(order)].clone())
    shuffled = prepare_target("shuffled", model, words(order), CONTEXT)
    context = DrafterContext(VOCAB, CONTEXT, target.tokenizer, "draft-model")
    own = DraftModelDrafter(DraftModelConfig(), context, shuffled)
    assert isinstance(own.vocabulary, SharedTokens)
    prompts = [[5, 9, 40, 2, 77], [30]]
    sampling = SamplingParams(temperature, seed=4, max_tokens=40, ignore_eos=True)
    the_engine = engine(target, {"draft-model": own})
    ended = run_to_end(the_engine, prompts, sampling, SpeculationParams("draft-model", 6))
    assert [one.ids for one in ended] == run(
        engine(target), prompts, sampling, SpeculationParams("none")
    )
    for one in ended:
        assert one.stats.num_accepted_tokens == one.stats.num_draft_tokens > 0
