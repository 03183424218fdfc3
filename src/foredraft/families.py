"""Kinds of model that are not decoders of attention layers alone, by Transformers' name of them."""

from __future__ import annotations

RECURRENT = frozenset(
    {
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
    }
)
"""Some or all layers keep a state that cannot be rolled back by length."""

ENCODERS = frozenset(
    {
        "albert",
        "bert",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "mpnet",
        "modernbert",
        "roberta",
        "xlm-roberta",
    }
)
"""They read a whole text at once and write none."""
