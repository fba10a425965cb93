"""Experts of a GGUF file's layers."""

from typing import Any

from mlx_marlin.checkpoints.gguf.configuration.facts import Facts


def first_experts(facts: Facts) -> str:
    """Returns the gates of the first layer with experts; of layer 0 if none has."""
    return facts.first("ffn_gate_exps", "ffn_gate_up_exps")


def expert_rows(facts: Facts) -> int:
    """Returns the features between the two products of an expert."""
    name = first_experts(facts)
    return facts.rows(name) // (2 if "gate_up" in name else 1)


def routed(facts: Facts, count: str = "num_experts") -> dict[str, Any]:
    """Returns the numbers of experts, and of those that a token uses."""
    return {
        count: facts.count("expert_count"),
        "num_experts_per_tok": facts.count("expert_used_count"),
    }


def qwen_experts(facts: Facts) -> dict[str, Any]:
    """Returns what Qwen's models with experts have in common."""
    return {**routed(facts), "moe_intermediate_size": expert_rows(facts)}


def qwen_shared_expert(facts: Facts) -> dict[str, Any]:
    """Returns likewise, with an expert that every token uses."""
    shared = facts.rows(facts.first("ffn_gate_shexp"))
    return {**qwen_experts(facts), "shared_expert_intermediate_size": shared}
