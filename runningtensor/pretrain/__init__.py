"""Pretraining of language models: tokenizer, data, recipes, the engine, checkpoints."""
