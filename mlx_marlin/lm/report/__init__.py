"""The per-model report: who serves each layer of a model, and how long it takes.

`layer_uses` finds what a model's layers compute, `decisions` decides who serves them,
`model_report` has the report and its texts. Nothing here evaluates an array.
"""
