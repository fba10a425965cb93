"""Tracing of mlx-lm's decoder blocks as compiled graphs.

- `block`: replaces the classes of blocks, and runs the graphs
- `model_families`: the supported model families
- `inspection`: whether a block can be traced
- `block_spec`: what blocks that share graphs have in common, and what has changed
- `fusion`: which operations are fused into products: norms, gating, residual sums
- `attention`, `kv_cache`: attention with norms and rope, and the cache that it reads
- `experts`: mixtures of experts
"""
