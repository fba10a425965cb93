"""Values of a GGUF file's metadata under its architecture's prefix."""

from collections.abc import Iterator, Sequence
from typing import Any

from mlx_marlin.checkpoints.gguf.architectures import layers_of
from mlx_marlin.checkpoints.gguf.container import Container


class Facts:
    """Values of the metadata, by keys without the architecture's prefix.

    Sizes are compared with the tensors: other work grows with these sizes, which the
    file's bytes bound then.
    """

    def __init__(self, container: Container):
        self.container = container
        self.prefix = container.text("general.architecture") + "."
        self.heads = self.count("attention.head_count")
        self.hidden_size = self.count("embedding_length")
        self.head_dim = self.count(
            "attention.key_length", self.hidden_size // self.heads
        )
        self.layers = layers_of(container).decoders
        for layer in range(self.layers):  # ends at the first that the file lacks
            name = f"blk.{layer}.attn_norm.weight"
            if not self.has(name):
                raise self.refusal("block_count", f"needs a tensor {name!r}")
        self.check_size(
            "embedding_length", "token_embd.weight", (None, self.hidden_size)
        )

    def has(self, tensor: str) -> bool:
        """Returns whether there is a tensor."""
        return tensor in self.container.tensors

    def __contains__(self, key: str) -> bool:
        return self.prefix + key in self.container.metadata

    def __iter__(self) -> Iterator[str]:
        for key in self.container.metadata:
            if key.startswith(self.prefix):
                yield key.removeprefix(self.prefix)

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns an integer of at least 0."""
        return self.container.integer(self.prefix + key, default)

    def count(self, key: str, default: int | None = None) -> int:
        """Returns an integer above 0."""
        value = self.integer(key, default)
        if value == 0:
            raise self.refusal(key, "is not above 0")
        return value

    def counts(self, key: str) -> list[int]:
        """Returns an integer of at least 0 for each layer."""
        value = self.container.metadata.get(self.prefix + key)
        numbers = value.tolist() if isinstance(value, memoryview) else None
        if (
            numbers is None
            or len(numbers) != self.layers
            or not all(isinstance(number, int) and number >= 0 for number in numbers)
        ):
            raise self.refusal(key, f"is not an integer for each of {self.layers}")
        return numbers

    def each(self, key: str) -> list[int]:
        """Returns likewise, where one integer may stand for all layers."""
        if isinstance(self.container.metadata.get(self.prefix + key), memoryview):
            return self.counts(key)
        return [self.integer(key)] * self.layers

    def first(self, *stems: str) -> str:
        """Returns the weight of the first layer that has it; of layer 0 if none has."""
        names = [
            f"blk.{layer}.{stem}.weight"
            for layer in range(self.layers)
            for stem in stems
        ]
        return next(filter(self.has, names), names[0])

    def real(self, key: str, default: float | None = None) -> float:
        """Returns a finite number."""
        if default is not None and key not in self:
            return default
        return self.container.real(self.prefix + key)

    def flag(self, key: str) -> bool:
        """Returns a truth value; False if there is none."""
        return self.container.flag(self.prefix + key)

    def positive(self, key: str, default: float | None = None) -> float:
        """Returns a number above 0."""
        value = self.real(key, default)
        if value <= 0:
            raise self.refusal(key, "is not above 0")
        return value

    def rows(self, tensor: str) -> int:
        """Returns the rows of a matrix, or of each matrix of a stack."""
        shape = self._shape(tensor)
        return shape[-2] if len(shape) > 1 else shape[0]

    def check_size(self, key: str, tensor: str, expected: Sequence[int | None]) -> None:
        """Refuses a size if the last axes of a tensor are others; None is any size."""
        shape = self._shape(tensor)
        axes = shape[-len(expected) :]
        wrong = len(axes) < len(expected) or any(
            size not in (None, axis) for size, axis in zip(expected, axes, strict=True)
        )
        if wrong:
            raise self.refusal(key, f"does not fit tensor {tensor!r} of shape {shape}")

    def refusal(self, key: str, reason: str) -> ValueError:
        """Returns an error about a key."""
        return self.container.refusal(self.prefix + key, reason)

    def _shape(self, tensor: str) -> tuple[int, ...]:
        if not self.has(tensor):
            raise ValueError(f"{self.container.path}: tensor {tensor!r} is missing")
        return self.container.tensors[tensor].shape


def first_experts(facts: Facts) -> str:
    """Returns the gates of the first layer with experts; of layer 0 if none has."""
    return facts.first("ffn_gate_exps", "ffn_gate_up_exps")


def expert_rows(facts: Facts) -> int:
    """Returns the features between the two products of an expert."""
    name = first_experts(facts)
    return facts.rows(name) // (2 if "gate_up" in name else 1)


def routed(facts: Facts, count: str = "num_experts") -> dict[str, Any]:
    """Returns the numbers of experts, and of those that a token uses."""
    experts, used = facts.count("expert_count"), facts.count("expert_used_count")
    if used > experts:
        raise facts.refusal("expert_used_count", f"is more than {experts} experts")
    facts.check_size("expert_count", first_experts(facts), (experts, None, None))
    return {count: experts, "num_experts_per_tok": used}


def qwen_experts(facts: Facts) -> dict[str, Any]:
    """Returns what Qwen's models with experts have in common."""
    return {**routed(facts), "moe_intermediate_size": expert_rows(facts)}


def qwen_shared_expert(facts: Facts) -> dict[str, Any]:
    """Returns likewise, with an expert that every token uses."""
    shared = facts.rows(facts.first("ffn_gate_shexp"))
    return {**qwen_experts(facts), "shared_expert_intermediate_size": shared}
