"""The per-model report: who serves each layer of a model, and how long it takes.

`layer_products` finds the products of a model's layers, `decisions` decides who serves
them, `model_report` has the report, its text and its JSON form. Nothing here evaluates
an array.
"""
