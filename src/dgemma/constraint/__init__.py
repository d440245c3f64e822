"""Languages that an answer must belong to: from a pattern to what each word of a vocabulary does."""
