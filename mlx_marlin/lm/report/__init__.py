"""The per-model report: who serves each layer of a model, and how long it takes.

`layer_groups` finds the products of a model's layers (`layer_product`), `decisions`
decides who serves them on a `target`, `model_report` has the report's values and JSON
form, `table` its text. Nothing here evaluates an array.
"""
