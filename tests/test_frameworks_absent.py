"""Training frameworks are extras: nothing of outboard needs or imports one before it is asked to."""

from __future__ import annotations

from collections.abc import Callable


def test_no_framework_is_imported(python: Callable[..., str]) -> None:
    python(
        """
        import sys
        import outboard, outboard.integrations
        frameworks = {"transformers", "accelerate", "lightning", "pytorch_lightning", "peft", "trl"}
        assert not frameworks & sys.modules.keys(), frameworks & sys.modules.keys()
        """
    )


def test_one_that_is_missing_is_named(python: Callable[..., str]) -> None:
    python(
        """
        import importlib, sys
        for name, needs in {
            "accelerate": "accelerate", "transformers": "transformers", "lightning": "pytorch_lightning"
        }.items():
            for framework in ("transformers", "accelerate", "lightning", "pytorch_lightning"):
                sys.modules[framework] = None
            try:
                importlib.import_module(f"outboard.integrations.{name}")
            except ImportError as error:
                assert needs in str(error), error
            else:
                raise AssertionError(name)
        """
    )
