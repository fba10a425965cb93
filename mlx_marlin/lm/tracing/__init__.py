"""Tracing of mlx-lm's decoder blocks as compiled graphs.

- `block`: replaces the classes of blocks, and runs the graphs
- `model_families`: the supported model families
- `inspection`, `snapshot`: whether a block can be traced, and whether it has changed
- `block_spec`: what blocks that share graphs have in common
- `fusion`: which operations are fused into products: norms, gating, residual sums
- `attention`, `kv_cache`: attention with norms and rope, and the cache that it reads
- `routing`, `experts`: mixtures of experts
"""
