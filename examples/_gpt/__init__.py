"""Parts of ``examples/train_gpt.py``: text, model, training run, checkpoint, report."""
