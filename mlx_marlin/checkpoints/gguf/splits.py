"""Ways to divide a text into words, by the names that GGUF files give them.

They are facts about llama.cpp: `llama_vocab::impl::load` in src/llama-vocab.cpp, read
at commit 00ad355e. Its regular expressions for these names are those of transformers'
`GGUF_PRE_TOKENIZER_SPLITS`, and GPT-2's own. Those for "default", and for files without
a name, are not: they divide punctuation and digits too.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """What goes with a way to divide a text."""

    # Whether a word of the vocabulary is one token, whatever the merges give
    # (llama.cpp's `ignore_merges`)
    whole_words: bool
    # Whether a text begins with BOS if the file does not say it (`add_bos`)
    begins: bool


_PLAIN = Split(whole_words=False, begins=False)
LLAMA3 = (
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
)
QWEN2 = ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez")
GPT4O = ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")
SAME = dict.fromkeys(("glm4", "chatglm-bpe"), "smaug-bpe")
"""Names that transformers does not know -> one that it divides texts for alike."""
SPLITS: dict[str, Split] = {
    **dict.fromkeys((*LLAMA3, "tekken"), Split(whole_words=True, begins=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", *SAME), _PLAIN),
    **dict.fromkeys(QWEN2, _PLAIN),
    **dict.fromkeys(GPT4O, _PLAIN),
    **dict.fromkeys(("qwen35", "gpt-2"), _PLAIN),
}
"""By the value of `tokenizer.ggml.pre`."""
