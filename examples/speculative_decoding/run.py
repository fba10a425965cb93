"""Decodes with drafts, and compares the tokens with those of plain decoding.

Run it from the repository's root:

    python examples/speculative_decoding/run.py
"""

from pathlib import Path
from typing import Any

import mlx.nn as nn
import mlx_lm
from mlx_lm.utils import load_model
from tqdm import tqdm

import mlx_marlin

EXAMPLES = Path(__file__).parents[1]
PROMPT = """def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--foo', action='store_true')
    parser.add_argument("""
COUNT = 32

model, tokenizer = mlx_lm.load(str(EXAMPLES / "tiny_llama/model"))
draft, _ = load_model(EXAMPLES / "speculative_decoding/draft")
nn.quantize(model, group_size=64, bits=4)  # the checkpoints have float16 weights
nn.quantize(draft, group_size=64, bits=8)
for each in (model, draft):
    mlx_marlin.optimize(each, layout="marlin", invariant=True)


def generate(label: str, **options: object) -> list[Any]:
    """Returns the responses after the prompt, and shows a bar."""
    given = {"max_tokens": COUNT, **options}
    responses = mlx_marlin.stream_generate(model, tokenizer, PROMPT, **given)
    return [*tqdm(responses, label, total=COUNT, unit="token", disable=None)]


plain = generate("plain")
drafted = generate("a draft model", draft_model=draft)
looked_up = generate("lookup", lookup=True)
text = [each.token for each in plain]
print("plain greedy decoding:", *text)
print(f"text: {tokenizer.decode(text)!r}")
for name, responses in (("a draft model", drafted), ("lookup", looked_up)):
    last = responses[-1]
    print(
        f"{name}: {last.accepted} of {last.drafted} drafted tokens accepted, the same "
        f"tokens: {[each.token for each in responses] == text}"
    )
