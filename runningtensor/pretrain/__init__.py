"""Pretraining of language models: the tokenizer and the data."""
