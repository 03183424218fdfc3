"""Texts that tokenizers stumble over, for tests that compare two of them."""

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "It's 12:34 on 2026-11-29; pi is 3.14159, a million is 1,000,000 and 10**9 more.",
    "emoji \U0001f98a\U0001f30b\U0001f3ba, a family \U0001f468\u200d\U0001f469\u200d\U0001f467, "
    "a flag \U0001f1e9\U0001f1f0",
    "co\u00f6perate d\u00e9j\u00e0 vu na\u00efve \u00c5ngstr\u00f6m e\u0301",
    "\u96ea\u304c\u964d\u308b\u3002 \u0421\u043d\u0435\u0433 \u0438\u0434\u0451\u0442. "
    "\u0627\u0644\u062b\u0644\u062c",
    "def f(x):\n    return x**2  # squared\n\n\n\tif x != 0: y = {'a': [1, 2]}\r\n",
    "  leading, trailing  and   inner\tspaces \n \n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><s></s><|turn|><|end|>",
    "\x00\x07\x1b[31m\x7f\u200b\ufeff\ufffd",
    "a",
    " ",
)
