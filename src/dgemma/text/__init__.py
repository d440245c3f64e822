"""Tokenizer, chat template, detokenizer, reply and tool-call parsing, stop strings. No tensors."""
