"""outboard inside training frameworks: one module for each, which alone imports its framework.

`outboard.integrations.accelerate`, `outboard.integrations.transformers` and `outboard.integrations.lightning`; recipes
are in docs/frameworks.md. None of the frameworks is a dependency of outboard.
"""
