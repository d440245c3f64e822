"""Records out of short messages: six record types, and the prompt of the bundled forms model. No torch."""
