"""Small modules that a plan trains as PyTorch does, or refuses: each function builds one.

A function returns what a factory returns, `(model, batch[, loss])`, and is marked `equal` or
`refused`; `tests/capture/test_trap_corpus.py` runs them all.
"""
