"""Model folders as people have them on disk: tiny random weights, a byte-level BPE tokenizer."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCAB = 352
CONTEXT = 256
SPECIAL = ("<pad>", "<s>", "</s>", "<|turn|>", "<|end|>")
"""Ids 0 to 4, in this order."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)

TEXTS = (
    "The red fox runs over the hill and the blue bird sings in the tree.",
    "one two three one two three one two three four five six seven",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))\n",
    "A letter to the harbour office: the boats leave at six in the morning.",
)
"""What the tokenizer is trained on; anything else comes out as shorter pieces or single bytes."""


@functools.cache
def _backend() -> str:
    """The trained tokenizer, as JSON (training takes a moment, and its result never changes)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return str(tokenizer.to_str())


def make_tokenizer(chat: bool = True, eos: str | None = "</s>") -> Any:
    """A byte-level BPE tokenizer of ``VOCAB`` tokens; it gives back any text unchanged."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token=eos,
        extra_special_tokens=["<|turn|>", "<|end|>"],
        clean_up_tokenization_spaces=False,
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(model_type: str = "llama", seed: int = 0, **options: Any) -> Any:
    """A tiny random model in float32; the same weights for the same arguments."""
    import transformers as tf

    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    config = tf.AutoConfig.for_model(model_type, **(common | options))
    return tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def make_folder(
    folder: Path,
    model_type: str = "llama",
    *,
    seed: int = 0,
    tokenizer: bool = True,
    chat: bool = True,
    max_shard_size: str = "5GB",
    **options: Any,
) -> Path:
    """Save a tiny random model with its tokenizer and return ``folder``."""
    model = make_model(model_type, seed, **options)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        make_tokenizer(chat).save_pretrained(folder)
    return folder


def make_parrot(
    folder: Path, says: Sequence[str], *, forever: bool = False, chat: bool = True, **options: Any
) -> Path:
    """Save a model that answers anything with the pieces ``says``, a token each, and return it.

    Then it ends, or begins again if ``forever``. By a wide margin: in any dtype, at argmax.
    """
    tokenizer = make_tokenizer(chat)
    tokenizer.add_tokens(list(says))
    ids = tokenizer.convert_tokens_to_ids(list(says))
    assert len(set(ids)) == len(ids) < 60
    model = make_model(vocab_size=len(tokenizer), **options)
    for layer in model.model.layers:  # the next token depends on the last one alone
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    with torch.no_grad():
        embedding.zero_(), head.zero_()
        embedding[:, 0] = 1.0
        for place, token_id in enumerate(ids):
            embedding[token_id] = torch.eye(64)[place + 1]
            head[token_id, place] = 2.0
        head[ids[0] if forever else 2, len(ids)] = 2.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def edit_json(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; ``None`` removes one."""
    content = json.loads(file.read_text(encoding="utf-8")) | changes
    content = {key: value for key, value in content.items() if value is not None}
    file.write_text(json.dumps(content), encoding="utf-8")


def make_gguf(file: Path, model: Any, chat: bool = True) -> Path:
    """Write a tiny llama model as llama.cpp would, its matrices in Q8_0."""
    import gguf
    import numpy as np

    config = model.config
    backend = json.loads(_backend())
    vocab = sorted(backend["model"]["vocab"].items(), key=lambda pair: pair[1])
    kinds = [
        gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token, _ in vocab
    ]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in backend["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(False)
    if chat:
        writer.add_chat_template(CHAT_TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        for part, count in heads.items():
            if part in name:  # llama.cpp keeps the halves of a rotary pair side by side
                pairs = array.reshape(count, 2, -1, array.shape[-1])
                array = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if array.ndim == 2 else None
        if kind is not None:
            array = gguf.quants.quantize(array, kind)
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(str(ours), array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
