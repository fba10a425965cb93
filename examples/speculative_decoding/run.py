"""Decodes with a draft model, and compares the tokens with those of plain decoding.

Run it from the repository's root:

    python examples/speculative_decoding/run.py
"""

from itertools import pairwise
from pathlib import Path

import mlx.nn as nn
import mlx_lm
from mlx_lm.utils import load_model

import mlx_marlin

EXAMPLES = Path(__file__).parents[1]
PROMPT = "def main():\n    parser = argparse."
COUNT, DRAFTED = 24, 3

model, tokenizer = mlx_lm.load(str(EXAMPLES / "tiny_llama/model"))
draft, _ = load_model(EXAMPLES / "speculative_decoding/draft")
nn.quantize(model, group_size=64, bits=4)  # the checkpoints have float16 weights
nn.quantize(draft, group_size=64, bits=8)
for each in (model, draft):
    mlx_marlin.optimize(each, layout="marlin", invariant=True)


def generate(**options: object) -> tuple[list[int], list[bool]]:
    """Returns the tokens after the prompt, and whether the draft model wrote each."""
    responses = [
        *mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=COUNT, **options)
    ]
    return [r.token for r in responses], [r.from_draft for r in responses]


plain, _ = generate()
tokens, accepted = generate(draft_model=draft, num_draft_tokens=DRAFTED)
print("plain greedy decoding:  ", *plain)
print(f"with drafts of {DRAFTED} tokens:", *tokens)
print("the same tokens:", tokens == plain)
print(f"text: {tokenizer.decode(tokens)!r}")

# A pass of the model verifies drafted tokens, up to the first that it rejects, and ends
# with a token of its own.
starts = [i for i in range(COUNT) if i == 0 or not accepted[i - 1]]
rejected = sum(
    sum(accepted[start:end]) < min(COUNT - start, DRAFTED)
    for start, end in pairwise([*starts, COUNT])
)
rate = sum(accepted) / (sum(accepted) + rejected)
print(f"{sum(accepted)} drafted tokens accepted, {rejected} rejected: {rate:.0%}")
print(f"{COUNT} tokens in {len(starts)} passes of the model")
