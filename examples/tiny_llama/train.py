"""Trains the demo's Llama on the running Python's standard library, with MLX.

    python examples/tiny_llama/train.py --tokens tokens.npz

writes `examples/tiny_llama/model/`, which `mlx_lm.load` reads. See README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.llama import Model, ModelArgs
from numpy.typing import NDArray
from tqdm import tqdm

# k is 320 or 640 and n is 64, 320, 640 or 1024: not all powers of two, all k whole
# groups of 64; 7.5 MB of float16.
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 320,
    "num_hidden_layers": 4,
    "intermediate_size": 640,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "vocab_size": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float16",
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
    "clean_up_tokenization_spaces": False,
}
Tree = dict[str, Any]
Step = Callable[[Tree, mx.array], tuple[mx.array, Tree]]


class DroppingLinear(nn.Linear):
    """A linear layer without bias whose outputs are dropped out in training."""

    def __init__(self, linear: nn.Linear, dropout: float) -> None:
        nn.Module.__init__(self)
        self.weight = linear.weight
        self.dropout = nn.Dropout(dropout)

    def __call__(self, x: mx.array) -> mx.array:
        """Maps `(..., k)` to `(..., n)`."""
        return self.dropout(super().__call__(x))


def make_model(config: dict[str, Any], dropout: float) -> Model:
    """mlx-lm's Llama with dropout on what its blocks add to the residual stream."""
    model = Model(ModelArgs.from_dict(config))
    for layer in model.layers:
        layer.self_attn.o_proj = DroppingLinear(layer.self_attn.o_proj, dropout)
        layer.mlp.down_proj = DroppingLinear(layer.mlp.down_proj, dropout)
    return model


def windows(
    stream: NDArray[np.uint16], context: int, batch: int, seed: int
) -> Iterator[mx.array]:
    """Yields batches of windows, each token once an epoch, without end.

    Args:
        stream: All tokens, uint16, 1-D.
        context: Tokens predicted in a window.
        batch: Windows in a batch.
        seed: Seed of the order.

    Yields:
        Tokens of shape `(batch, context + 1)`, int32.
    """
    random = np.random.default_rng(seed)
    tokens = mx.array(stream.astype(np.int32))
    offsets = mx.arange(context + 1)
    while True:
        # Each epoch cuts elsewhere.
        first = int(random.integers(context))
        starts = np.arange(first, stream.size - context, context)
        random.shuffle(starts)
        for i in range(0, len(starts) - batch + 1, batch):
            yield tokens[mx.array(starts[i : i + batch])[:, None] + offsets]


def mean_loss(model: nn.Module, tokens: mx.array) -> mx.array:
    """Mean cross entropy, in nats a token, of windows `(batch, context + 1)`."""
    logits = model(tokens[:, :-1]).astype(mx.float32)
    return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")


def held_out_loss(model: nn.Module, stream: NDArray[np.uint16], context: int) -> float:
    """Mean loss over the whole held-out stream, cut into windows of `context`."""
    count = (stream.size - 1) // context
    starts = np.arange(count)[:, None] * context
    tokens = stream.astype(np.int32)[starts + np.arange(context + 1)]
    losses = [
        mean_loss(model, mx.array(part)).item() * len(part)
        for part in np.array_split(tokens, math.ceil(count / 16))
    ]
    return sum(losses) / count


def make_optimizer(options: argparse.Namespace) -> optim.Optimizer:
    """AdamW with a linear warm-up and a cosine to zero; norms do not decay."""
    peak, warmup = options.rate, options.warmup
    decay = optim.cosine_decay(peak, max(options.steps - warmup, 1))
    rise = optim.linear_schedule(0.0, peak, warmup)
    rate = optim.join_schedules([rise, decay], [warmup])
    adamw = partial(optim.AdamW, rate, betas=[0.9, 0.95], bias_correction=True)
    return optim.MultiOptimizer(
        [adamw(weight_decay=options.weight_decay), adamw(weight_decay=0.0)],
        [lambda path, weight: weight.ndim > 1],
    )


def make_step(model: nn.Module, optimizer: optim.Optimizer, compute: mx.Dtype) -> Step:
    """Builds the compiled training step.

    The parameters that the step takes and returns are float32; the forward and
    backward passes run in `compute`.
    """

    def loss_of(parameters: Tree, tokens: mx.array) -> mx.array:
        model.update(tree_map(lambda weight: weight.astype(compute), parameters))
        return mean_loss(model, tokens)

    def step(parameters: Tree, tokens: mx.array) -> tuple[mx.array, Tree]:
        loss, gradients = mx.value_and_grad(loss_of)(parameters, tokens)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        return loss, optimizer.apply_gradients(gradients, parameters)

    state = [optimizer.state, mx.random.state]
    return mx.compile(step, inputs=state, outputs=state)


def train(options: argparse.Namespace, data: dict[str, NDArray[np.uint16]]) -> Model:
    """Trains a fresh model; its weights end as float16."""
    mx.random.seed(options.seed)
    model = make_model(options.config, options.dropout)
    parameters = model.trainable_parameters()
    optimizer = make_optimizer(options)
    optimizer.init(parameters)
    mx.eval(parameters, optimizer.state)
    step = make_step(model, optimizer, getattr(mx, options.compute))
    batches = windows(data["train"], options.context, options.batch, options.seed)
    progress = tqdm(
        range(1, options.steps + 1), desc="training", mininterval=5, disable=None
    )
    recent: list[mx.array] = []
    for count, tokens in zip(progress, batches, strict=False):
        loss, parameters = step(parameters, tokens)
        mx.async_eval(loss, parameters, optimizer.state)
        recent.append(loss)
        if count % options.report_every == 0 or count == options.steps:
            trained = mx.stack(recent).mean().item()
            recent.clear()
            model.update(parameters)
            model.eval()
            held_out = held_out_loss(model, data["held_out"], options.context)
            model.train()
            progress.write(f"step {count}: loss {trained:.4f}, held out {held_out:.4f}")
    model.update(tree_map(lambda weight: weight.astype(mx.float16), parameters))
    model.eval()
    return model


def save(model: Model, config: dict[str, Any], folder: Path) -> int:
    """Writes the folder that `mlx_lm.load` reads; returns the weights' bytes.

    A folder without `tokenizer.json` gets no tokenizer's configuration either:
    `mlx_lm.utils.load_model` reads it.
    """
    weights = dict(tree_flatten(model.parameters()))
    path = folder / "model.safetensors"
    mx.save_safetensors(str(path), weights, metadata={"format": "mlx"})
    contents = {"config.json": config}
    if (folder / "tokenizer.json").exists():
        contents["tokenizer_config.json"] = TOKENIZER_CONFIG
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return path.stat().st_size


def config_of(path: str) -> dict[str, Any]:
    """Reads a `config.json`, which names what differs from `CONFIG`."""
    given: dict[str, Any] = json.loads(Path(path).read_text())
    return CONFIG | given


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = partial(parser.add_argument, type=int)
    parser.add_argument(
        "--tokens", type=Path, required=True, help="token file (.npz), made if missing"
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "model", help="folder"
    )
    parser.add_argument(
        "--config", type=config_of, default=CONFIG, help="config.json of other sizes"
    )
    parser.add_argument(
        "--tokenizer", type=Path, help="tokenizer.json, made if missing; in --out"
    )
    parser.add_argument("--compute", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=1.5)
    parser.add_argument("--dropout", type=float, default=0.1)
    number("--steps", default=12000)
    number("--warmup", default=300)
    number("--batch", default=64, help="windows a step")
    number("--context", default=512, help="tokens a window")
    number("--report-every", default=500, help="steps between held-out losses")
    number("--seed", default=0)
    return parser.parse_args()


def main() -> None:
    """Makes the tokens if they are missing, trains, saves, and reports."""
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.tokens.exists():
        from corpus import write_tokens

        tokenizer = options.tokenizer or options.out / "tokenizer.json"
        write_tokens(tokenizer, options.tokens)
    with np.load(options.tokens) as file:
        data = {name: file[name] for name in ("train", "held_out")}
    start = time.perf_counter()
    model = train(options, data)
    seconds = time.perf_counter() - start
    size = save(model, options.config, options.out)
    loss = held_out_loss(model, data["held_out"], options.context)
    seen = options.steps * options.batch * options.context
    count = sum(weight.size for _, weight in tree_flatten(model.parameters()))
    print(
        f"{count:,} parameters, {size:,} bytes; {seen:,} tokens"
        f" ({seen / data['train'].size:.1f} epochs) in {seconds:.0f} s\n"
        f"held-out loss as float16: {loss:.4f} nats a token,"
        f" perplexity {math.exp(loss):.3f}"
    )


if __name__ == "__main__":
    main()
