"""Values of a GGUF file's metadata under its architecture's prefix."""

from collections.abc import Iterator, Sequence

from mlx_marlin.checkpoints.gguf.container import Container


class Facts:
    """Values of the metadata, by keys without the architecture's prefix.

    Args:
        container: A GGUF file.

    Attributes:
        container: The file.
        prefix: The architecture and a dot.
        heads: Heads of queries.
        hidden_size: Features of a token.
        head_dim: Features of a head.
        layers: Decoder layers.

    Raises:
        ValueError: If a size is missing, or not the one that the tensors have. Other
            work grows with these sizes, which the file's bytes bound then.
    """

    def __init__(self, container: Container):
        self.container = container
        self.prefix = container.text("general.architecture") + "."
        self.heads = self.count("attention.head_count")
        self.hidden_size = self.count("embedding_length")
        self.head_dim = self.count(
            "attention.key_length", self.hidden_size // self.heads
        )
        self.layers = self.count("block_count")
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
        if default is not None and key not in self:
            return default
        return self.container.integer(self.prefix + key)

    def count(self, key: str, default: int | None = None) -> int:
        """Returns an integer above 0."""
        value = self.integer(key, default)
        if value == 0:
            raise self.refusal(key, "is not above 0")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Returns a finite number."""
        if default is not None and key not in self:
            return default
        return self.container.real(self.prefix + key)

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
        """Refuses a size that a tensor has not.

        Args:
            key: The key that says the size.
            tensor: The tensor.
            expected: Its last axes; None if any size will do.
        """
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
